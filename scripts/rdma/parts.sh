#!/bin/busybox sh
# Runs in the guest what test.sh wrote to /bin/parts, a line each: TITLE|TOPOLOGY|[NAME=VALUE...] TEST BINARY [ARGUMENTS...]
# Between lines that test.sh looks for it prints what the binary prints. A part that hangs is ended.
export KVC_RDMA_GUEST=1 RUST_BACKTRACE=1

# With its path, since busybox takes programs of its own (sync) for those in PATH.
run() {
  local settings=
  while [ "${1#*=}" != "$1" ]; do settings="$settings $1"; shift; done
  local program=$1
  shift
  # shellcheck disable=SC2086
  timeout 300 env $settings "/bin/$program" "$@" --test-threads=1 < /dev/null
}

worst=0
while IFS='|' read -r title topology program; do
  read -r from _ < /proc/uptime
  echo "=== begin $title"
  # shellcheck disable=SC2086
  topology "$topology" && run $program
  status=$?
  read -r to _ < /proc/uptime
  echo "=== end $status $from $to $title"
  [ $status = 0 ] || worst=1
done < /bin/parts
exit $worst

# Sourced by every script here: paths, and lines that say what happens and how long it took.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
env_dir=$root/.env                       # ignored by git; everything the set-up makes
venv=$env_dir/sglang
model=$env_dir/model
py=$venv/bin/python
started=$SECONDS

# Engines and compilers share the machine: one thread each in torch, no downloads at run time.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
export PYTHONDONTWRITEBYTECODE=1 PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf '[%4d s] %s\n' "$((SECONDS - started))" "$*"; }

# step TITLE COMMAND...: runs the command, says how long it took, and stops the script if it fails.
step() {
  local title=$1 from=$SECONDS rc=0
  shift
  say "$title …"
  set +e   # not `"$@" || …`, which would switch `set -e` off inside the command
  (set -e; "$@")
  rc=$?
  set -e
  if [ "$rc" != 0 ]; then say "$title: FAILED (exit status $rc)"; exit "$rc"; fi
  say "$title: done in $((SECONDS - from)) s"
}

die() { printf '%s\n' "$*" >&2; exit 1; }

# What the workspace's tests and checks are built with, the same everywhere: another set is another compile.
features() {
  local set=kvc-rdma/perf
  ! can_build_verbs || set+=,kvc-rdma/verbs,kvc-engine-ext/verbs,kvc-python-shim/verbs
  echo "$set"
}

# Whether ibverbs-sys can be built: it asks cmake and libclang; and rdma-core's library to link with (ADR 0081).
can_build_verbs() {
  command -v cmake >/dev/null && compgen -G '/usr/lib/llvm-*/lib/libclang[.-][s0-9]*' >/dev/null &&
    [ "$(cc -print-file-name=libibverbs.so 2>/dev/null)" != libibverbs.so ]
}

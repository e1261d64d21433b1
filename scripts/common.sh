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

#!/usr/bin/env bash
# usage: scripts/setup-engine.sh [--release | --no-wheel]
# Makes .env: SGLang 0.5.10.post1 on CPU with the kvc wheel in it (.env/sglang) and a tiny model (.env/model).
# For Debian 12 with Rust and CPython 3.11; PYTHON names another interpreter of that version. Needs about 3.2 GB of disk and
# the package index. The wheel has the verbs mover where that can be built (cmake, libclang, rdma-core's headers). Safe to repeat: each part is made once for its inputs, and made anew when they change or when
# it was interrupted. --release builds the wheel as a user gets it, for benches; --no-wheel leaves kvc out.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
engine=$root/scripts/engine
sglang=0.5.10.post1
verbs_packages="cmake libclang-dev pkg-config libibverbs-dev"

main() {
  mkdir -p "$env_dir"
  exec 9>"$env_dir/lock"
  flock -n 9 || { say "waiting for another set-up"; flock 9; }
  find_python
  system_packages
  local key
  key=$(digest "$engine/requirements.lock" "$engine/stub_cuda.py" "$engine/site" <<<"$("$python" -VV) $python")
  made "$venv" "$key" || step "SGLang $sglang into .env/sglang (about 1 GB to download)" make_venv "$key"
  key=$(digest "$engine/tools.lock" <<<"$(cat "$venv/.stamp")")
  made "$env_dir/tools" "$key" || step "maturin, pytest, mypy, ruff" make_tools "$key"
  key=$(digest "$engine/tiny_model.py" <<<"$(cat "$venv/.stamp")")
  made "$model" "$key" || step "tiny model into .env/model" make_model "$key"
  case ${1:-} in
    --no-wheel) ;;
    --release) step "kvc wheel (release) into .env/sglang" install_wheel release ;;
    "") step "kvc wheel into .env/sglang" install_wheel dev ;;
    *) die "unknown option $1: --release or --no-wheel" ;;
  esac
  say "engine environment ready"
}

# digest PATH... with more text on stdin: one hash over contents and names.
digest() { { cat; cd "$engine" && find "$@" -type f ! -name '*.pyc' -print0 | sort -z | xargs -0 sha256sum; } | sha256sum | cut -c1-16; }
made() { [ "$(cat "$1/.stamp" 2>/dev/null)" = "$2" ]; }

find_python() {
  python=${PYTHON:-}
  local try
  for try in ${PYTHON:-python3.11 python3}; do
    if "$try" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then python=$try; break; fi
    python=
  done
  [ -n "$python" ] || die "CPython 3.11 not found${PYTHON:+ (PYTHON=$PYTHON is another version)}: apt-get install python3.11 python3.11-venv, or set PYTHON"
  command -v cargo >/dev/null || die "cargo not found: install Rust 1.95 or later from rustup or your distribution"
}

# gcc and binutils make the CUDA stubs and link Rust; Debian's Python splits ensurepip off.
system_packages() {
  local need=() p
  for p in gcc binutils libc6-dev git; do dpkg -s "$p" >/dev/null 2>&1 || need+=("$p"); done
  "$python" -c 'import ensurepip' 2>/dev/null || need+=(python3.11-venv)
  [ ${#need[@]} = 0 ] || step "apt-get install ${need[*]}" apt_install "${need[@]}"
  can_build_verbs || step "apt-get install $verbs_packages" apt_install_or_without $verbs_packages
}

apt_install_or_without() {
  apt_install "$@" && can_build_verbs ||
    say "kvc is built WITHOUT the verbs mover (feature verbs), the RDMA tests are skipped: install $*"
}

apt_install() {
  local sudo=
  [ "$(id -u)" = 0 ] || sudo=sudo
  $sudo apt-get update -qq && DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

# A venv knows its own path, so it is made in place; without its stamp it counts as not made.
make_venv() {
  rm -rf "$venv" "$env_dir/wheel"
  "$python" -m venv "$venv"
  "$py" -m pip install --quiet --no-deps -r "$engine/requirements.lock"
  local site
  site=$("$py" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  "$py" "$engine/stub_cuda.py" "$site"
  cp -r "$engine/site/." "$site/"
  SGLANG_USE_CPU_ENGINE=1 "$py" -W ignore -c 'import sglang.launch_server, sglang.srt.managers.scheduler, torch
print(f"  sglang {sglang.__version__}, torch {torch.__version__}")' 2>"$env_dir/import.log" || { tail -20 "$env_dir/import.log" >&2; return 1; }
  echo "$1" >"$venv/.stamp"
}

make_tools() {
  "$py" -m pip install --quiet --no-deps -r "$engine/tools.lock"
  mkdir -p "$env_dir/tools" && echo "$1" >"$env_dir/tools/.stamp"
}

make_model() {
  rm -rf "$model" "$model.new"
  "$py" -W ignore "$engine/tiny_model.py" "$model.new"
  echo "$1" >"$model.new/.stamp"
  mv "$model.new" "$model"
}

# Cargo decides whether anything has to be compiled; the wheel is installed and the engine patched only when it changed.
install_wheel() {
  local out=$env_dir/wheel.new now features=()
  ! can_build_verbs || features=(--features verbs)
  rm -rf "$out"
  (cd "$root/python-shim" && "$venv/bin/maturin" build --profile "$1" "${features[@]}" --interpreter "$py" --out "$out" 2>"$env_dir/wheel.log") ||
    { tail -40 "$env_dir/wheel.log" >&2; return 1; }
  now=$("$py" "$engine/wheel_digest.py" "$out"/*.whl)
  if [ "$(cat "$venv/.wheel" 2>/dev/null)" = "$now" ]; then say "  unchanged"; rm -rf "$out"; return; fi
  rm -f "$venv/.wheel"
  if "$py" -c 'import kvc' 2>/dev/null; then
    "$py" -m kvc.sglang.patch revert ||
      "$py" -m pip install --quiet --no-deps --force-reinstall "sglang==$sglang"   # patched by a series that is gone
  fi
  "$py" -m pip install --quiet --no-deps --force-reinstall "$out"/*.whl
  "$py" -m kvc.sglang.patch apply
  rm -rf "$out"
  echo "$now" >"$venv/.wheel"
}

main "$@"

#!/usr/bin/env bash
# Installs DeepInfer from this checkout, and runs it.
#
#   ./build.sh                  install core and one backend, editable, into the active environment
#   ./build.sh demo [FLAGS]     the same, then generate text with examples/offline_inference.py
#   ./build.sh test [ARGS]      the same with the test tools, then pytest ARGS
#
# With no virtual or conda environment active, .venv is created beside this file and used.
#
#   DEEPINFER_ACCELERATOR       backend to install: nvidia, ascend, cpu, or the name of a third party's (unset: probe)
#   DEEPINFER_TORCH_SPEC        torch to install (default on cpu: torch==2.13.0, unless a fitting one is there)
#   DEEPINFER_HF_MODEL_DIR      checkpoint for the demo (or: ./build.sh demo --model DIR)
#   PYTHON                      interpreter for .venv (default: the first python3 that is 3.11 or newer)
#
# Second runs install nothing: a stamp in the environment records what was installed from which project files.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
default_torch="torch==2.13.0"
cuda_torch="torch>=2.13,<2.15"        # on nvidia, unless a fitting one with CUDA is there
tile_kernels="tile-kernels==2.1.0"    # asks for Python 3.12, runs on 3.11; the tests take formulas from it
nccl="2.32.3"                         # what DeepEP is built against; torch pins an older one

say() { printf 'build.sh: %s\n' "$*"; }
die() { printf 'build.sh: %s\n' "$*" >&2; exit 1; }
usage() { sed -n '2,/^set -e/{/^#/{s/^# \{0,1\}//;p;};}' "${BASH_SOURCE[0]}"; }

# --- the Python environment -----------------------------------------------------------------------------------------

is_recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_interpreter() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.12 python3.11 python3.13 python}; do
    if is_recent "$candidate"; then command -v "$candidate"; return; fi
  done
  die "no Python 3.11 or newer found (looked for: ${PYTHON:-python3 python3.12 python3.11 python3.13 python}). Install one" \
    "(Debian 12, Ubuntu 24.04: apt install python3 python3-venv) or name it: PYTHON=/path/to/python3.12 ./build.sh"
}

create_venv() {
  local base
  base=$(find_interpreter)
  "$base" -c 'import ensurepip, venv' 2>/dev/null ||
    die "$base cannot create virtual environments. On Debian or Ubuntu:" \
      "apt install python3-venv (for another version: python3.12-venv and so on)"
  say "no environment is active: creating $root/.venv with $("$base" --version)"
  "$base" -m venv "$root/.venv"
}

# Sets `python` and `prefix` to the interpreter and the folder of the active environment, or of .venv.
choose_environment() {
  if [ -n "${VIRTUAL_ENV:-}" ] && [ -x "$VIRTUAL_ENV/bin/python" ]; then
    python=$VIRTUAL_ENV/bin/python
  elif [ -n "${CONDA_PREFIX:-}" ] && [ -x "$CONDA_PREFIX/bin/python" ]; then
    python=$CONDA_PREFIX/bin/python
  else
    [ -x "$root/.venv/bin/python" ] || create_venv
    python=$root/.venv/bin/python
  fi
  is_recent "$python" || die "$python is $("$python" --version 2>&1), but DeepInfer needs Python 3.11 or newer"
  prefix=$("$python" -c 'import sys; print(sys.prefix)')
}

# --- the backend ----------------------------------------------------------------------------------------------------

# Asks the files-only probes of the two vendor packages; prints the name of the one that finds its device, or cpu.
probe_backend() {
  local name answer found=""
  for name in nvidia ascend; do
    answer=$(PYTHONPATH="$root/deepinfer-core/src:$root/deepinfer-$name/src" \
      "$python" -c "import deepinfer_$name.probe as probe; print(probe.present())") ||
      die "the probe of deepinfer-$name failed (see above). Choose a backend yourself: DEEPINFER_ACCELERATOR=cpu ./build.sh"
    [ "$answer" = False ] || found="$found $name"
  done
  case "$found" in
    "") echo cpu ;;
    " nvidia" | " ascend") echo "${found# }" ;;
    *) die "devices of several backends found:$found. Choose one: DEEPINFER_ACCELERATOR=nvidia ./build.sh" ;;
  esac
}

choose_backend() {
  if [ -n "${DEEPINFER_ACCELERATOR:-}" ]; then
    backend=$DEEPINFER_ACCELERATOR
    return
  fi
  backend=$(probe_backend)
  if [ "$backend" = cpu ]; then say "no accelerator found: using the cpu backend"; else say "found: $backend"; fi
}

# --- installing -----------------------------------------------------------------------------------------------------

# One line that changes whenever something would have to be installed again.
stamp_of() {
  "$python" - "$root" "$backend" "${DEEPINFER_TORCH_SPEC:-}" "$1" <<'PY'
import hashlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
digest = hashlib.sha256("\0".join([sys.version, sys.prefix, *sys.argv[1:]]).encode())
for path in [root / "build.sh", *sorted(root.glob("deepinfer-*/pyproject.toml"))]:
    digest.update(path.read_bytes())
print(digest.hexdigest())
PY
}

is_installed() { # KIND
  [ -f "$prefix/.deepinfer-$1" ] && [ "$(cat "$prefix/.deepinfer-$1")" = "$(stamp_of "$1")" ] &&
    "$python" -c 'import importlib.util as u, sys; sys.exit(not (u.find_spec("deepinfer") and u.find_spec("torch")))'
}

has_fitting_torch() {
  "$python" - <<'PY' 2>/dev/null
import importlib.metadata, sys
major, minor = importlib.metadata.version("torch").split(".")[:2]
sys.exit((int(major), int(minor)) < (2, 9))
PY
}

has_cuda_torch() {
  "$python" -c 'import sys, torch; v = torch.__version__.split("."); sys.exit(
    torch.version.cuda is None or (int(v[0]), int(v[1])) < (2, 11))' 2>/dev/null
}

pip_install() { "$python" -m pip install --disable-pip-version-check --quiet "$@"; }

install_torch() {
  if [ -n "${DEEPINFER_TORCH_SPEC:-}" ]; then
    say "installing $DEEPINFER_TORCH_SPEC"
    pip_install "$DEEPINFER_TORCH_SPEC"
  elif [ "$backend" = cpu ] && ! has_fitting_torch; then
    say "installing $default_torch (this can take minutes)"
    pip_install "$default_torch"
  elif [ "$backend" = nvidia ] && ! has_cuda_torch; then
    say "installing $cuda_torch with CUDA (this can take minutes)"
    pip_install "$cuda_torch"
  fi
}

# Kernel libraries for the GPU that is here; on a machine without one, none.
install_nvidia_libraries() {
  local own="$root/deepinfer-nvidia" capability
  pip_install --no-deps --ignore-requires-python "$tile_kernels"
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1) || capability=""
  case "$capability" in
    10.*)
      say "compute capability $capability: building FlashMLA, DeepGEMM and DeepEP (this can take an hour)"
      pip_install --no-deps "nvidia-nccl-cu13==$nccl"
      DG_FORCE_BUILD=1 pip_install --no-build-isolation -e "$own[sm100]"
      pip_install --no-deps "nvidia-nccl-cu13==$nccl" # the resolver has gone back to torch's own
      check_nccl
      ;;
    9.*)
      say "compute capability $capability: installing the libraries of the sm90 set"
      pip_install -e "$own[sm90]"
      ;;
    "") say "no GPU to ask (nvidia-smi): kernel libraries are left out; run this again on the machine with the GPU" ;;
    *) say "compute capability $capability: no kernel library serves it; the backend's own kernels and torch do" ;;
  esac
}

check_nccl() {
  local found
  found=$("$python" -c 'import torch; print(".".join(map(str, torch.cuda.nccl.version())))') ||
    die "torch cannot load NCCL; install it: $python -m pip install --no-deps nvidia-nccl-cu13==$nccl"
  [ "$found" = "$nccl" ] ||
    die "torch loads NCCL $found, but DeepEP needs $nccl: $python -m pip install --no-deps nvidia-nccl-cu13==$nccl" \
      "(and check LD_LIBRARY_PATH for an older libnccl.so.2)"
  say "NCCL $found"
}

install() { # KIND = run | test
  "$python" -m pip --version >/dev/null 2>&1 || die "$python has no pip: $python -m ensurepip"
  install_torch
  local core="$root/deepinfer-core" own="$root/deepinfer-$backend"
  if [ "$1" = test ]; then core="$core[test]"; fi
  say "installing deepinfer-core and the $backend backend"
  if [ -d "$own" ]; then pip_install -e "$core" -e "$own"; else pip_install -e "$core"; fi
  if [ "$backend" = nvidia ]; then install_nvidia_libraries; fi
  if [ "$1" = test ]; then pip_install --no-deps --ignore-requires-python "$tile_kernels"; fi
  check_backend
  stamp_of "$1" >"$prefix/.deepinfer-$1"
}

# A third party's backend is installed by its user; say so now rather than at the first start.
check_backend() {
  "$python" - "$backend" <<'PY' || die "backend '$backend' is not installed here: pip install its package first"
import sys
from importlib.metadata import entry_points
sys.exit(not entry_points(group="deepinfer.backends", name=sys.argv[1]))
PY
}

prepare() { # KIND
  choose_environment
  choose_backend
  if is_installed "$1" || { [ "$1" = run ] && is_installed test; }; then
    say "up to date: $backend backend in $prefix"
  else
    install "$1"
  fi
}

# --- commands -------------------------------------------------------------------------------------------------------

# Prints the directory of a random checkpoint in the published format, made once for each version of its writer.
demo() {
  case " $* " in
    *" --model "* | *" --model="*) ;;
    *)
      if [ -n "${DEEPINFER_HF_MODEL_DIR:-}" ]; then
        set -- --model "$DEEPINFER_HF_MODEL_DIR" "$@"
      else
        set -- --model "$root/examples/tiny/checkpoints/v41-tiny-text" --temperature 0 --max-tokens 60 "$@" \
          "It was a sunny morning and Kate walked to the park." \
          "Text: Paul is 9 years old, lives near the forest and owns cup, kite, ball."$'\n'"JSON:" \
          "date 7 March 2019 ->" "25+48=" "The function returns"
      fi ;;
  esac
  DEEPINFER_ACCELERATOR=$backend exec "$python" "$root/examples/offline_inference.py" "$@"
}

case "${1:-}" in
  "") prepare run; say "done. Next: ./build.sh demo, or $prefix/bin/deepinfer --help" ;;
  demo) shift; prepare run; demo "$@" ;;
  test) shift; prepare test; cd "$root"; exec "$python" -m pytest --numprocesses auto --dist loadfile "$@" ;;
  -h | --help | help) usage ;;
  *) usage >&2; die "unknown command: $1" ;;
esac

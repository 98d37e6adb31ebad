# Sourced by the other scripts here: `environment EXTRAS` makes or reuses .venv in the checkout and
# sets $python to its interpreter. Needs Python 3.10 or newer and pip, nothing else.
#
# If the machine's Python has a ROCm or CUDA build of torch, it is used and never replaced.
# PYTHON=… names the Python to build on.

# What is imported is compiled once, not in each of a few hundred processes: torch alone takes 5 s.
unset PYTHONDONTWRITEBYTECODE

_say() { echo "ci: $*" >&2; }

_is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }

# The first Python that is new enough.
_find_python() {
  local candidates=() name found
  if [ -n "${PYTHON:-}" ]; then
    candidates=("$PYTHON")
  else
    candidates=(python3 python python3.14 python3.13 python3.12 python3.11 python3.10)
  fi
  for name in "${candidates[@]}"; do
    found=$(command -v "$name") || continue
    if _is_new_enough "$found"; then
      # Not what pyenv and its like put on the path, a script that looks for the real one; and not
      # the environment that is to be made.
      "$found" - "$PWD/.venv" <<'PY'
import sys

print(sys._base_executable if sys.prefix == sys.argv[1] else sys.executable)
PY
      return 0
    fi
  done
  _say "needs Python 3.10 or newer (tried: ${candidates[*]}); name one with PYTHON=…"
  return 1
}

# The version of torch if it is a build for a GPU, else nothing. Never fails: a caller under `set -e`
# (GitHub's `bash -e`) would end without a word where there is no torch.
_gpu_torch() {
  "$1" - <<'PY' 2>/dev/null || true
import torch

if torch.version.hip or torch.version.cuda:
    print(torch.__version__)
PY
}

# A GPU that the torch of pip's default index is built for.
_has_nvidia() { [ -e /dev/nvidia0 ] || [ -e /dev/dxg ]; }

# Makes an environment with pip in it, also where Python came without ensurepip (Debian, Ubuntu).
_make() {
  local base=$1 target=$2
  shift 2
  rm -rf "$target"
  if "$base" -m venv "$@" "$target" >"$target.log" 2>&1; then
    rm -f "$target.log"
    return 0
  fi
  rm -rf "$target"
  if "$base" -m venv --without-pip "$@" "$target" >>"$target.log" 2>&1; then
    local site
    site=$("$target/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    if "$base" -m pip install --quiet --ignore-installed --target "$site" pip >>"$target.log" 2>&1
    then
      rm -f "$target.log"
      return 0
    fi
  fi
  rm -rf "$target"
  if "$base" -m pip install --quiet --target "$target.tool" virtualenv >>"$target.log" 2>&1 &&
    PYTHONPATH="$target.tool" "$base" -m virtualenv --quiet "$@" "$target" >>"$target.log" 2>&1
  then
    rm -rf "$target.log" "$target.tool"
    return 0
  fi
  _say "could not make an environment with $base:"
  cat "$target.log" >&2
  rm -rf "$target" "$target.log" "$target.tool"
  return 1
}

# Lets the environment of python $2 see what python $1 sees, which may be an environment itself.
_lend() {
  "$1" -c 'import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' \
    >"$("$2" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/_lent.pth"
}

environment() {
  local extras=$1 base torch_version stamp target=.venv constraints options=()
  base=$(_find_python) || return 2
  torch_version=$(_gpu_torch "$base")
  constraints=(-c ci/constraints.txt)
  if [ -n "$torch_version" ]; then
    options=(--system-site-packages)
  elif ! _has_nvidia; then
    constraints+=(-c ci/constraints-cpu.txt)
    [ ! -e /dev/kfd ] || _say "an AMD GPU is here and no torch for it: install ROCm's torch first"
  fi
  # A ROCm build of torch has a Triton of its own, which the plain one would overwrite; a CUDA build
  # brings NVRTC.
  case $torch_version in
    *rocm*) extras=${extras/,triton/} ;;
    "") extras=${extras/,cuda/,cuda,nvrtc} ;;
  esac

  python=$PWD/$target/bin/python
  stamp=$(
    {
      echo "$base $torch_version ${constraints[*]}"
      cat pyproject.toml ci/constraints.txt ci/constraints-cpu.txt ci/environment.sh
    } | "$base" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
  )
  # The stamp file has a line for each set of extras that was installed under this stamp.
  if grep -qsxF "$stamp [$extras]" "$target/.pyfa-stamp" && "$python" -c 'import pyfa' 2>/dev/null
  then
    return 0
  fi
  local fresh=no
  "$python" -m pip --version >/dev/null 2>&1 && _is_new_enough "$python" || fresh=yes
  if ! grep -qsF "$stamp" "$target/.pyfa-stamp"; then
    rm -f "$target/.pyfa-stamp"
    # One that was made without sight of this torch would get another.
    [ -z "$torch_version" ] || fresh=yes
  fi
  if [ "$fresh" = yes ]; then
    _say "making $target with $base${torch_version:+, keeping torch $torch_version}"
    _make "$base" "$target" ${options[@]+"${options[@]}"} || return 2
    [ -z "$torch_version" ] || _lend "$base" "$python"
  fi
  if [ -n "$torch_version" ]; then
    echo "torch==$torch_version" >"$target/torch.txt"
    constraints+=(-c "$target/torch.txt")
  fi
  _say "installing pyfa${extras:+[$extras]} into $target"
  # Python compiles what is imported. pip would compile every module there is, on one core.
  "$python" -m pip install --quiet --disable-pip-version-check --no-compile "${constraints[@]}" \
    -e ".${extras:+[$extras]}" >&2 || return 2
  if [ -n "$torch_version" ] && [ "$(_gpu_torch "$python")" != "$torch_version" ]; then
    _say "torch $torch_version did not survive the installation"
    return 2
  fi
  echo "$stamp [$extras]" >>"$target/.pyfa-stamp"
}

#!/usr/bin/env bash
# Prepares the workshop's Python environment: a venv with the right PyTorch for this machine.
# See environment_setup.md for what to do on a cluster, in a container or without a network.
# Written for bash 3.2 (macOS) and later.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
SETUP=$ROOT/setup
TORCH_VERSION=2.13.0
TORCH_MINIMUM=2.6 # the oldest one that has every function the four versions call
TORCH_INDEX=https://download.pytorch.org/whl
ROCM_WHEELS=rocm7.2
WAITED=3 # environment_probe.py's status

VENV=$ROOT/.venv
PYTHON=""
BUILD=auto
EXTRAS="" # of test and notebook: requirements-NAME.txt is installed as well
DRY_RUN=no
UNFINISHED=no

usage() {
  cat <<EOF
Usage: setup/environment_setup.sh [options]

Prepares a Python environment for the workshop. Run it as often as you like: when nothing is
left to do it says so and returns in about a second.

  --venv DIR      where the environment goes (default: .venv in the repository)
  --python PY     the Python to build on, 3.10 or newer (default: python3, or the first of
                  python3.14 ... python3.10 on PATH that is new enough)
  --build BUILD   PyTorch's build: auto, cpu, cuda or rocm (default: auto). auto uses the GPU build
                  (>= $TORCH_MINIMUM) that the Python already has, and never replaces it; failing
                  that it installs torch==$TORCH_VERSION for the GPU it finds, else for the CPU
  --with-tests    also install what 'make test' and 'make lint' need
  --with-notebook also install JupyterLab, for 'make notebook'
  --dry-run       print what would be done, change nothing
  --help          this text

Exit status: 0 ready, 1 the set-up could not be done, 2 wrong usage.
EOF
}

step() { printf '==> %s\n' "$*"; }
note() { printf '    %s\n' "$*"; }
warn() { printf 'WARNING: %s\n' "$*" >&2; }
fail() { # fail STATUS MESSAGE...
  printf 'environment_setup.sh: %s\n' "${*:2}" >&2
  exit "$1"
}

run() {
  local word line=""
  if [[ $DRY_RUN == no ]]; then
    "$@"
    return
  fi
  for word in "$@"; do
    case $word in *[!a-zA-Z0-9_./:=+-]*) word="'$word'" ;; esac
    line+=" $word"
  done
  note "would run:$line"
}

write() { # write FILE, from standard input; whole or not at all
  if [[ $DRY_RUN == yes ]]; then
    note "would write $1:" && sed 's/^/        /'
  else
    cat >"$1.new" && mv "$1.new" "$1"
  fi
}

probe() { "$1" "$SETUP/environment_probe.py" "${@:2}"; }                 # probe PYTHON COMMAND...
fact() { sed -n "s/^$1=//p" <<<"$FACTS"; }                               # from probe ... describe
stamped() { if [[ -f $STAMP ]]; then sed -n "s/^$1=//p" "$STAMP"; fi; }  # from the last set-up
fingerprint() { { echo "$TORCH_VERSION" && cat "$@"; } | cksum; }
requirements_of() { echo "$SETUP/requirements-$1.txt"; }                  # requirements_of EXTRA
base_fingerprint() { fingerprint "$SETUP/requirements.txt" "$SETUP/requirements-triton.txt"; }

parse_arguments() {
  while [[ $# -gt 0 ]]; do
    case $1 in
      --venv | --python | --build)
        [[ -n ${2:-} ]] || fail 2 "$1 needs a value; see --help"
        case $1 in --venv) VENV=$2 ;; --python) PYTHON=$2 ;; --build) BUILD=$2 ;; esac
        shift 2
        ;;
      --with-tests) EXTRAS+=" test" && shift ;;
      --with-notebook) EXTRAS+=" notebook" && shift ;;
      --dry-run) DRY_RUN=yes && shift ;;
      --help | -h) usage && exit 0 ;;
      *) fail 2 "unknown option '$1'; see --help" ;;
    esac
  done
  case $BUILD in
    auto | cpu | cuda | rocm) ;;
    *) fail 2 "--build $BUILD: must be auto, cpu, cuda or rocm" ;;
  esac
  [[ $VENV == /* ]] || VENV=$PWD/$VENV
  STAMP=$VENV/workshop-setup.stamp         # written last: an environment without it is not complete
  MARKER=$VENV/workshop-made-this          # written first: what we may delete; also the lock
  PACKAGES=$VENV/workshop-packages.txt     # what must be there for it to be complete
  CONSTRAINTS=$VENV/workshop-constraints.txt
}

# --- What is there -------------------------------------------------------------------------------

choose_python() {
  if [[ -n $PYTHON ]]; then
    PY=$PYTHON
  else
    find_python python3 python3.14 python3.13 python3.12 python3.11 python3.10 ||
      fail 1 "no Python 3.10 or newer on PATH${REFUSED:+; $REFUSED}: install one, load its" \
        "module, or name it with --python"
  fi
  # Inside an activated venv of ours, python3 is that venv's: go back to what it was built on.
  if [[ $("$PY" -c 'import sys; print(sys.prefix)') -ef $VENV ]]; then
    PY=$(stamped python)
    [[ -n $PY ]] || PY=$("$VENV/bin/python" -c 'import sys; print(sys._base_executable)')
  fi
  "$PY" -c 'import venv, ensurepip' 2>/dev/null || fail 1 "$PY cannot make virtual environments" \
    "(no venv or ensurepip): install it (on Debian and Ubuntu the package python3-venv)," \
    "or name another Python with --python"
  PY=$("$PY" -c 'import sys; print(sys.executable)')
}

# Sets PYTHON, which was named, to the path of what runs by that name.
resolve_python() {
  local why="$PYTHON is not Python 3.10 or newer, which the workshop needs"
  command -v "$PYTHON" >/dev/null || fail 2 "--python $PYTHON: no such program"
  find_python "$PYTHON" || fail 1 "${REFUSED:-$why}: name another one with --python"
  PYTHON=$PY
}

# Sets PY to the first program on PATH of one of these names that is Python 3.10 or newer, or else
# REFUSED to what one that does not run says: pyenv has a shim for each Python, active or not.
find_python() { # find_python NAME...
  local name candidate said
  REFUSED=""
  for name in "$@"; do
    while IFS= read -r candidate; do
      case "$("$candidate" -c 'import sys; print(sys.version_info >= (3, 10))' 2>/dev/null)" in
        True) PY=$candidate && return ;;
        False) continue ;;
      esac
      said=$("$candidate" -c '' 2>&1 | head -n 1) || true
      [[ -z $said ]] || REFUSED="$candidate does not run ($said)"
    done < <(type -aP "$name")
  done
  return 1
}

has_kfd() { [[ -e /dev/kfd ]]; }
has_rocm() { has_kfd && { command -v rocminfo >/dev/null || [[ -d ${ROCM_PATH:-/opt/rocm} ]]; }; }
has_cuda() { case "$(nvidia-smi -L 2>/dev/null)" in GPU*) return 0 ;; *) return 1 ;; esac; }

detect_hardware() {
  if has_rocm; then echo rocm; elif has_cuda; then echo cuda; else echo cpu; fi
}

# The compiler that torch.compile would call for CPU code: $CXX, else one fixed name.
compiler() {
  local default=g++
  [[ $(uname) != Darwin ]] || default=clang++
  command -v "${CXX:-$default}" 2>/dev/null || true
}

index_reachable() { probe "$PY" reachable "$1/torch/"; }

# --- What the last set-up left -------------------------------------------------------------------

# Sets STATE: complete (nothing to do), add (install into it) or fresh (start over).
assess_venv() {
  local torch_now extra
  STATE=fresh LOST=()
  [[ -f $STAMP && $(stamped root) == "$ROOT" ]] || return 0
  torch_now=$(probe "$VENV/bin/python" locate 2>/dev/null) || torch_now=""
  if [[ -z $torch_now && $(stamped origin) == existing && $BUILD == auto && -z $PYTHON ]]; then
    fail 1 "the PyTorch that $VENV was built on is gone ($(stamped torch)): load its module again," \
      "or install one with --build cpu, cuda or rocm"
  fi
  [[ $torch_now == "$(stamped torch)" ]] || return 0
  [[ $BUILD == auto || $BUILD == "$(stamped build)" ]] || return 0
  [[ -z $PYTHON ]] || same_python || return 0
  STATE=add
  [[ -f $PACKAGES ]] || return 0
  find_lost_packages
  [[ ${#LOST[@]} -eq 0 ]] || return 0
  [[ $(stamped base) == "$(base_fingerprint)" ]] || return 0
  for extra in $EXTRAS; do
    [[ $(stamped "$extra") == "$(fingerprint "$(requirements_of "$extra")")" ]] || return 0
  done
  STATE=complete
}

# Sets LOST to what brings back the packages that were there after the last set-up and are not now.
find_lost_packages() {
  local requirement path last=""
  while IFS=$'\t' read -r requirement path; do
    [[ -e $path || $requirement == "$last" ]] || LOST+=("$requirement") last=$requirement
  done <"$PACKAGES"
}

same_python() {
  case "$("$PYTHON" -c 'import sys; print(sys.executable)' 2>/dev/null)" in
    "$(stamped python)" | "$VENV"/*) return 0 ;;
    *) return 1 ;;
  esac
}

# --- What to do ----------------------------------------------------------------------------------

# Sets ORIGIN (existing or installed) and BUILD, and says why.
choose_build() {
  local kind
  kind=$(fact torch_kind)
  ORIGIN=installed
  if [[ -n $(fact torch_error) ]]; then
    note "found PyTorch at $(fact torch_file), but it does not import: $(fact torch_error)"
  elif [[ $kind == cuda || $kind == rocm ]]; then
    note "found PyTorch $(fact torch_version) for $kind $(fact torch_runtime)," \
      "at $(fact torch_file)"
    if ! at_least "$(fact torch_number)" "$TORCH_MINIMUM"; then
      note "not used: the workshop needs $TORCH_MINIMUM or newer"
    elif [[ $BUILD != auto && $BUILD != "$kind" ]]; then
      note "not used: --build $BUILD was asked for"
    else
      ORIGIN=existing
      BUILD=$kind
    fi
  fi
  [[ $BUILD != auto ]] || BUILD=$(detect_hardware)
}

at_least() { [[ $(printf '%s\n%s\n' "$2" "$1" | sort -t. -k1,1n -k2,2n | head -n 1) == "$2" ]]; }

# Sets INDEX to PyTorch's own index for this build, or to "default" for the one pip is set up with.
choose_index() {
  case $BUILD in
    cpu) INDEX=$TORCH_INDEX/cpu ;;
    rocm) INDEX=$TORCH_INDEX/$ROCM_WHEELS ;;
    cuda) INDEX=default && return ;; # the default index holds the CUDA build
  esac
  index_reachable "$INDEX" && return
  note "$INDEX cannot be reached: taking torch==$TORCH_VERSION from pip's default index"
  INDEX=default
  if [[ $BUILD == rocm ]]; then
    warn "unless your pip is given a ROCm wheel, the PyTorch installed now will NOT use the AMD" \
      "GPU. Load your site's PyTorch module and run this again, or see 'No network' in" \
      "setup/environment_setup.md"
  elif [[ $(uname) == Linux ]]; then
    note "(unless your pip is given a CPU wheel, this one brings CUDA libraries: several GB)"
  fi
}

# --- Doing it ------------------------------------------------------------------------------------

pip() { run "$VENV/bin/python" -m pip "$@"; }

on_exit() {
  local status=$?
  if [[ $UNFINISHED == yes && $status -ne 0 ]]; then
    printf 'environment_setup.sh: stopped before the end, %s is not complete; %s\n' "$VENV" \
      "run this again (it starts over)" >&2
  fi
}

refuse_foreign_folder() {
  [[ -e $VENV || ! -L $VENV ]] || fail 2 "$VENV is a link to $(readlink "$VENV"), which is not" \
    "there: make that folder, delete the link, or choose another place with --venv"
  [[ -e $VENV && ! -f $MARKER ]] || return 0
  [[ ! -d $VENV || -n $(ls -A "$VENV") ]] || return 0
  fail 2 "$VENV was not made by this script, and will not be deleted: move it away or choose" \
    "another place with --venv"
}

# Two set-ups would write the same files. The lock goes with this shell and the pip that it started,
# however they end. One that had to wait begins anew: the other one has changed what it has seen.
claim_folder() { # claim_folder ARGUMENTS-OF-THE-SCRIPT...
  local status=0
  run mkdir -p "$VENV"
  [[ $DRY_RUN == no ]] || return 0
  { exec 9>>"$MARKER"; } 2>/dev/null || fail 1 "$VENV can't be written to: choose another --venv"
  probe "$PROBE_PY" lock 9 || status=$?
  [[ $status -ne $WAITED ]] || exec "$BASH" "${BASH_SOURCE[0]}" "$@"
  [[ -s $MARKER ]] || echo "environment_setup.sh made this folder and may delete what is in it." >&9
}

# ASCII, as other locales can't read more in a path file; a Python expression of a path's bytes.
quoted_path() { "$PY" -c 'import os, sys; print(f"os.fsdecode({os.fsencode(sys.argv[1])!r})")' "$1"; }

create_venv() {
  local folder flags=""
  [[ $ORIGIN == installed || $(fact sees_base_packages) == no ]] || flags=--system-site-packages
  step "Creating $VENV from $PY"
  # The marker outlives the rest: deleting a large environment can be interrupted too. The slash
  # makes a link to a folder with more room (.venv -> /scratch/...) work.
  run find "$VENV/" -mindepth 1 -maxdepth 1 ! -name "$(basename "$MARKER")" -exec rm -rf {} +
  run "$PY" -m venv ${flags:+"$flags"} "$VENV"
  # A path file instead of 'pip install -e': it needs no build tool, so no network either.
  local packages
  packages=$VENV/lib/python$(fact python_version | cut -d. -f1-2)/site-packages
  write "$packages/workshop.pth" <<<"import os, sys; sys.path.append($(quoted_path "$ROOT"))"
  [[ $ORIGIN == existing && -n $(fact parent_environment) ]] || return 0
  # The Python is itself a venv's, and a venv made from it would see what lies below that venv, if
  # anything, but not the venv. addsitedir, unlike a plain path, also honours its own .pth files.
  fact parent_environment | tr ':' '\n' | while IFS= read -r folder; do
    echo "import os, site; site.addsitedir($(quoted_path "$folder"))"
  done | write "$packages/workshop-parent.pth"
}

write_constraints() {
  if [[ $ORIGIN == existing ]]; then
    fact torch_pins | tr ' ' '\n' | write "$CONSTRAINTS"
  else
    write "$CONSTRAINTS" <<<"torch==$TORCH_VERSION"
  fi
}

# Sets WANTED to what pip is to install from the requirements files.
# On a site's own PyTorch we add what is missing and leave the rest as it is: its numpy was chosen
# to go with its torch, and a compute node may have no network to fetch another one from.
choose_requirements() {
  local file line extra
  local -a files=("$SETUP/requirements.txt")
  for extra in $EXTRAS; do files+=("$(requirements_of "$extra")"); done
  WANTED=()
  for file in "${files[@]}"; do
    if [[ $ORIGIN == existing ]]; then
      while IFS= read -r line; do WANTED+=("$line"); done < <(probe "$PROBE_PY" missing "$file")
    else
      WANTED+=(-r "$file")
    fi
  done
}

install_requirements() {
  if [[ ${#WANTED[@]} -eq 0 ]]; then
    note "the other packages are all there already"
    return
  fi
  step "Installing the other packages"
  install_packages "${WANTED[@]}"
}

install_lost_packages() {
  [[ ${#LOST[@]} -gt 0 ]] || return 0
  step "Installing again what is gone: ${LOST[*]}"
  install_packages --no-deps --force-reinstall "${LOST[@]}"
}

install_packages() { # install_packages ARGUMENTS-OF-PIP...
  if [[ $STATE == add ]]; then
    # Ask before touching anything: a package that cannot be had must not cost a good environment.
    pip install --quiet --dry-run -c "$CONSTRAINTS" "$@" ||
      fail 1 "what is missing cannot be installed (see above); $VENV stays as it was"
    begin_changes
  fi
  pip install --quiet -c "$CONSTRAINTS" "$@"
}

# From here to the new stamp the environment does not count as complete.
begin_changes() {
  [[ $DRY_RUN == yes ]] || UNFINISHED=yes
  run rm -f "$STAMP"
}

install_torch() {
  local -a how=()
  [[ $ORIGIN == installed ]] || return 0
  if [[ $STATE == add && $(fact torch_version) == "$TORCH_VERSION"* ]]; then return; fi
  choose_index
  step "Installing PyTorch $TORCH_VERSION ($BUILD), index: $INDEX"
  [[ -t 1 ]] || how+=(--quiet) # a terminal gets pip's progress: the GPU builds are gigabytes
  [[ $INDEX == default ]] || how+=(--index-url "$INDEX")
  pip install ${how[@]+"${how[@]}"} "torch==$TORCH_VERSION"
}

# GPU builds bring the one Triton that they were released with, which nothing may replace; a CPU
# build brings none. Without it V3 alone cannot run, so that it cannot be had is no end.
install_triton() {
  local kind=$BUILD version="" # what a dry run expects of a fresh environment
  if [[ $DRY_RUN == no || $STATE == add ]]; then
    kind=$(fact torch_kind) version=$(fact triton_version)
  fi
  [[ $ORIGIN == installed && $kind == cpu && -z $version ]] || return 0
  [[ $(uname) == Linux ]] || return 0 # there are no wheels for other systems
  step "Installing Triton, for V3"
  if pip install --quiet -c "$CONSTRAINTS" -r "$SETUP/requirements-triton.txt"; then
    [[ $DRY_RUN == yes ]] || FACTS=$(probe "$VENV/bin/python" describe)
  else
    warn "Triton cannot be installed (see above), so V3 will be skipped; all else works." \
      "To try again: $VENV/bin/python -m pip install -r setup/requirements-triton.txt"
  fi
}

# Asks the finished environment itself: PYTHONPATH, for one, can put another torch in front.
verify() {
  local expected=$TORCH_VERSION
  [[ $ORIGIN == installed ]] || expected=$(fact torch_version)
  FACTS=$(probe "$VENV/bin/python" describe) || fail 1 "$VENV/bin/python crashed on 'import torch'"
  [[ -z $(fact torch_error) ]] || fail 1 "PyTorch does not import: $(fact torch_error)"
  case "$(fact torch_version)" in
    "$expected" | "$expected"+*) ;;
    *) fail 1 "expected PyTorch $expected, but $VENV imports $(fact torch_version) from" \
      "$(fact torch_file): is an older one on PYTHONPATH?" ;;
  esac
}

write_packages() {
  local extra
  local -a files=("$SETUP/requirements.txt")
  for extra in $EXTRAS; do files+=("$(requirements_of "$extra")"); done
  probe "$VENV/bin/python" packages "${files[@]}" | write "$PACKAGES"
}

write_stamp() {
  local extra extras=""
  for extra in $EXTRAS; do
    extras+=$extra=$(fingerprint "$(requirements_of "$extra")")$'\n'
  done
  write "$STAMP" <<EOF
root=$ROOT
python=$PY
python_version=$(fact python_version)
asked=$ASKED
build=$BUILD
origin=$ORIGIN
torch=$(fact torch_file)
torch_version=$(fact torch_version)
torch_kind=$(fact torch_kind)
triton_version=$(fact triton_version)
base=$(base_fingerprint)
$extras
EOF
}

# --- What to tell --------------------------------------------------------------------------------

# A venv made on a login node, or after a fallback, may not know the GPU of this machine.
warn_if_gpu_is_idle() {
  local hardware
  [[ $(stamped asked) != cpu ]] || return 0
  hardware=$(detect_hardware)
  [[ $hardware == cpu || $hardware == "$(stamped torch_kind)" ]] ||
    warn "this machine has a $hardware GPU that this PyTorch (a $(stamped torch_kind) build) does" \
      "not use; for another build run setup/environment_setup.sh --build $hardware"
}

triton_line() {
  local version
  version=$(stamped triton_version)
  if [[ -z $version ]]; then
    echo "none: V3 is skipped; 'Triton' in setup/environment_setup.md says how to get it"
  elif [[ $(stamped torch_kind) == cpu ]]; then
    echo "$version, interpreting V3's kernels"
  else
    echo "$version"
  fi
}

summarise() {
  local cxx
  cxx=$(compiler)
  step "Ready"
  note "Python    $(stamped python_version), $VENV/bin/python"
  note "PyTorch   $(stamped torch_version) ($(stamped torch_kind) build), $(stamped torch)"
  note "Triton    $(triton_line)"
  note "Device    $(probe "$VENV/bin/python" device | sed -n 's/^device=//p')"
  note "Compiler  ${cxx:-none}"
  [[ -n $cxx ]] || note "no C++ compiler: torch.compile is off on the CPU; V4 runs without it;" \
    "get it with your system's packages (g++; on macOS xcode-select --install) or set CXX"
  command -v make >/dev/null || note "no make: type the commands that 'make help' stands for yourself"
  note "Next      make compare"
}

# Sets PY, FACTS, BUILD, ORIGIN, and EXTRAS and ASKED where the last set-up decides them.
make_choices() {
  local extra
  if [[ $STATE == fresh ]]; then
    choose_python
    PROBE_PY=$PY
  else
    PY=$(stamped python)
    PROBE_PY=$VENV/bin/python
  fi
  step "Looking at $PROBE_PY"
  FACTS=$(probe "$PROBE_PY" describe) ||
    fail 1 "$PROBE_PY crashed on 'import torch': try it by hand, or name another Python with --python"
  note "Python $(fact python_version)"
  if [[ $STATE == fresh ]]; then
    choose_build
  else
    ASKED=$(stamped asked) BUILD=$(stamped build) ORIGIN=$(stamped origin)
    for extra in test notebook; do
      [[ -z $(stamped "$extra") || " $EXTRAS " == *" $extra "* ]] || EXTRAS+=" $extra"
    done
  fi
  case $ORIGIN in
    existing) note "chosen: the PyTorch that is there, left as it is" ;;
    installed) note "chosen: PyTorch $TORCH_VERSION, $BUILD build, in $VENV" ;;
  esac
}

main() {
  parse_arguments "$@"
  [[ -z $PYTHON ]] || resolve_python
  ASKED=$BUILD
  export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 # some sites set PIP_USER; a venv refuses it
  assess_venv
  if [[ $STATE == complete ]]; then
    note "$VENV is ready: Python $(stamped python_version), PyTorch $(stamped torch_version)"
    warn_if_gpu_is_idle
    exit 0
  fi
  refuse_foreign_folder
  trap on_exit EXIT
  trap 'exit 130' INT TERM
  make_choices

  claim_folder "$@"
  choose_requirements
  if [[ $STATE == fresh ]]; then
    begin_changes
    create_venv
  fi
  write_constraints
  install_lost_packages
  install_requirements
  install_torch
  [[ $DRY_RUN == yes ]] || verify
  install_triton
  [[ $DRY_RUN == no ]] || exit 0
  write_packages
  write_stamp
  UNFINISHED=no
  summarise
  warn_if_gpu_is_idle
}

# Sourced, this file only defines its functions; the tests do so.
if [[ ${BASH_SOURCE[0]} == "$0" ]]; then main "$@"; fi

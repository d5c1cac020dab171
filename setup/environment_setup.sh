#!/usr/bin/env bash
# Prepares the workshop's Python environment: a venv with the right PyTorch for this machine.
# environment_setup.md covers clusters, containers and machines without a network.
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
INDEX="" # where PyTorch comes from, once that is chosen
UNFINISHED=no

usage() {
  cat <<END
Usage: setup/environment_setup.sh [options]

Prepares a Python environment for the workshop. It can be run again at any time: when nothing is
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
END
}

step() { printf '==> %s\n' "$*"; }
note() { printf '    %s\n' "$*"; }
warn() { printf 'WARNING: %s\n' "$*" >&2; }
fail() { # fail STATUS MESSAGE...
  printf 'environment_setup.sh: %s\n' "${*:2}" >&2
  exit "$1"
}

run() { if [[ $DRY_RUN == yes ]]; then note "would run:$(printf ' %q' "$@")"; else "$@"; fi; }

write() { # write FILE, from standard input; whole or not at all
  if [[ $DRY_RUN == yes ]]; then
    note "would write $1:" && sed 's/^/        /'
  else
    cat >"$1.new" && mv "$1.new" "$1"
  fi
}

pip() { # pip ARGUMENTS...: its output goes to the log, whose last lines are shown on failure
  if [[ $DRY_RUN == yes ]]; then run "$VENV/bin/python" -m pip "$@" && return; fi
  "$VENV/bin/python" -m pip "$@" >>"$LOG" 2>&1 && return
  warn "pip failed; the last lines of $LOG:"
  grep -v 'is ignored: it is neither a file nor a directory' "$LOG" | tail -n 12 | sed 's/^/    /' >&2
  return 1
}

probe() { "$1" "$SETUP/environment_probe.py" "${@:2}"; }                 # probe PYTHON COMMAND...
fact() { sed -n "s/^$1=//p" <<<"$FACTS"; }                               # from probe ... describe
stamped() { if [[ -f $STAMP ]]; then sed -n "s/^$1=//p" "$STAMP"; fi; }  # from the last set-up
sys() { "$1" -c "import sys; print(sys.$2)" 2>/dev/null; }               # sys PYTHON NAME

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
  STAMP=$VENV/workshop-setup.stamp     # written last: an environment without it is not complete
  MARKER=$VENV/workshop-made-this      # written first: what this script may delete; also the lock
  PACKAGES=$VENV/workshop-packages.txt # what must be there for it to be complete
  CONSTRAINTS=$VENV/workshop-constraints.txt
  LOG=$VENV/setup.log
}

# --- What is there -------------------------------------------------------------------------------

# Sets PY to the first program on PATH of one of these names that is Python 3.10 or newer, or else
# REFUSED to the error of one that does not run: pyenv has a shim for each Python, active or not.
find_python() { # find_python NAME...
  local name candidate error
  REFUSED=""
  for name in "$@"; do
    while IFS= read -r candidate; do
      case "$(sys "$candidate" 'version_info >= (3, 10)')" in
        True) PY=$candidate && return ;;
        False) continue ;;
      esac
      error=$("$candidate" -c '' 2>&1 | head -n 1) || true
      [[ -z $error ]] || REFUSED="$candidate does not run ($error)"
    done < <(type -aP "$name")
  done
  return 1
}

# Sets PY, and PYTHON to it where it was given by name.
choose_python() {
  if [[ -n $PYTHON ]]; then
    command -v "$PYTHON" >/dev/null || fail 2 "--python $PYTHON: no such program"
    find_python "$PYTHON" || fail 1 "${REFUSED:-$PYTHON is not Python 3.10 or newer, which the" \
      "workshop needs}: name another one with --python"
    PYTHON=$PY
  else
    find_python python3 python3.14 python3.13 python3.12 python3.11 python3.10 ||
      fail 1 "no Python 3.10 or newer on PATH${REFUSED:+; $REFUSED}: install one, load its" \
        "module, or name it with --python"
  fi
}

# Inside an activated venv of ours, python3 is that venv's: go back to what it was built on.
leave_own_venv() {
  if [[ $(sys "$PY" prefix) -ef $VENV ]]; then
    PY=$(stamped python)
    [[ -n $PY ]] || PY=$(sys "$VENV/bin/python" _base_executable)
  fi
  "$PY" -c 'import venv, ensurepip' 2>/dev/null || fail 1 "$PY cannot make virtual environments" \
    "(no venv or ensurepip): install it (on Debian and Ubuntu the package python3-venv)," \
    "or name another Python with --python"
  PY=$(sys "$PY" executable)
}

has_kfd() { [[ -e /dev/kfd ]]; }
has_rocm() { has_kfd && { command -v rocminfo >/dev/null || [[ -d ${ROCM_PATH:-/opt/rocm} ]]; }; }
has_cuda() { [[ $(nvidia-smi -L 2>/dev/null) == GPU* ]]; }

detect_hardware() {
  if has_rocm; then echo rocm; elif has_cuda; then echo cuda; else echo cpu; fi
}

index_reachable() { probe "$PY" reachable "$1/torch/"; }

# Sets STATE: complete (nothing to do), add (install into it) or fresh (start over). EXTRAS that
# were installed once belong to the environment.
assess_venv() {
  local torch_now extra requirement path vision
  STATE=fresh LOST=()
  if [[ -f $STAMP && $(stamped root) == "$ROOT" ]]; then
    torch_now=$(probe "$VENV/bin/python" locate torch 2>/dev/null) || torch_now=""
    if [[ -z $torch_now && $(stamped origin) == existing && $BUILD == auto && -z $PYTHON ]]; then
      fail 1 "the PyTorch that $VENV was built on is gone ($(stamped torch)): load its module" \
        "again, or install one with --build cpu, cuda or rocm"
    fi
    if [[ $torch_now == "$(stamped torch)" && ($BUILD == auto || $BUILD == "$(stamped build)") ]] &&
      same_python; then STATE=add; fi
  fi
  for extra in $([[ $STATE == fresh ]] || stamped extras); do
    [[ " $EXTRAS " == *" $extra "* ]] || EXTRAS+=" $extra"
  done
  REQUIREMENTS=("$SETUP/requirements.txt")
  for extra in $EXTRAS; do REQUIREMENTS+=("$SETUP/requirements-$extra.txt"); done
  FINGERPRINT=$({ echo "$TORCH_VERSION" &&
    cat "${REQUIREMENTS[@]}" "$SETUP/requirements-triton.txt" "$SETUP/requirements-labs.txt"; } | cksum)
  [[ $STATE == add && -f $PACKAGES ]] || return 0
  while IFS=$'\t' read -r requirement path; do # packages that are gone since the last set-up
    [[ -e $path || " ${LOST[*]-} " == *" $requirement "* ]] || LOST+=("$requirement")
  done <"$PACKAGES"
  vision=$(stamped torchvision) # not in PACKAGES: it must come from its PyTorch's index again
  [[ ${#LOST[@]} -gt 0 || $(stamped fingerprint) != "$FINGERPRINT" ]] ||
    [[ -n $vision && ! -e $vision ]] || STATE=complete
}

same_python() {
  [[ -z $PYTHON || $(sys "$PYTHON" executable) == "$VENV"/* ||
    $(sys "$PYTHON" executable) == "$(stamped python)" ]]
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
    note "found PyTorch $(fact torch_version) for $kind $(fact torch_runtime), at $(fact torch_file)"
    if ! at_least "$(fact torch_number)" "$TORCH_MINIMUM"; then
      note "not used: the workshop needs $TORCH_MINIMUM or newer"
    elif [[ $BUILD != auto && $BUILD != "$kind" ]]; then
      note "not used: --build $BUILD was given"
    else
      ORIGIN=existing BUILD=$kind
    fi
  fi
  [[ $BUILD != auto ]] || BUILD=$(detect_hardware)
}

at_least() { [[ $(printf '%s\n%s\n' "$2" "$1" | sort -t. -k1,1n -k2,2n | head -n 1) == "$2" ]]; }

# Sets INDEX to PyTorch's own index for this build, or to "default" for the one pip is set up with.
choose_index() { # choose_index PACKAGE
  local own=""
  INDEX=default
  case $BUILD in
    cpu) own=$TORCH_INDEX/cpu ;;
    rocm) own=$TORCH_INDEX/$ROCM_WHEELS ;;
    cuda) return ;; # the default index holds the CUDA build
  esac
  if index_reachable "$own"; then
    INDEX=$own
  else
    note "$own cannot be reached: taking $1 from pip's default index"
  fi
}

warn_of_default_index() {
  if [[ $BUILD == rocm ]]; then
    warn "unless your pip is given a ROCm wheel, the PyTorch installed now will NOT use the AMD" \
      "GPU. Load your site's PyTorch module and run this again, or see 'No network' in" \
      "setup/environment_setup.md"
  elif [[ $(uname) == Linux ]]; then
    note "(unless your pip is given a CPU wheel, this one brings CUDA libraries: several GB)"
  fi
}

refuse_foreign_folder() {
  local owner
  if [[ -L $VENV ]]; then
    [[ -e $VENV ]] || fail 2 "$VENV is a link to $(readlink "$VENV"), which is not" \
      "there: make that folder, delete the link, or choose another place with --venv"
    owner=$(stamped root)
    [[ -n $owner ]] || owner=$(cd -P "$VENV/.." && pwd)
    [[ ! -f $owner/setup/environment_setup.sh || $owner -ef $ROOT ]] || fail 2 "$VENV is a link to" \
      "the environment of another checkout ($owner), which this one does not change: delete the" \
      "link, or choose another place with --venv"
  fi
  [[ -e $VENV && ! -f $MARKER ]] || return 0
  [[ ! -d $VENV || -n $(ls -A "$VENV") ]] || return 0
  fail 2 "$VENV was not made by this script, and will not be deleted: move it away or choose" \
    "another place with --venv"
}

# Two set-ups would write the same files. The lock ends with this shell and the pip that it started.
# A set-up that had to wait starts again: the other one has changed what it has seen.
claim_folder() { # claim_folder ARGUMENTS-OF-THE-SCRIPT...
  local status=0
  run mkdir -p "$VENV"
  [[ $DRY_RUN == no ]] || return 0
  { exec 9>>"$MARKER"; } 2>/dev/null || fail 1 "$VENV can't be written to: choose another --venv"
  probe "$PROBE_PY" lock 9 || status=$?
  [[ $status -ne $WAITED ]] || exec "$BASH" "${BASH_SOURCE[0]}" "$@"
  [[ -s $MARKER ]] || echo "environment_setup.sh made this folder and may delete what is in it." >&9
}

# --- Doing it ------------------------------------------------------------------------------------

on_exit() {
  local status=$?
  [[ $UNFINISHED == no || $status -eq 0 ]] || printf '%s\n' "environment_setup.sh: stopped before \
the end, $VENV is not complete; run this again (it starts over)" >&2
}

# From here to the new stamp the environment does not count as complete.
begin_changes() {
  [[ $DRY_RUN == yes ]] || UNFINISHED=yes
  run rm -f "$STAMP"
}

# ASCII, as other locales can't read more in a path file; a Python expression of a path's bytes.
quoted_path() { "$PY" -c 'import os, sys; print(f"os.fsdecode({os.fsencode(sys.argv[1])!r})")' "$1"; }

create_venv() {
  local folder packages flags=""
  [[ $ORIGIN == installed || $(fact sees_base_packages) == no ]] || flags=--system-site-packages
  step "Creating $VENV from $PY (about 10 seconds)"
  # The marker outlives the rest: deleting a large environment can be interrupted too. The slash
  # makes a link to a folder with more room (.venv -> /scratch/...) work.
  run find "$VENV/" -mindepth 1 -maxdepth 1 ! -name "$(basename "$MARKER")" -exec rm -rf {} +
  run "$PY" -m venv ${flags:+"$flags"} "$VENV"
  # A path file instead of 'pip install -e': it needs no build tool, so no network either.
  packages=$VENV/lib/python$(fact python_version | cut -d. -f1-2)/site-packages
  write "$packages/workshop.pth" <<<"import os, sys; sys.path.append($(quoted_path "$ROOT"))"
  # pyproject.toml's script, for the same reason.
  write "$VENV/bin/lm_gen" <<'END'
#!/bin/sh
exec "$(dirname "$0")/python" -m labs.text_generation.lm_gen "$@"
END
  run chmod +x "$VENV/bin/lm_gen"
  [[ $ORIGIN == existing && -n $(fact parent_environment) ]] || return 0
  # The Python is itself a venv's, and a venv made from it would see what lies below that venv, if
  # anything, but not the venv. addsitedir, unlike a plain path, also honours its own .pth files.
  fact parent_environment | tr ':' '\n' | while IFS= read -r folder; do
    echo "import os, site; site.addsitedir($(quoted_path "$folder"))"
  done | write "$packages/workshop-parent.pth"
}

install_packages() { # install_packages ARGUMENTS-OF-PIP...
  if [[ $STATE == add ]]; then
    # Resolve first, change nothing: a package that cannot be had must not cost a good environment.
    pip install --dry-run -c "$CONSTRAINTS" "$@" ||
      fail 1 "what is missing cannot be installed (see above); $VENV stays as it was"
    begin_changes
  fi
  pip install -c "$CONSTRAINTS" "$@"
}

# On a site's own PyTorch only what is missing is added: its numpy was chosen to go with its torch,
# and a compute node may have no network to fetch another one from.
install_requirements() {
  local file line
  local -a wanted=()
  for file in "${REQUIREMENTS[@]}"; do
    if [[ $ORIGIN == existing ]]; then
      while IFS= read -r line; do wanted+=("$line"); done < <(probe "$PROBE_PY" missing "$file")
    else
      wanted+=(-r "$file")
    fi
  done
  if [[ ${#LOST[@]} -gt 0 ]]; then
    step "Installing again what is gone: ${LOST[*]}"
    install_packages --no-deps --force-reinstall "${LOST[@]}"
  fi
  if [[ ${#wanted[@]} -eq 0 ]]; then
    note "the other packages are all there already"
  else
    step "Installing the other packages (up to a minute; 150 MB${EXTRAS:+, and more for$EXTRAS})"
    install_packages "${wanted[@]}"
  fi
}

pip_from_index() { # pip_from_index ARGUMENTS-OF-PIP...
  local -a from=()
  [[ $INDEX == default ]] || from=(--index-url "$INDEX")
  pip install ${from[@]+"${from[@]}"} "$@"
}

install_torch() {
  local size="about 1 minute; 200 MB"
  [[ $ORIGIN == installed ]] || return 0
  if [[ $STATE == add && $(fact torch_version) == "$TORCH_VERSION"* ]]; then return; fi
  choose_index "torch==$TORCH_VERSION"
  [[ $INDEX != default || $BUILD == cuda ]] || warn_of_default_index
  [[ $BUILD == cpu ]] || size="5 to 20 minutes; several GB"
  step "Installing PyTorch $TORCH_VERSION, $BUILD build ($size), index: $INDEX"
  pip_from_index "torch==$TORCH_VERSION"
}

# GPU builds bring the one Triton that they were released with, which nothing may replace; a CPU
# build brings none. Only V3 needs it, so a Triton that cannot be had is a warning.
install_triton() {
  local kind=$BUILD version="" # what a dry run expects of a fresh environment
  if [[ $DRY_RUN == no || $STATE == add ]]; then
    kind=$(fact torch_kind) version=$(fact triton_version)
  fi
  [[ $ORIGIN == installed && $kind == cpu && -z $version ]] || return 0
  [[ $(uname) == Linux ]] || return 0 # there are no wheels for other systems
  step "Installing Triton, for V3 (about 20 seconds; 200 MB)"
  if pip install -c "$CONSTRAINTS" -r "$SETUP/requirements-triton.txt"; then
    [[ $DRY_RUN == yes ]] || FACTS=$(probe "$VENV/bin/python" describe)
  else
    warn "Triton cannot be installed (see above), so V3 will be skipped; all else works." \
      "To try again: $VENV/bin/python -m pip install -r setup/requirements-triton.txt"
  fi
}

torchvision_for() { # torchvision_for TORCH-VERSION: 0.(X + 15).Y goes with 2.X.Y
  local minor patch
  IFS=. read -r _ minor patch <<<"${1%%[!0-9.]*}"
  echo "0.$((minor + 15)).$patch"
}

# Only the inference lab needs it, so one that cannot be had is a warning. It asks for PyTorch, which
# --no-deps keeps as it is; the requirements bring what else it needs.
install_torchvision() {
  local torch=$TORCH_VERSION there="" version # what a dry run expects of a fresh environment
  if [[ $DRY_RUN == no || $STATE == add || $ORIGIN == existing ]]; then
    there=$(fact torchvision_version)
  fi
  if [[ $ORIGIN == existing ]]; then
    [[ -z $there ]] || return 0
    torch=$(fact torch_version) INDEX=default
  fi
  version=$(torchvision_for "$torch")
  [[ ${there%%+*} != "$version" ]] || return 0
  [[ -n $INDEX ]] || choose_index "torchvision==$version"
  step "Installing torchvision $version, for the inference lab (some seconds; 10 MB), index: $INDEX"
  pip_from_index --no-deps --force-reinstall "torchvision==$version" ||
    warn "torchvision cannot be installed (see above), so the inference lab will be skipped; all" \
      "else works. To try again: $VENV/bin/python -m pip install --no-deps torchvision==$version"
}

# After PyTorch and torchvision, which it asks for. Only the tests need it.
install_timm() {
  local file=$SETUP/requirements-labs.txt
  [[ " $EXTRAS " == *" test "* ]] || return 0
  [[ $ORIGIN == installed || -n $(probe "$PROBE_PY" missing "$file") ]] || return 0
  step "Installing timm and accelerate, two labs' peers (some seconds; 3 MB)"
  pip install --no-deps -r "$file" ||
    warn "timm or accelerate cannot be installed (see above), so the tests that need it will be skipped"
}

# Looks from inside the finished environment: PYTHONPATH, for one, can put another torch in front.
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

write_stamp() {
  probe "$VENV/bin/python" packages "${REQUIREMENTS[@]}" | write "$PACKAGES"
  write "$STAMP" <<END
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
torchvision=$(probe "$VENV/bin/python" locate torchvision)
extras=$EXTRAS
fingerprint=$FINGERPRINT
END
}

# --- The summary ---------------------------------------------------------------------------------

# A venv made on a login node, or after a fallback, may have no build for the GPU of this machine.
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
    version="none: V3 is skipped; see 'Triton' in setup/environment_setup.md"
  elif [[ $(stamped torch_kind) == cpu ]]; then
    version+=", interpreting V3's kernels"
  fi
  echo "$version"
}

summarise() {
  local cxx=g++ # what torch.compile would call for CPU code: $CXX, else one fixed name
  [[ $(uname) != Darwin ]] || cxx=clang++
  cxx=$(command -v "${CXX:-$cxx}" 2>/dev/null || true)
  step "Ready"
  note "Python    $(stamped python_version), $VENV/bin/python"
  note "PyTorch   $(stamped torch_version) ($(stamped torch_kind) build), $(stamped torch)"
  note "Triton    $(triton_line)"
  note "Device    $(probe "$VENV/bin/python" device)"
  note "Compiler  ${cxx:-none}"
  [[ -n $cxx ]] || note "no C++ compiler: torch.compile is off on the CPU; V4 runs without it;" \
    "get it with your system's packages (g++; on macOS xcode-select --install) or set CXX"
  command -v make >/dev/null || note "no make: the Makefile has the commands to type instead"
  note "Next      make compare"
}

main() {
  parse_arguments "$@"
  ASKED=$BUILD
  [[ -z $PYTHON ]] || choose_python
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
  if [[ $STATE == fresh ]]; then
    [[ -n $PYTHON ]] || choose_python
    leave_own_venv
    PROBE_PY=$PY
  else
    PY=$(stamped python) PROBE_PY=$VENV/bin/python
    ASKED=$(stamped asked) BUILD=$(stamped build) ORIGIN=$(stamped origin)
  fi
  step "Looking at $PROBE_PY"
  FACTS=$(probe "$PROBE_PY" describe) ||
    fail 1 "$PROBE_PY crashed on 'import torch': try it by hand, or name another Python with --python"
  note "Python $(fact python_version)"
  [[ $STATE != fresh ]] || choose_build
  case $ORIGIN in
    existing) note "chosen: the PyTorch that is there, left as it is" ;;
    installed) note "chosen: PyTorch $TORCH_VERSION, $BUILD build, in $VENV" ;;
  esac

  claim_folder "$@"
  if [[ $STATE == fresh ]]; then
    begin_changes
    create_venv
  fi
  [[ $DRY_RUN == yes ]] || : >"$LOG"
  note "pip's output goes to $LOG"
  if [[ $ORIGIN == existing ]]; then fact torch_pins | tr ' ' '\n'; else echo "torch==$TORCH_VERSION"; fi |
    write "$CONSTRAINTS"
  install_requirements
  install_torch
  [[ $DRY_RUN == yes ]] || verify
  install_triton
  install_torchvision
  install_timm
  [[ $DRY_RUN == no ]] || exit 0
  write_stamp
  UNFINISHED=no
  summarise
  warn_if_gpu_is_idle
}

# Sourced, this file only defines its functions; the tests do so.
if [[ ${BASH_SOURCE[0]} == "$0" ]]; then main "$@"; fi

# shellcheck shell=bash
# What the run_*.sh scripts share: arguments, checks of the machine, the output folder, running.
# They source it. Each version's folder has links to the scripts, and so has each lab's whose program
# takes --profile-steps, or has a train.py with --profile-one-step: the folder of the link that was
# called chooses the program. Written for bash 3.2 (macOS) and later.
#
# A script may set DEFAULT_STEPS, MODES and, where it has a form for a class, CLASS_FORM (what that
# does, and its minutes) with CLASS_MODE and CLASS_FLAGS; then it calls `begin "$@"`, which sets
#   OUT     the folder for its outputs, absolute
#   STEPS   steps under the profiler
#   PYTHON  a Python that has PyTorch
#   TRAIN   the program to profile, an array: the version's file or the lab's, with its flags
set -euo pipefail
unset CDPATH

SCRIPT=${BASH_SOURCE[1]}
FOLDER=$(cd "$(dirname "$SCRIPT")" && pwd)
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
for MODEL in "$FOLDER"/tiny_llama_v[0-9].py "$FOLDER"/{micro_benchmarking_pytorch,train}.py; do
  [[ ! -f $MODEL ]] || break
done
ONE_STEP=no # whether the program profiles one step and ends
case $MODEL in
  */tiny_llama_*) KEY=${MODEL##*/tiny_llama_} KEY=${KEY%.py} COUNT_FLAG=--num-steps ;;
  */train.py) KEY=${FOLDER##*/} COUNT_FLAG="" ONE_STEP=yes ;;
  *) KEY=${FOLDER##*/} COUNT_FLAG=--iterations ;; # a lab
esac
TOOL=$(basename "$SCRIPT" .sh)
TOOL=${TOOL#run_}
COMMAND_FILE=command.txt # in OUT: what was run; also the mark of a folder that may be replaced
OUTPUT_FILE=output.txt   # in OUT: what the commands printed

DEFAULT_STEPS=3
MODES=""
MODE=all
CLASS_FORM="" CLASS_MODE=all
CLASS_FLAGS=() # of a version's program
CLASS=no
DRY_RUN=no
STARTED=no # whether OUT is ours by now
LOCK=""    # the file that keeps other runs out of it
PARTIAL="" # a file that is being written
FAILED=""  # commands of `attempt` that failed
SKIP_PATTERN="" SKIP_REASON=""

usage() {
  local steps=$DEFAULT_STEPS
  [[ -n $steps ]] || steps="each tool's own"
  sed -n '2,/^$/ s/^# \{0,1\}//p' "$SCRIPT" # its first comment
  cat <<END

  --steps N         steps under the profiler (default: $steps)
  --output-dir DIR  where the outputs go; a folder that a profiler's script filled is replaced
                    (default: ${OUT#"$ROOT/"})
${MODES:+  --mode MODE       only one of: $MODES
}${CLASS_FORM:+  --class           for a class: $CLASS_FORM
}  --dry-run         print the commands and run nothing; needs neither the tool nor a GPU
  --help            this text
  -- FLAGS          flags of $(basename "$MODEL"), such as --batch-size 8

PYTHON names the Python to run (default: python, or the one of .venv, whichever has PyTorch).
Exit status: 0 done, 1 a command failed, 2 wrong usage, 77 this machine does not have what it needs,
130 interrupted.
END
}

note() { printf '# %s\n' "$*"; }
say() { printf '%s\n' "$*" >&2; }
fail() { # fail STATUS MESSAGE...
  say "error: $(basename "$SCRIPT"): ${*:2}"
  exit "$1"
}
skip() {
  say "skipped: $*"
  exit 77
}

[[ -f $MODEL ]] ||
  fail 2 "call it in a version's folder, such as version1_pytorch_baseline/$(basename "$SCRIPT")"

# --- Arguments -----------------------------------------------------------------------------------

begin() {
  local word previous=""
  local -a profiled
  OUT=$ROOT/results/profiles/$KEY/$TOOL
  if [[ $TOOL == all_profilers ]]; then
    DEFAULT_STEPS=""
    OUT=$ROOT/results/profiles
  fi
  if [[ $ONE_STEP == yes ]]; then DEFAULT_STEPS=1; fi
  STEPS=$DEFAULT_STEPS
  FLAGS=()
  while [[ $# -gt 0 ]]; do
    case $1 in
      --steps=* | --output-dir=* | --mode=*)
        word=$1 && shift
        set -- "${word%%=*}" "${word#*=}" "$@"
        ;;
      --steps | --output-dir | --mode)
        [[ -n ${2:-} ]] || fail 2 "$1 needs a value; see --help"
        case $1 in --steps) STEPS=$2 ;; --output-dir) OUT=$2 ;; --mode) choose_mode "$2" ;; esac
        shift 2
        ;;
      --dry-run) DRY_RUN=yes && shift ;;
      --class)
        [[ -n $CLASS_FORM ]] || fail 2 "it has no form for a class; see --help"
        CLASS=yes STEPS=1 MODE=$CLASS_MODE
        shift
        ;;
      --help | -h)
        usage
        exit 0
        ;;
      --) shift && break ;;
      *) fail 2 "unknown option '$1' (flags of the model go after --); see --help" ;;
    esac
  done
  case $STEPS in
    "$DEFAULT_STEPS") ;;
    0* | *[!0-9]*) fail 2 "--steps $STEPS: it must be a whole number of at least 1" ;;
  esac
  [[ $ONE_STEP == no || $STEPS == 1 ]] ||
    fail 2 "--steps $STEPS: $(basename "$MODEL") profiles one step; --warmup-iters, after --, says which"
  OUT=$(absolute "$OUT")
  # The same folder may be named for all versions.
  [[ $TOOL != all_profilers ]] || OUT=$OUT/$KEY
  for word in "$@"; do
    refuse_own_flag "$word"
    case $previous:$word in # some tools run in another folder
      --text-file:* | --data:*) word=$(absolute "$word") ;;
      *:--data=*) word=--data=$(absolute "${word#*=}") ;;
      *:--text-file=*) word=--text-file=$(absolute "${word#*=}") ;;
    esac
    FLAGS+=("$word")
    previous=$word
  done
  choose_python
  profiled=(--profile-steps "$STEPS" --output-dir "$OUT")
  if [[ $CLASS == yes ]]; then
    note "for a class: $CLASS_FORM (an estimate)"
    case $MODEL in */tiny_llama_*) profiled+=(${CLASS_FLAGS[@]+"${CLASS_FLAGS[@]}"}) ;; esac
  fi
  if [[ $ONE_STEP == yes ]]; then
    profiled=(--epochs 1 --batch-size 128 --profile-one-step --warmup-iters 20 --out-dir "$OUT")
  fi
  # shellcheck disable=SC2034 # it is for the scripts
  TRAIN=("$PYTHON" "$MODEL" "${profiled[@]}" ${FLAGS[@]+"${FLAGS[@]}"})
  trap on_exit EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
}

absolute() { # absolute PATH
  case $1 in /*) printf '%s' "$1" ;; *) printf '%s' "$PWD/$1" ;; esac
}

# The model would take the flag, or its beginning, and the profile would be of something else than
# this script prints.
refuse_own_flag() { # refuse_own_flag WORD
  local flag name=${1%%=*}
  for flag in --out-dir --output-dir --profile-steps "$COUNT_FLAG"; do
    [[ $name == --?* && $flag == "$name"* ]] || continue
    case $flag in --out*) flag=--output-dir ;; *) flag=--steps ;; esac
    fail 2 "$name, after --, is no flag for a profile: use $flag of $(basename "$SCRIPT")"
  done
}

choose_mode() {
  case " $MODES " in
    *" $1 "*) MODE=$1 ;;
    "  ") fail 2 "unknown option '--mode'; see --help" ;;
    *) fail 2 "--mode $1: must be one of $MODES" ;;
  esac
}

wanted() { [[ $MODE == all || $MODE == "$1" ]]; } # wanted MODE

choose_python() {
  local candidate
  if [[ -n ${PYTHON:-} ]]; then
    case $PYTHON in /*) ;; */*) PYTHON=$PWD/$PYTHON ;; esac
    [[ $DRY_RUN == yes ]] || has_module "$PYTHON" torch ||
      fail 2 "PYTHON=$PYTHON can't be run or has no PyTorch: name another one, or run 'make setup'"
    return 0
  fi
  for candidate in python python3 "$ROOT/.venv/bin/python"; do
    if has_module "$candidate" torch; then PYTHON=$candidate && return; fi
  done
  PYTHON=python
  [[ $DRY_RUN == yes ]] || fail 2 "no Python with PyTorch: run 'make setup', load your site's" \
    "PyTorch module, or name the Python with PYTHON=..."
}

# Without importing it, which takes PyTorch seconds.
has_module() { # has_module PYTHON MODULE
  "$1" -c "import importlib.util as i, sys; sys.exit(i.find_spec('$2') is None)" 2>/dev/null
}

# --- What the machine has ------------------------------------------------------------------------

# Each ends the script as skipped if the machine does not have it; a dry run needs nothing.

need() { # need PROGRAM WHERE-IT-COMES-FROM
  [[ $DRY_RUN == yes ]] || command -v "$1" >/dev/null || skip "$1 is not installed: $2"
}

need_module() { # need_module MODULE WHERE-IT-COMES-FROM
  [[ $DRY_RUN == yes ]] || has_module "$PYTHON" "$1" || skip "$PYTHON has no module $1: $2"
}

need_gpu() { # need_gpu nvidia|amd|any
  [[ $DRY_RUN == no ]] || return 0
  case $1 in
    nvidia) has_nvidia || skip "no NVIDIA GPU here (nvidia-smi -L lists none)" ;;
    amd) has_amd || skip "no AMD GPU here (there is no /dev/kfd)" ;;
    any) has_nvidia || has_amd || skip "no GPU here (neither nvidia-smi -L nor /dev/kfd has one)" ;;
  esac
  # Last, because it takes seconds.
  "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null ||
    skip "PyTorch sees no GPU here (is it a CPU build?)"
}

has_nvidia() { case "$(nvidia-smi -L 2>/dev/null || true)" in GPU*) ;; *) return 1 ;; esac; }
has_amd() { [[ -e /dev/kfd || -n $(amd_architecture) ]]; }

# Of the first GPU, such as gfx942; nothing where there is none. gfx000 is a CPU.
amd_architecture() {
  { rocm_agent_enumerator || rocminfo || true; } 2>/dev/null | first_match 'gfx[1-9][0-9a-f]*'
}

version_of() { # version_of PROGRAM...: nothing where it is not installed
  command -v "$1" >/dev/null || return 0
  # Standard error comes last: a warning may have a number too.
  { printf '%s\n' "$({ "$@" --version || true; } 2>&1 >&3)"; } 3>&1 |
    first_match '[0-9]+[.][0-9]+([.][0-9]+)?'
}

# A line with == names a package that a tool lacks.
first_match() {
  awk -v wanted="$1" '!found && !/==/ && match($0, wanted) { found = 1; print substr($0, RSTART, RLENGTH) }'
}

# Sets TOOL_VERSION, by which options are chosen: a program's, or the newest that we know where it
# is not installed, which only a dry run gets to.
find_version() { # find_version PROGRAM... NEWEST
  local newest=${*: -1}
  TOOL_VERSION=$(version_of "${@:1:$#-1}")
  [[ -z $TOOL_VERSION ]] || return 0
  TOOL_VERSION=$newest
  note "the version of $1 is not known here: these are the options of $newest, the newest"
}

at_least() { # at_least VERSION WANTED
  [[ $(printf '%s\n%s\n' "$2" "$1" | sort -t. -k1,1n -k2,2n -k3,3n | head -n 1) == "$2" ]]
}

# --- Running -------------------------------------------------------------------------------------

# Each of these prints the command, so that it can be pasted, keeps it in COMMAND_FILE, and runs it
# unless this is a dry run.

run() { # run COMMAND...: the script ends if it fails
  local status=0 reason
  announce "$(quoted "$@")"
  execute "$@" || status=$?
  case $status in
    0) ;;
    77) # our program's, which says why; a tool may end so without a word
      reason=$(sed -n 's/^error: //p' "$OUT/$OUTPUT_FILE" | tail -n 1)
      skip "${reason:-$TOOL ended with exit status 77; its output is in $OUT/$OUTPUT_FILE}"
      ;;
    130) exit 130 ;;
    *)
      fail 1 "$TOOL failed with exit status $status; its output is in $OUT/$OUTPUT_FILE"
      ;;
  esac
}

attempt() { # attempt WHAT COMMAND...: the script goes on if it fails, and reports it at the end
  local status=0
  announce "$(quoted "${@:2}")"
  execute "${@:2}" || status=$?
  [[ $status -ne 130 ]] || exit 130
  [[ $status -eq 0 ]] || failed_attempt "$1"
}

attempt_to() { # attempt_to FILE COMMAND...: as attempt, with its standard output written to FILE
  announce "$(quoted "${@:2}") >$(quoted "$1")"
  [[ $DRY_RUN == no ]] || return 0
  PARTIAL=$1.part
  if "${@:2}" >"$PARTIAL" 9>&-; then
    mv "$PARTIAL" "$1"
  else
    rm -f "$PARTIAL"
    failed_attempt "$(basename "$1")"
  fi
}

failed_attempt() {
  FAILED+="${FAILED:+, }$1"
  say "failed: $1"
}

enter() { # enter FOLDER: for a tool that writes to where it is run
  announce "cd$(quoted "$1")"
  [[ $DRY_RUN == yes ]] || cd "$1"
}

# A tool that is not permitted to read counters prints so, and may have any exit status.
skip_if_printed() { SKIP_PATTERN=$1 SKIP_REASON=$2; } # skip_if_printed TEXT REASON

execute() {
  local status=0
  [[ $DRY_RUN == no ]] || return 0
  # tee ignores Ctrl-C, so that it also copies what the command prints after it.
  PYTHONUNBUFFERED=1 "$@" 2>&1 9>&- | tee -ai "$OUT/$OUTPUT_FILE" || status=${PIPESTATUS[0]}
  if [[ -n $SKIP_PATTERN ]] && grep -q "$SKIP_PATTERN" "$OUT/$OUTPUT_FILE"; then
    skip "$SKIP_REASON"
  fi
  return "$status"
}

announce() {
  prepare_output
  printf '%s\n' "${1# }"
  record "${1# }"
}

record() { # record LINE
  if [[ $STARTED == yes && $DRY_RUN == no ]]; then printf '%s\n' "$1" >>"$OUT/$COMMAND_FILE"; fi
}

# Once the machine is known to have what it takes: a script that is skipped leaves what is there.
prepare_output() {
  [[ $STARTED == no ]] || return 0
  [[ $DRY_RUN == yes ]] || take_folder
  STARTED=yes
  announce "mkdir -p$(quoted "$OUT")"
}

take_folder() {
  mkdir -p "$OUT" 2>/dev/null || fail 2 "--output-dir $OUT: it can't be made"
  take_lock
  if [[ -n $(ls -A "$OUT") ]] && ! filled_by_us; then
    fail 2 "--output-dir $OUT: it is not empty, and not written by this script: choose another one"
  fi
  # The mark goes last: deleting can be interrupted too.
  find "$OUT/" -mindepth 1 -maxdepth 1 ! -name "$COMMAND_FILE" -exec rm -rf {} +
  note "$(basename "$SCRIPT") of $KEY, $(date -u +%Y-%m-%dT%H:%M:%SZ)" >"$OUT/$COMMAND_FILE" ||
    fail 2 "--output-dir $OUT: it can't be written"
}

# Two runs would mix their files. The lock ends with its process; no command that is run inherits it.
take_lock() {
  local folder file
  folder=$(cd "$OUT" && pwd -P)
  file=${folder%/*}/.${folder##*/}.lock
  # No lock where this user can't write beside the folder.
  if [[ ! -w ${file%/*}/ ]] || ! command -v flock >/dev/null; then return 0; fi
  exec 9>>"$file"
  flock -n 9 || [[ $? -ne 1 ]] || # another status: a file system without locks
    fail 2 "another run is filling $OUT: wait for it, or choose another --output-dir"
  LOCK=$file
}

filled_by_us() {
  local first=""
  [[ ! -f $OUT/$COMMAND_FILE ]] || read -r first <"$OUT/$COMMAND_FILE" || true
  [[ $first == "# run_"* ]]
}

quoted() { # each word as a shell reads it, with a space before it
  local word escaped="'\\''"
  for word in "$@"; do
    case $word in '' | *[!a-zA-Z0-9_./:=,+%@-]*) word="'${word//\'/$escaped}'" ;; esac
    printf ' %s' "$word"
  done
}

# --- The end -------------------------------------------------------------------------------------

show() { # the kernel table of what OUT holds
  [[ $DRY_RUN == no ]] || return 0
  ours -m workshop.profilers show "$OUT" --output-dir "$OUT" ||
    fail 1 "the profile in $OUT has no kernel table (see above)"
}

# Prints what opens the files that no table is made of; an error if there are none.
timelines() { # timelines PATTERN ADVICE [PATTERN ADVICE]...
  local found all=""
  [[ $DRY_RUN == no ]] || return 0
  while [[ $# -gt 0 ]]; do
    found=$(find "$OUT" -name "$1" | sort | sed "s#\$#: $2#")
    [[ -z $found ]] || printf '%s\n' "$found"
    all+=$found
    shift 2
  done
  [[ -n $all ]] || fail 1 "the tool wrote no trace; its output is in $OUT/$OUTPUT_FILE"
}

# Where rocprof-compute puts a workload, below the folder that it runs in: it adds the GPU's model.
workload() { # workload NAME
  local folder
  for folder in "workloads/$1"/*/; do
    if [[ -d $folder ]]; then printf '%s' "${folder%/}" && return; fi
  done
  printf '%s' "workloads/$1/MODEL"
}

ours() { PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} "$PYTHON" "$@"; }

on_exit() {
  local status=$?
  if [[ $status -eq 0 && -n $FAILED ]]; then
    status=1
    say "error: $(basename "$SCRIPT"): failed: $FAILED; the rest is in $OUT"
  fi
  case $STARTED:$status in
    yes:130 | yes:143) say "interrupted: $OUT is not complete" ;;
    no:130 | no:143) say "interrupted before anything was run" ;;
  esac
  record "# exit status $status"
  [[ -z $PARTIAL ]] || rm -f "$PARTIAL"
  [[ -z $LOCK ]] || rm -f "$LOCK"
  exit "$status"
}

# Runs the other scripts of the folder with the same arguments, and shows how they ended.
run_all() { # run_all SCRIPT...
  local -a options
  options=(--folder "$FOLDER" --output-dir "$OUT")
  [[ -z $STEPS ]] || options+=(--steps "$STEPS")
  [[ $DRY_RUN == no ]] || options+=(--dry-run)
  [[ $CLASS == no ]] || options+=(--class)
  export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
  exec "$PYTHON" -m workshop.profilers.run_all "${options[@]}" "$@" \
    -- ${FLAGS[@]+"${FLAGS[@]}"}
}

#!/usr/bin/env bash
# rocprof-compute (AMD): how well does each kernel use the chip's parts, and where is its roofline?
# Two modes, one after the other: counters (all of them) and roofline.
#
# Usage: ./run_rocprof_compute.sh [options] [-- flags of the model]

# shellcheck source-path=SCRIPTDIR source=profile_lib.sh
source "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/profile_lib.sh"
MODES="counters roofline"
DEFAULT_STEPS=1 # the whole program is run again for every group of counters
CLASS_MODE=roofline
CLASS_FORM="one step, three runs of the program and the ceilings, 5 minutes"
begin "$@"
need_gpu amd
need rocprof-compute "it is ROCm's package rocprofiler-compute"

REFUSAL='package was not found\|does not meet version'
# It is a Python program that demands exact versions of packages of its own, so it must not find
# .venv's Python. The program that it profiles keeps its Python, and the modules' PYTHONPATH.
TRAIN[0]=$(command -v "$PYTHON" || printf '%s' "$PYTHON")
if [[ -n ${PYTHONPATH:-} ]]; then TRAIN=(env "PYTHONPATH=$PYTHONPATH" "${TRAIN[@]}"); fi
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV
PATH=:$PATH:
PATH=${PATH//":$ROOT/.venv/bin:"/:}
PATH=${PATH#:} PATH=${PATH%:}
tool=(rocprof-compute)
if [[ -n ${ROCPROF_COMPUTE_PYTHON:-} ]]; then
  tool=("$ROCPROF_COMPUTE_PYTHON" "$(command -v rocprof-compute || printf rocprof-compute)")
fi
note "to type these yourself, deactivate .venv first: rocprof-compute refuses its packages"
if [[ $DRY_RUN == no ]]; then
  refusal=$({ "${tool[@]}" --version || true; } 2>&1 | grep -m 1 "$REFUSAL" || true)
  [[ -z $refusal ]] || skip "rocprof-compute refuses its Python (${refusal# }): docs/amd.md, 'Where" \
    "rocprof-compute's packages are', has the way out"
fi
find_version "${tool[@]}" 3.10 # 3.2 is ROCm 7.0's, 3.4 is 7.2's, 3.10 is 10.2's

if [[ $CLASS == yes ]] && ! at_least "$TOOL_VERSION" 3.1.1; then MODE=counters; fi # see below

# Its workloads/NAME/<model of the GPU> is made where it runs: newer versions have no option for
# the place, older ones have another.
enter "$OUT"
[[ $DRY_RUN == no ]] || note "MODEL is the name of the GPU, which the first run finds out"

# From 3.6 on `analyze` alone needs those packages. Our table does without its text.
analyze() { # analyze FILE OPTION...
  announce "$(quoted "${tool[@]}" analyze "${@:2}") >$(quoted "$1")"
  [[ $DRY_RUN == no ]] || return 0
  PARTIAL=$1.part
  if "${tool[@]}" analyze "${@:2}" >"$PARTIAL" 2>&1 9>&-; then
    mv "$PARTIAL" "$1"
  elif grep -q "$REFUSAL" "$PARTIAL"; then
    rm -f "$PARTIAL"
    note "left out $1: rocprof-compute refuses its Python; docs/amd.md says how to give it one"
  else
    rm -f "$PARTIAL"
    failed_attempt "$1"
  fi
}

if wanted counters; then
  run "${tool[@]}" profile --name counters --no-roof -- "${TRAIN[@]}"
  analyze counters.txt --path "$(workload counters)"
fi

# `profile` draws the roofline up to 3.5 (ROCm 7.12), `analyze` from 3.6 on: for these data types,
# which can be chosen from 3.1.1 on (ROCm 6.4.2).
types=(--roofline-data-type BF16 FP32)
profile=("${types[@]}") types_of_analyze=()
if at_least "$TOOL_VERSION" 3.6; then
  profile=() types_of_analyze=("${types[@]}")
fi
if wanted roofline && ! at_least "$TOOL_VERSION" 3.1.1; then
  [[ $MODE != roofline ]] || skip "roofline: it takes rocprof-compute 3.1.1, of ROCm 6.4.2"
  note "left out the roofline: it takes rocprof-compute 3.1.1, of ROCm 6.4.2"
elif wanted roofline; then
  run "${tool[@]}" profile --name roofline --roof-only ${profile[@]+"${profile[@]}"} \
    -- "${TRAIN[@]}"
  analyze roofline.txt --path "$(workload roofline)" ${types_of_analyze[@]+"${types_of_analyze[@]}"}
fi

# The roofline's own counters are bytes and operations, which the table has too.
show

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

# It is a Python program that demands exact versions of packages of its own, so it must not find
# .venv's Python; the program that it profiles keeps its own Python, and the modules' PYTHONPATH.
TRAIN[0]=$(command -v "$PYTHON" || printf '%s' "$PYTHON")
[[ -z ${PYTHONPATH:-} ]] || TRAIN=(env "PYTHONPATH=$PYTHONPATH" "${TRAIN[@]}")
OURS_PATH=${PYTHONPATH:-}
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV
PATH=$(tr : '\n' <<<"$PATH" | grep -vx "$ROOT/\.venv/bin" | paste -sd : -)
tool=(rocprof-compute)
if [[ -n ${ROCPROF_COMPUTE_PYTHON:-} ]]; then
  tool=("$ROCPROF_COMPUTE_PYTHON" "$(realpath "$(command -v rocprof-compute)")")
fi
note "in a shell of your own, deactivate .venv first: ${tool[0]} refuses its packages"
find_version rocprof-compute 3.9 # 3.2 is ROCm 7.0's, 3.4 is 7.2's, 3.9 is 10.1's

# Its workloads/NAME/<model of the GPU> is made where it runs: newer versions have no option for
# the place, older ones have another.
enter "$OUT"
[[ $DRY_RUN == no ]] || note "MODEL is the name of the GPU, which the first run finds out"
if wanted counters; then
  run rocprof-compute profile --name counters --no-roof -- "${TRAIN[@]}"
  attempt_to counters.txt rocprof-compute analyze --path "$(workload counters)"
fi

# `profile` draws the roofline up to 3.5 (ROCm 7.12), `analyze` from 3.6 on: for these data types,
# which can be chosen from 3.1.1 on (ROCm 6.4.2).
types=(--roofline-data-type BF16 FP32)
profile=("${types[@]}") analyze=()
if at_least "$TOOL_VERSION" 3.6; then
  profile=() analyze=("${types[@]}")
fi
if wanted roofline && ! at_least "$TOOL_VERSION" 3.1.1; then
  [[ $MODE != roofline ]] || skip "roofline: it takes rocprof-compute 3.1.1, of ROCm 6.4.2"
  note "left out the roofline: it takes rocprof-compute 3.1.1, of ROCm 6.4.2"
elif wanted roofline; then
  run rocprof-compute profile --name roofline --roof-only ${profile[@]+"${profile[@]}"} \
    -- "${TRAIN[@]}"
  attempt_to roofline.txt rocprof-compute analyze --path "$(workload roofline)" \
    ${analyze[@]+"${analyze[@]}"}
fi

# The ceilings alone have no table.
[[ $MODE == roofline ]] || show

#!/usr/bin/env bash
# rocprof-sys (AMD): what do the host's threads do while the GPU works or waits?
# Two modes, one after the other: sample (call stacks of the host) and trace (every event).
#
# Usage: ./run_rocprof_sys.sh [options] [-- flags of the model]

# shellcheck source-path=SCRIPTDIR source=profile_lib.sh
source "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/profile_lib.sh"
MODES="sample trace"
CLASS_MODE=trace CLASS_FORM="one step, every event, one run of the program, 2 minutes"
begin "$@"
need_gpu amd
need rocprof-sys-sample "it is ROCm's package rocprofiler-systems"
find_version rocprof-sys-sample 1.10

# Without TIME_OUTPUT=OFF the outputs lie in a folder named after the time. The trace that Perfetto
# opens may not have what threads other than the main one do, such as the backward pass, for which
# autograd has its own (ours keeps to the main one under a profiler); the database of USE_ROCPD has
# it, from version 1.2 on (ROCm 7.1).
settings=(ROCPROFSYS_TIME_OUTPUT=OFF)
if at_least "$TOOL_VERSION" 1.2; then settings+=(ROCPROFSYS_USE_ROCPD=ON); fi

# No preset: workload-trace, which the tool names for training, switches the sampling off.
what=(--trace --profile --device)
if wanted sample; then
  run env "${settings[@]}" rocprof-sys-sample "${what[@]}" \
    --output "$OUT/sample" -- "${TRAIN[@]}"
fi

if wanted trace; then
  run env "${settings[@]}" rocprof-sys-run "${what[@]}" \
    --output "$OUT/trace" -- "${TRAIN[@]}"
fi

timelines \
  "*.proto" "open it in ui.perfetto.dev" \
  "*.db" "has every thread; for ui.perfetto.dev: rocpd convert -i FILE -f pftrace"

# The database of one run has kernels and calls of the runtime, from version 1.2 on.
if [[ $MODE == trace ]] && at_least "$TOOL_VERSION" 1.2; then show; fi

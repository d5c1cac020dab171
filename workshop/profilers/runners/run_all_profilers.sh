#!/usr/bin/env bash
# Every profiler that this machine has, one after the other; a table and a page of what came out.
# What it does not have is skipped, and after a failure the others still run.
#
# Usage: ./run_all_profilers.sh [options] [-- flags of the model]

# shellcheck source-path=SCRIPTDIR source=profile_lib.sh
source "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/profile_lib.sh"
CLASS_FORM="that of each script, 5 minutes on NVIDIA and 15 on AMD"
begin "$@"

run_all \
  run_pytorch_profiler.py \
  run_deepspeed_flops.py \
  run_rocprofv3.sh \
  run_rocprof_sys.sh \
  run_rocprof_compute.sh \
  run_ncu.sh \
  run_nsys.sh \
  run_proton.sh

#!/usr/bin/env bash
# nsys, Nsight Systems (NVIDIA): when does each kernel and copy run, what does the host do
# meanwhile, and where does the GPU wait?
#
# Usage: ./run_nsys.sh [options] [-- flags of the model]

# shellcheck source-path=SCRIPTDIR source=profile_lib.sh
source "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/profile_lib.sh"
CLASS_FORM="one step, 1 minute"
begin "$@"
need_gpu nvidia
need nsys "it comes with the CUDA toolkit, and by itself as Nsight Systems"

# Recorded are the steps between cudaProfilerStart and cudaProfilerStop, which the program calls;
# it then goes on to its end. Of a CUDA graph every kernel is recorded, not the launch alone. nsys
# takes no -- before the program.
run nsys profile --trace=cuda,nvtx,osrt --sample=none --cpuctxsw=none \
  --capture-range=cudaProfilerApi --capture-range-end=stop --cuda-graph-trace=node \
  --output="$OUT/nsys" --force-overwrite=true "${TRAIN[@]}"

# The same in tables: nsys_REPORT.csv
run nsys stats --report=cuda_gpu_kern_sum --report=cuda_gpu_mem_time_sum \
  --report=cuda_api_sum --report=nvtx_pushpop_sum --report=nvtx_kern_sum --report=cuda_gpu_trace \
  --format=csv --output="$OUT/nsys" --force-export=true "$OUT/nsys.nsys-rep"

timelines "*.nsys-rep" "open it in nsys-ui"
show

#!/usr/bin/env bash
# ncu, Nsight Compute (NVIDIA): what does each kernel move and compute, and how close is it to the
# chip's limits?
#
# Usage: ./run_ncu.sh [options] [-- flags of the model]

# shellcheck source-path=SCRIPTDIR source=profile_lib.sh
source "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/profile_lib.sh"
DEFAULT_STEPS=1 # every kernel is run again for every group of metrics
CLASS_FLAGS=(--num-layers 2) CLASS_FORM="one step of two layers, which are alike, 2 minutes"
begin "$@"
need_gpu nvidia
need ncu "it comes with the CUDA toolkit, and by itself as Nsight Compute"
skip_if_printed ERR_NVGPUCTRPERM "the GPU's counters are for administrators only here: ask for \
NVreg_RestrictProfilingToAdminUsers=0, see https://developer.nvidia.com/ERR_NVGPUCTRPERM"

# What a roofline needs, and no more, since few metrics fit into one run of a kernel: time, bytes to
# and from memory, operations; and occupancy, the mean of active warps. Instructions of the vector
# units are counted by kind. The tensor cores count operations, by data types (fp8's and fp64's are
# not used here) and under names that differ between chips: ncu lists this one's, and what it calls
# its bytes.
known=$(ncu --query-metrics 2>/dev/null | awk '{ print $1 }') || known=""
bytes=dram__bytes
if [[ $known == *dram__bytes_op_read* && $known != *dram__bytes_read* ]]; then # Blackwell
  bytes=dram__bytes_op
fi
metrics=gpu__time_duration.sum,${bytes}_read.sum,${bytes}_write.sum
metrics+=,sm__warps_active.avg.pct_of_peak_sustained_active
for operation in fadd fmul ffma dadd dmul dfma hadd hmul hfma; do
  metrics+=,smsp__sass_thread_inst_executed_op_${operation}_pred_on.sum
done
if [[ -z $known && $DRY_RUN == yes ]]; then
  known=$(printf 'sm__ops_path_tensor_src_%s\n' bf16_dst_fp32 fp16 tf32_dst_fp32)
  note "ncu is not here to list them: these are the tensor cores' metrics of a Hopper (H100, H200)"
fi
tensor=$(grep '^sm__ops_path_tensor_src_' <<<"$known" | grep -v -e int -e fp8 -e fp64 -e sparsity | sort -u) ||
  note "ncu names no metrics of this chip's tensor cores: TFLOP/s are left out"
for metric in $tensor; do metrics+=,$metric.sum; done
graph=(--no-cuda-graph)
if [[ $ONE_STEP == yes ]]; then # the roofline lab: bytes at the caches too, and how busy the chip is
  for part in sm dram; do metrics+=,${part}__throughput.avg.pct_of_peak_sustained_elapsed; done
  metrics+=,lts__t_bytes.sum,l1tex__t_bytes.sum
  graph=() # it has one only where it is asked for
fi

# Only the steps between cudaProfilerStart and cudaProfilerStop, which the program calls, are
# profiled. A filter by NVTX range loses the backward pass of most programs: such ranges belong to
# a thread, and autograd has its own (ours keeps to the main one under a profiler). Without a CUDA
# graph the kernels are launched one by one, as ncu measures them anyway. The compiler is to have no
# processes of its own: ncu goes along into them, where they have crashed, with the program waiting
# for them for ever. ncu takes no -- before the program.
run env TORCHINDUCTOR_COMPILE_THREADS=1 \
  ncu --profile-from-start off --target-processes all --clock-control none \
  --metrics "$metrics" --export "$OUT/ncu.ncu-rep" --force-overwrite "${TRAIN[@]}" \
  ${graph[@]+"${graph[@]}"}
attempt_to "$OUT/ncu.csv" ncu --import "$OUT/ncu.ncu-rep" --csv --page raw --print-units base

show

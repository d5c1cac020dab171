#!/usr/bin/env bash
# Proton, Triton's profiler (NVIDIA and AMD): which kernels take the time, in a few seconds and
# with nothing to install beside Triton?
#
# Usage: ./run_proton.sh [options] [-- flags of the model]

# shellcheck source-path=SCRIPTDIR source=../workshop/profile_lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../workshop/profile_lib.sh"
begin "$@"
need_gpu any
need_module triton "it comes with PyTorch's builds for GPUs"
visible=${HIP_VISIBLE_DEVICES:-}${CUDA_VISIBLE_DEVICES:-}
if [[ $DRY_RUN == no && -n $visible ]] && ! has_nvidia; then
  skip "Proton on AMD refuses HIP_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES: name the GPU with" \
    "ROCR_VISIBLE_DEVICES instead"
fi

# `proton --name ... script.py` for short. It watches the whole run, warm-up too, and takes a
# script in the place of a program: TRAIN without the Python at its head.
run "$PYTHON" -m triton.profiler.proton --name "$OUT/proton" "${TRAIN[@]:1}"

show

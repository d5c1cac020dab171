#!/usr/bin/env bash
# Proton, Triton's profiler (NVIDIA and AMD): which kernels take the time, in a few seconds and
# with nothing to install beside Triton?
#
# Usage: ./run_proton.sh [options] [-- flags of the model]

# shellcheck source-path=SCRIPTDIR source=profile_lib.sh
source "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/profile_lib.sh"
CLASS_FORM="one step, 1 minute"
begin "$@"
need_gpu any
need_module triton "it comes with PyTorch's builds for GPUs"
visible=${HIP_VISIBLE_DEVICES:-}${CUDA_VISIBLE_DEVICES:-}
if [[ $DRY_RUN == no && -n $visible ]] && ! has_nvidia; then
  skip "Proton on AMD refuses HIP_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES: name the GPU with" \
    "ROCR_VISIBLE_DEVICES instead"
fi

# `proton --name ... script.py` for short. It runs a script in the place of a program, up to Triton
# 3.6 not one that ends with sys.exit as ours do: proton_app.py runs TRAIN, without the Python at its
# head, in between. It watches the warm-up too, because it sees the kernels of a captured graph only
# where it has seen the capture; the marker ranges mark the steps.
run "$PYTHON" -m triton.profiler.proton --name "$OUT/proton" \
  "$ROOT/workshop/profilers/proton_app.py" "${TRAIN[@]:1}"

show

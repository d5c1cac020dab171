"""A peer: as hugging_face_graph.py, with FlashAttention's newest kernels, in CuTe, as attention.

transformers calls them `flash_attention_4`. They need the `flash_attn_4` package, a GPU from Hopper
on, and 16-bit numbers.
"""

import sys

if __name__ == "__main__":
    from workshop.needed import import_torch

    import_torch()

    from workshop.cli import leave_if_missing

    leave_if_missing("hf-flash")

from typing import Any

import torch
from hugging_face_llama import CHOICES, TinyLlama, TinyLlamaConfig, configure_optimizer
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward

__all__ = ["TinyLlama", "TinyLlamaConfig", "configure_optimizer"]


@torch.compiler.disable  # kernels in CuTe, which the compiler can't trace
def attend(
    module: Any, query: Tensor, *tensors: Any, position_ids: Any = None, **options: Any
) -> Any:
    """FlashAttention, but in fp32, which it does not take and the gate asks for once, SDPA.

    It does not get the position_ids: by those of a single sequence transformers would ask the
    device whether it is several, and a graph's capture does not allow to wait for that.
    """
    flash = torch.is_autocast_enabled(query.device.type)
    function = flash_attention_forward if flash else sdpa_attention_forward
    return function(module, query, *tensors, **options)


CHOICES["attn_implementation"] = "flash_attention_4"
AttentionInterface.register("flash_attention_4", attend)

if __name__ == "__main__":
    from workshop.cli import main

    sys.exit(main(sys.modules[__name__]))

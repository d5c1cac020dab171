"""V3's operators. Each is a function with autograd; `NAME_reference` is the same in plain PyTorch.

    triton_rms_norm       rms_norm, add_rms_norm
    triton_rope           apply_rope
    triton_swiglu         swiglu, feed_forward; on Hopper with triton_swiglu_hopper
    triton_attention      flash_attention; on Hopper with the kernels of triton_attention_hopper
    triton_qkv_attention  qkv_attention: product, RoPE and attention around one tensor
    triton_cross_entropy  linear_cross_entropy
    triton_embedding      embedding
    triton_adamw          AdamW
    triton_linear         linear: no kernel, but PyTorch's product without a cast
    triton_launch         where they run, how tiles are looked up, what is refused
    triton_tiles          tiles of heads and their products, for attention and RoPE
    triton_float8         for `--precision fp8` alone (tiny_llama_v3_float8.py): not imported here

A kernel file reads top to bottom: the kernels, their tiles by device, the operators that launch
them (registered with PyTorch, for torch.compile and the flop counter), their gradients, then the
functions to call, whose docstrings say what they compute and which bytes they move.
"""
# ruff: noqa: F401

from triton_launch import INTERPRETED

from triton_adamw import AdamW
from triton_attention import HEAD_SIZES, flash_attention, flash_attention_reference
from triton_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from triton_embedding import embedding, embedding_reference
from triton_linear import linear, linear_reference
from triton_qkv_attention import qkv_attention, qkv_attention_reference
from triton_rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from triton_rope import apply_rope, apply_rope_reference
from triton_swiglu import (
    feed_forward,
    feed_forward_reference,
    swiglu,
    swiglu_reference,
)

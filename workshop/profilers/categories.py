"""The category of a kernel, derived from its name.

The names are those of the libraries' and the compilers' kernels, mangled or not, and of PyTorch's
operators, which take the place of kernels in the trace of a machine without a GPU.

A name says which function ran, not why it was called. So:

- "elementwise" is every pass over data that memory bounds: besides pointwise functions also sums,
  softmax, pooling, RoPE, SwiGLU, dropout, fills, random numbers and the loss on logits that exist
  already.
  An attention or a norm that is written out in PyTorch comes out as such passes (and products).
- "attention" is a kernel made for it. "GEMM" is a matrix product, with the reduction of its
  partial sums, or a convolution.
- "copy" moves bytes and computes nothing: between memories, into another layout or data type.
- "optimizer" holds all of PyTorch's foreach kernels, which clip gradients as well.
- "other" is the rest: lookups and updates by index (embeddings), sorts; operators that only
  describe memory (a view); autograd's nodes, which call operators.

Of a C++ name that its profiler has truncated the template arguments are gone, and what only they
say: then a copy in PyTorch's elementwise kernel counts as "elementwise", too.
"""

import re

CATEGORIES = (
    "GEMM",
    "attention",
    "norm",
    "elementwise",
    "optimizer",
    "copy",
    "communication",
    "other",
)

_LONGEST = 1 << 14
"""Characters of a name that are looked at: what a templated kernel is comes before that."""

# The first that matches the name, in lower case, wins. Where a pattern has a wildcard, it begins
# with ^, so that the time for a name is proportional to its length.
_RULES = (
    # TorchInductor names a kernel after every operator that it touches, and some that it only
    # feeds ("triton_red_fused_rms_norm__scaled_dot_product_flash_attention_add_0"): what kind of
    # kernel it is comes before them. Templates (tem) are products or flex_attention; for-each
    # kernels (for) come from optimizers; the rest are pointwise passes and reductions.
    ("attention", r"^triton_tem_fused_.*flex_attention"),
    ("GEMM", r"^triton_tem_"),
    ("optimizer", r"^triton_for_"),
    ("norm", r"^(?:triton_[a-z]+|cpp)_fused_.*(?:rms|layer|batch|group)_norm"),
    ("norm", r"^(?:triton_[a-z]+|cpp)_fused_(?=.*pow)(?=.*mean)(?=.*rsqrt)"),
    ("elementwise", r"^(?:triton_[a-z]+|cpp)_fused_"),
    # Autograd's nodes are named after operators as well ("MmBackward0"), but only call them.
    ("other", r"^(?:torch::)?autograd::|^[a-z]+backward\d+$"),
    (
        "other",
        r"^aten::_?(?:empty(?:_like|_strided)?|view(?:_as)?|reshape(?:_alias)?|unsafe_view|as_strided"
        r"|t|transpose|permute|expand(?:_as)?|(?:un)?squeeze|(?:un)?flatten|slice|select|narrow"
        r"|split(?:_with_sizes)?|chunk|unbind|detach|alias|lift_fresh|resolve_(?:conj|neg)"
        r"|result_type|item|local_scalar_dense|resize|set)_?$",
    ),
    # Before the reductions and gathers of a single GPU.
    (
        "communication",
        r"nccl|rccl|^c10d::|^gloo:|memcpy p(?:top|eer)|all_?reduce|all_?gather|reduce_?scatter",
    ),
    (
        "copy",
        r"^mem(?:cpy|set)|cuda mem(?:cpy|set)|__amd_rocclr_|^memory_copy|^(?:copy|fill)buffer"
        r"|^copy(?:host|device)to|reshape_and_cache|store_kv_?cache",
    ),
    # Before the products: many attention kernels are built on CUTLASS and carry its name.
    (
        "attention",
        r"attention|attn|flash_|flash::|fmha|sdpa|scaled_dot_product|dot_do_o|convert_dq|^kentry"
        r"|bwd_kernel_(?:dk_dv|dq|fuse)|bwd_preprocess|(?<![a-z])sage_[fb]wd",
    ),
    (
        "GEMM",
        r"gemm|gemv|nvjet|cutlass|cublas|rocblas|cijk_|xmma|splitk|matmul"
        r"|^aten::_?(?:add|badd|scaled_|grouped_|int_)?b?mm(?![a-z])|^aten::_?(?:add)?mv_?$"
        r"|^bmm_|(?:^aten::|mkldnn_|mkl_|::_)linear(?!_cross)|^aten::einsum"
        r"|convol|conv(?:_transpose)?[123]d|scudnn|winograd|miopen(?:sp3asm)?conv|naive_conv",
    ),
    # Before the norms and copies: foreach kernels compute gradients' norms and copy parameters.
    # lerp, addcmul and addcdiv are the steps of an Adam that goes parameter by parameter.
    (
        "optimizer",
        r"multi_tensor|adam|_foreach_|^optimizer\.|fused_?sgd|lpnorm|lerp|addcmul|addcdiv",
    ),
    (
        "norm",
        r"(?:rms|layer|batch|group|instance)_?norm|bn_fw|bn_bw|cucomputegradinput|rowwisemoments|gammabeta"
        r"|compute(?:backward)?fusedparams|computeinternalgradients",
    ),
    # Before elementwise: PyTorch runs copies by the same kernels, with another functor.
    (
        "copy",
        r"copy_?kernel|float8_round|catarray|nchwtonhwc|nhwctonchw|transpose|(?:im(?:[23]d)?|vol)2col"
        r"|subtensoropwith(?:cast|sub)tensor"
        r"|^aten::_?(?:copy|to|to_copy|type_as|clone|contiguous|cat|stack|repeat|repeat_interleave)_?$",
    ),
    ("elementwise", r"_rope|rope_|rotary"),  # before the lookups: "rotary_embedding"
    (
        "other",
        r"embedding|gather|scatter|index_?(?:select|put|add|copy|fill|func|elementwise|kernel)"
        r"|^aten::(?:index|sort|argsort|topk|multinomial|nonzero|unique\w*)_?$",
    ),
    (
        "elementwise",
        r"^aten::|elementwise|(?:max|avg|average)_?pool|pooling|reduce_?kernel|softmax|dropout|distribution|silu|gelu|swiglu|geglu"
        r"|float8_amax|cross_?entropy|nll_?loss|triu|tril|upsample|col2(?:im|vol)|subtensorop"
        r"|(?<![a-z])op(?:\dd)?tensor",
    ),
)
_PATTERNS = tuple((category, re.compile(pattern)) for category, pattern in _RULES)


def categorize(name: str) -> str:
    """One of CATEGORIES for a kernel's (or a CPU operator's) name."""
    name = name[:_LONGEST].lower()
    return next((category for category, pattern in _PATTERNS if pattern.search(name)), "other")


# A name says so by its instruction (HMMA, WGMMA, MFMA), by the shape of one (16816, tensor16x8x16,
# MI32x32x8), or because its library has no such kernels without them.
_ON_TENSOR_CORES = re.compile(
    r"[dhigqwx]mma|mfma|tensorop|tensor\d+x\d|[a-z](?:884|1688|8816|168(?:8|16|32)|161616)"
    r"|nvjet|flash_?(?:fwd|bwd|fprop|bprop|attn)|fmha_cutlass\w*(?:_b?f16_|_sm80)"
    r"|_mi\d+x\d+|xdl|_gtcx?\d?_"
)
_ON_ORDINARY_CORES = re.compile(r"simt|ffma|[sdcz]gemm_\d+x\d+")


def on_tensor_cores(name: str) -> bool:
    """Whether a kernel's name says that it computes on tensor cores (AMD: matrix cores). Those of
    hand-written Triton kernels do not say so."""
    name = name[:_LONGEST].lower()
    return bool(_ON_TENSOR_CORES.search(name)) and not _ON_ORDINARY_CORES.search(name)

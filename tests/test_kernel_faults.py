"""Mistakes that are easily made in a kernel, planted one by one: the comparison must see each."""

import pytest
import torch

pytest.importorskip("triton")

from kernel_cases import CASES, with_fault, worst_excess

NORM, ADD, SWIGLU = "rms_norm-3x63x72", "add_rms_norm-3x63x72", "swiglu-3x63x152"
ROPE, QKV = "apply_rope-B2 H6 K2 T63 D32", "qkv_attention-B2 H6 K2 T63 D32 C72"
LINEAR, DOWN = "linear-3x63x72x40", "feed_forward-3x63x72x40"
EMBEDDING = "embedding-63x40 of 11"
CAUSAL, LONG = "flash_attention-B2 H4 K2 T63 D32 causal", "flash_attention-B1 H3 K1 T129 D64 causal"
FULL, LOW = "flash_attention-B1 H2 K1 T129 D32 full", "flash_attention-low scores"
LOSS, LONG_LOSS = "linear_cross_entropy-63x40x311", "linear_cross_entropy-129x24x5000"

# Planted faults: the case that must show it, the line as it is, the line as it is easily written.
FAULTS = {
    # attention, forward
    "no mask on the last keys": (FULL, "visible = n[None, :] < T", "visible = n[None, :] < T + 64"),
    "causal off by one": (CAUSAL, "(n[None, :] <= m[:, None])", "(n[None, :] < m[:, None] + 2)"),
    "output not rescaled": (LONG, "out = out * rescale[:, None]", "out = out * 1.0"),
    "sum not rescaled": (LONG, "row_sum * rescale + ", "row_sum + "),
    "stale maximum": (LONG, "        row_max = new_max\n", ""),
    "wrong key/value head": (CAUSAL, "b, h // G,", "b, h % (H // G),"),
    "scale forgotten": (CAUSAL, "tl.max(scores, 1) * scale", "tl.max(scores, 1) / scale"),
    "log-sum-exp without its maximum": (CAUSAL, "row_max + tl.log2(row_sum)", "tl.log2(row_sum)"),
    "first keys skipped": (LONG, "m, 0, unmasked, T", "m, 32, unmasked, T"),
    # attention, backward
    "causal off by one in the backward pass alone": (
        CAUSAL, "n[:, None] <= m[None, :]", "n[:, None] < m[None, :]",
    ),
    "no mask in the backward pass": (
        LOW, "weights = tl.where(visible, weights, 0.0)", "weights = weights * 1.0",
    ),
    "dk misses a query head of its group": (CAUSAL, "for g in range(G)", "for g in range(1, G)"),
    "dk not scaled": (CAUSAL, "T, dk_acc * scale, ROTATED", "T, dk_acc, ROTATED"),
    "dq not scaled": (CAUSAL, "T, acc * scale, ROTATED", "T, acc, ROTATED"),
    "delta forgotten in dk": (CAUSAL, "(dweights - delta[None, :])", "dweights"),
    "delta forgotten in dq": (CAUSAL, "(dweights - delta[:, None])", "dweights"),
    "delta from the output alone": (CAUSAL, "* dout_tile.to(tl.float32), 1)", ", 1)"),
    "diagonal skipped in the backward pass": (LONG, "n, diagonal, tl.min", "n, first, tl.min"),
    "the future's keys in dq": (
        CAUSAL, "weights = tl.where(visible, weights, 0.0)", "weights = weights * 1.0",
    ),
    "first keys skipped in dq": (LONG, "m, 0, unmasked, T, scale_l", "m, 32, unmasked, T, scale_l"),
    "dq from the values": (
        CAUSAL, "dot(dscores.to(k_tile.dtype), k_tile,", "dot(dscores.to(k_tile.dtype), v_tile,",
    ),
    # norm
    "eps outside of the root": (
        NORM, "tl.rsqrt(tl.sum(x * x, 1) / C + eps)", "tl.rsqrt(tl.sum(x * x, 1) / C) + eps",
    ),
    "mean over the padded width": (NORM, "tl.sum(x * x, 1) / C", "tl.sum(x * x, 1) / x.shape[1]"),
    "dw over half of the rows": (
        NORM,
        "dw += tl.sum(dy * normed, 0)",
        "dw += tl.sum(tl.where(r[:, None] < rows // 2, dy * normed, 0.0), 0)",
    ),
    "race on dw": (
        "rms_norm-2x129x1000",
        "partial_dw_ptr + tl.program_id(0).to(tl.int64) * C",
        "partial_dw_ptr + 0 * C",
    ),
    "dw without its last part": ("rms_norm-2x129x1000", "p[:, None] < P)", "p[:, None] < P - 1)"),
    "mean missing from dx": (NORM, "(g - normed * (tl.sum(g * normed, 1) / C)[:, None])", "g"),
    "residual's gradient dropped": (ADD, "dx += dstream.to(tl.float32)", "dx += 0.0"),
    "branch added to the norm alone": (
        ADD, "tl.store(stream_ptr + out, stream, mask", "tl.store(stream_ptr + out, x, mask",
    ),
    # SwiGLU
    "ReLU for SiLU": (SWIGLU, "gate * tl.sigmoid(gate) * up", "tl.maximum(gate, 0.0) * up"),
    "half of SiLU's derivative": (SWIGLU, "(s + silu * (1 - s))", "s"),
    "gradients exchanged": (SWIGLU, "return dgate, dup", "return dup, dgate"),
    # RoPE
    "rotated the wrong way": (ROPE, "y1 = x1 * cos1 - x2 * sin1", "y1 = x1 * cos1 + x2 * sin1"),
    "gradient not rotated back": (ROPE, "if BACKWARD:", "if not BACKWARD and BACKWARD:"),
    "wrong position": (ROPE, "cos = cos_ptr + t *", "cos = cos_ptr + t // 2 *"),
    # from the product on
    "gradients not turned back": (QKV, "dq, dk, dv, tables)", "dq, dk, dv)"),
    "gradients turned on": (QKV, "cos1, cos2, sin1, sin2, True)", "cos1, cos2, sin1, sin2, False)"),
    "gradients turned by half an angle": (QKV, "y2 = x2 * cos2 - x1 * sin1", "y2 = x2 * cos2"),
    "rotation thrown away": (QKV, "(q, k), (q, k), rows", "(q, k), (q.clone(), k), rows"),
    "k and v exchanged": (QKV, "q, k, v, out, lse, True", "q, v, k, out, lse, True"),
    # SwiGLU with its product
    "SwiGLU again without up": (DOWN, "(silu * up).to(y_ptr", "silu.to(y_ptr"),
    # the products
    "gradient of the input from another weight": (LINEAR, "(dy @ weight)", "(dy @ weight.abs())"),
    "weight's gradient over half of the tokens": (
        LINEAR, "return (dy.t() @ x).to(dtype)", "return (dy[::2].t() @ x[::2]).to(dtype)",
    ),
    # embedding
    "race on the embedding": (
        EMBEDDING,
        'tl.atomic_add(row + c, dy, mask=c < C, sem="relaxed")',
        "tl.store(row + c, dy, mask=c < C)",
    ),
    # cross-entropy
    "one-hot forgotten": (LOSS, "tl.exp(of_target - log_sum) - 1.0", "tl.exp(of_target - log_sum)"),
    "old maximum kept": (
        LONG_LOSS, "total * tl.exp(largest - new_largest)", "total",
    ),
    "weight's gradient of the last chunk alone": (LOSS, "first=start == 0", "first=True"),
    "padding in the sum": ("linear_cross_entropy-1x8x5", "v < V, x, float", "v < V + 3, x, float"),
    "sum for mean in the backward pass": (LOSS, "tl.load(dloss_ptr) / N", "tl.load(dloss_ptr)"),
    "weight's gradient not scaled": (LOSS, "numel_b, factor", "numel_b, 1.0"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, whose numbers overflow
@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_planted_fault_is_seen(fault, tmp_path) -> None:
    label, old, new = FAULTS[fault]
    case = CASES[label]
    faulty = with_fault(case.module, old, new, tmp_path)
    assert not worst_excess(case, torch.float32, faulty) <= 1.0


@pytest.mark.parametrize(
    "case",
    {case.module: case for case in (CASES[label] for label, *_ in FAULTS.values())}.values(),
    ids=lambda case: case.module,
)
def test_a_copy_without_a_fault_is_green(case, tmp_path) -> None:
    """One case of each module: test_kernels.py has them all."""
    same = with_fault(case.module, '"""', '"""', tmp_path)
    assert worst_excess(case, torch.float32, same) <= 1.0

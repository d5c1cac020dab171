"""When fp8 pays: what its products save, and what rounding their factors costs, counted.

Shapes:
    N tokens   I width of the input   O width of the output
"""

from dataclasses import dataclass

from workshop.run.chips import Peaks
from workshop.run.float8 import ROWWISE, TENSORWISE


@dataclass(frozen=True)
class Bytes:
    """Bytes a step moves for each element of a layer's three matrices, its products apart, less
    those that bf16's autocast moves."""

    x: int
    weight: int
    dy: int


# Operation by operation, of a number of 2 bytes: 2 for the amax, 2 + 4 to fp32, 4 + 4 to scale,
# 4 + 1 to round; 1 + 1 to copy it with the products' inner dimension inside. Of a weight 4, 4 + 4
# and 4 + 1; bf16 reads 4 and writes 2 to round it, and reads 2 and writes 4 to have its gradient in
# fp32, as a rowwise product's has to be too.
EAGER = {
    TENSORWISE: Bytes(x=21 + 2, weight=17 + 2 - 6 - 6, dy=21 + 2),
    ROWWISE: Bytes(x=21 + 21 + 2, weight=17 + 17 + 2 - 6, dy=21 + 21 + 2),
}

# If each matrix is read once for its scale and once to be rounded, in one kernel each: 2, 2 + 1 and
# 1 + 1 for the copy; of a weight 4, 4 + 1 and 1 + 1, less 4 + 2. V4's gradient of a weight leaves
# its product in fp32 in bf16 as well (not on ROCm, where bf16 moves 2 + 4 more than counted here);
# a rowwise one does not: 2 + 4 more.
COMPILED = {
    TENSORWISE: Bytes(x=5 + 2, weight=9 + 2 - 6, dy=5 + 2),
    ROWWISE: Bytes(x=5 + 5 + 2, weight=9 + 9 + 2 - 6 + 6, dy=5 + 5 + 2),
}

# V3's kernels read each matrix twice, 2 + 2, and write it and its transpose, 1 + 1; of a weight
# 4 + 4 and 1 + 1, less the 2 of the rounded copy that its AdamW writes for bf16. The x and dy of
# gate and up are read once: the norm's and SwiGLU's kernels have found the amax. A
# rowwise gradient of a weight leaves its product in bf16: 2 + 4 more.
KERNELS = {
    TENSORWISE: Bytes(x=6 - 2, weight=10 - 2, dy=6 - 2),
    ROWWISE: Bytes(x=6, weight=10 - 2 + 6, dy=6),
}


def added_bytes(each: Bytes, N: int, I: int, O: int) -> int:
    """Bytes that fp8 moves more than bf16 in one layer's step."""
    return each.x * N * I + each.weight * I * O + each.dy * N * O


def speed_up(each: Bytes, chip: Peaks, N: int, I: int, O: int) -> float:
    """Speed-up of one layer's step, forward and backward, over bf16, at the data sheet's rates: a
    prediction, which leaves out what launching the kernels takes.

    With R the rates of the products, 6 N I O of whose operations a step needs, and B the memory's:

        (6 N I O / R_bf16) / (6 N I O / R_fp8 + added_bytes / B)
    """
    operations = 6 * N * I * O
    in_bf16, in_fp8 = (operations / (chip.tflops[name] * 1e12) for name in ("bf16", "fp8"))
    return in_bf16 / (in_fp8 + added_bytes(each, N, I, O) / (chip.bandwidth_gbs * 1e9))

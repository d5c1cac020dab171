"""Result files of the operator bench, labs/inference_benchmark/TorchTensorOpsBench."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from workshop import results
from workshop.errors import WorkshopError
from workshop.roofline.model import COMPUTE

KEY = "operators"
"""The second key of a file, which holds its rows."""


@dataclass(frozen=True)
class Operator:
    """A row: one operator at one size. Without a time it has no rates and no shares."""

    op: str
    shapes: str
    dtype: str
    kind: str
    """COMPUTE, or MEMORY: which of the two rates counts."""
    status: str
    """The verdict, IMPLAUSIBLE, or why it has no time."""
    note: str
    gbs: float | None
    tflops: float | None
    of_ceiling: float | None
    """Of what a large copy or product reached in the same run."""

    @property
    def rate(self) -> str:
        """As in "4,100 GB/s"."""
        value, unit = (self.tflops, "TFLOP/s") if self.kind == COMPUTE else (self.gbs, "GB/s")
        return "-" if value is None else f"{value:,.4g} {unit}"


@dataclass(frozen=True)
class Bench:
    """A run of the bench."""

    device: str
    session: str
    rows: tuple[Operator, ...]

    @property
    def title(self) -> str:
        """As in "TorchTensorOpsBench: 18 operators in fp32, NVIDIA H200"."""
        dtypes = ", ".join(sorted({row.dtype for row in self.rows}))
        return f"TorchTensorOpsBench: {len(self.rows)} operators in {dtypes}, {self.device}"


def load(path: Path) -> Bench:
    """Reads one result file.

    Raises:
        WorkshopError: it can't be read, or a field is missing or has the wrong type; the message
            names both.
    """
    content = results.read_json(path)
    names = {field.name for field in dataclasses.fields(Operator)}
    rows = []
    try:
        for number, row in enumerate(content[KEY]):
            kept = {name: value for name, value in row.items() if name in names}
            rows.append(results.decode(Operator, kept, path, f"{KEY}[{number}]."))
        return Bench(str(content["device"]["name"]), str(content["session"]), tuple(rows))
    except (KeyError, TypeError, AttributeError) as error:
        raise WorkshopError(f"{path}: no result of TorchTensorOpsBench ({error!r})") from None

"""Result files of the operator bench, labs/inference_benchmark/TorchTensorOpsBench."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from workshop import results
from workshop.results import Value
from workshop.roofline.model import COMPUTE


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
    """The share of what a large copy or product reached in the same run."""

    @property
    def rate(self) -> str:
        """As in "4,100 GB/s"."""
        value, unit = (self.tflops, "TFLOP/s") if self.kind == COMPUTE else (self.gbs, "GB/s")
        return "-" if value is None else f"{value:,.4g} {unit}"


@dataclass(frozen=True)
class _File:
    """The part of a file that is read."""

    operators: list[Operator]
    device: dict[str, Value]
    session: str


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
    kept = {f.name: content[f.name] for f in dataclasses.fields(_File) if f.name in content}
    file = results.convert(_File, kept, str(path))
    return Bench(str(file.device.get("name")), file.session, tuple(file.operators))

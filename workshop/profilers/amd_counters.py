"""Bytes and floating-point operations from the hardware counters of AMD's Instinct GPUs.

Neither is counted as such. Bytes come from the requests between the L2 cache and the memory, which
are 32, 64 or 128 bytes long; operations from the instructions that the vector and matrix units
issued.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from workshop.profilers.names import printable
from workshop.profilers.table import Kernel

_LANES = 64
"""Work-items of a wave: a vector instruction counts once for all of them."""
_MFMA_UNIT = 512
"""Operations that one count of the matrix units represents."""
_MATRIX = "SQ_INSTS_VALU_MFMA_MOPS_"
_VECTOR_OPERATIONS = {"ADD": 1, "MUL": 1, "TRANS": 1, "FMA": 2}

_FLOPS = {
    f"SQ_INSTS_VALU_{instruction}_{dtype}": float(_LANES * operations)
    for dtype in ("F16", "F32", "F64")
    for instruction, operations in _VECTOR_OPERATIONS.items()
} | {f"{_MATRIX}{dtype}": float(_MFMA_UNIT) for dtype in ("F16", "BF16", "F32", "F64")}
"""Operations for each count, by counter."""
_ALL_FLOPS = _FLOPS | {f"{_MATRIX}{dtype}": float(_MFMA_UNIT) for dtype in ("F8", "F6F4")}
"""Those that only newer chips have too."""
_FETCHED_KIB = ("FETCH_SIZE", "FetchSize")
_WRITTEN_KIB = ("WRITE_SIZE", "WriteSize")
_REQUESTS = re.compile(r"TCC_(EA0?_(RD|WR)REQ(_32B|_64B|_128B)?|BUBBLE)(_sum)?")
_OF_MI350 = re.compile(r"TCC_EA0_RDREQ_(64|128)B(_sum)?|SQ_INSTS_VALU_MFMA_MOPS_F6F4")
"""Counters that earlier chips do not have."""
_MI350 = re.compile(r"MI35\d|gfx950", re.IGNORECASE)
_CHANNEL = re.compile(r"\[\d+\]$")
_BINARY_SUFFIX = re.compile(r"(\s*\[clone [^\]]*\]|\s*\(\.kd\)|\.kd)+$")

_Sums = dict[str, tuple[float, int]]
"""Total and number of dispatches, by counter."""


def is_used(counter: str) -> bool:
    """Whether bytes or operations follow from a counter, or from one channel of it as in
    "TCC_EA0_RDREQ[3]"."""
    name = _CHANNEL.sub("", counter)
    known = name in _ALL_FLOPS or name in _FETCHED_KIB + _WRITTEN_KIB
    return known or _REQUESTS.fullmatch(name) is not None


def plain_name(kernel: str) -> str:
    """A kernel's name without what marks the binary's symbol: ".kd" and " [clone .kd]"."""
    return _BINARY_SUFFIX.sub("", kernel)


class Counters:
    """Means of the counters over the dispatches of each kernel.

    A run has few counters at once, so they come from several runs of one program, and its times
    from yet another. What they have in common are the kernels: a kernel's bytes and operations are
    the means of its counters, each over the dispatches for which it was collected, times the
    calls in the run that gave the times.
    """

    def __init__(self) -> None:
        self._sums: defaultdict[str, _Sums] = defaultdict(dict)
        self._collected: set[str] = set()
        self._lengths_unknown = False

    def add(self, kernel: str, counter: str, value: float) -> None:
        """Adds a counter's value, at least 0, for one dispatch, or for one channel in it."""
        counter = printable(counter)
        self._collected.add(_CHANNEL.sub("", counter))
        sums = self._sums[plain_name(printable(kernel))]
        total, dispatches = sums.get(counter, (0.0, 0))
        sums[counter] = total + value, dispatches + 1

    def fill(self, kernels: Iterable[Kernel]) -> None:
        """Sets the bytes and operations of the kernels that have counters.

        Kernels are the same if their names are, except for what marks the binary's symbol.
        """
        for kernel in kernels:
            means = _means(self._sums.get(plain_name(kernel.name), {}))
            moved, operations = _bytes(means), _flops(means)
            kernel.bytes = kernel.bytes if moved is None else moved * kernel.calls
            kernel.flops = None if operations is None else operations * kernel.calls
            self._lengths_unknown |= moved is not None and _reads_by_length(means) is None

    def warnings(self, device: str | None = None) -> list[str]:
        """Sentences: what the counters don't cover.

        Args:
            device: the GPU's name, where the tool gives it.
        """
        sentences = []
        if self._collected and not any(is_used(counter) for counter in self._collected):
            sentences.append(
                "neither bytes nor operations follow from the counters that were collected "
                f"({_some(sorted(self._collected))})"
            )
        missing = [counter for counter in _FLOPS if counter not in self._collected]
        if 0 < len(missing) < len(_FLOPS):
            sentences.append(
                f"operations are a lower bound: {len(missing)} of their {len(_FLOPS)} counters "
                f"were not collected ({_some(missing)})"
                if any(counter.startswith(_MATRIX) for counter in self._collected)
                else "no operations are given: without the counters of the matrix units "
                f"({_MATRIX}*) they would be far too few"
            )
        is_mi350 = _MI350.search(device or "") or any(map(_OF_MI350.fullmatch, self._collected))
        if self._lengths_unknown and is_mi350:
            sentences.append(
                "bytes are a lower bound, a quarter low for a copy: on the MI350 series these "
                "counters may take reads of 128 bytes for 64; collect TCC_EA0_RDREQ_{32B,64B,128B}"
            )
        return sentences


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def _means(sums: _Sums) -> dict[str, float]:
    """By counter, over all of the dispatches; those of a counter's channels are added up."""
    means: defaultdict[str, float] = defaultdict(float)
    for counter, (total, count) in sums.items():
        means[_CHANNEL.sub("", counter)] += total / count
    return dict(means)


def _flops(means: Mapping[str, float]) -> float | None:
    """Operations of a dispatch; None without any counter of the matrix units: what the vector
    units do is next to nothing in a product."""
    if not any(counter.startswith(_MATRIX) for counter in means.keys() & _ALL_FLOPS.keys()):
        return None
    return sum(factor * means[c] for c, factor in _ALL_FLOPS.items() if c in means)


def _bytes(means: Mapping[str, float]) -> float | None:
    """Bytes that a dispatch reads and writes; None unless both are known."""
    read, written = _read_bytes(means), _kib(means, _WRITTEN_KIB)
    total, long = _requests(means, "WRREQ"), _requests(means, "WRREQ_64B")
    if written is None and total is not None and long is not None:
        written = 64 * long + 32 * (total - long)
    if read is None or written is None or min(read, written) < 0:
        return None
    return read + written


def _read_bytes(means: Mapping[str, float]) -> float | None:
    # First, because FETCH_SIZE takes the 128-byte requests of gfx950 for 64 bytes until ROCm 10.
    by_length = _reads_by_length(means)
    if by_length is not None:
        return sum(length * requests for length, requests in by_length.items())
    fetched = _kib(means, _FETCHED_KIB)
    total, short = _requests(means, "RDREQ"), _requests(means, "RDREQ_32B")
    # Request sizes depend on the chip: MI200 counts under "EA" and has no longer
    # ones; later chips count under "EA0", and the longer ones as bubbles.
    has_long = any(counter.startswith("TCC_EA0_RDREQ") for counter in means)
    bubbles = means.get("TCC_BUBBLE_sum", means.get("TCC_BUBBLE")) if has_long else 0.0
    if fetched is not None or total is None or short is None or bubbles is None:
        return fetched
    return 32 * short + 128 * bubbles + 64 * (total - short - bubbles)


def _reads_by_length(means: Mapping[str, float]) -> dict[int, float] | None:
    """Read requests by their length in bytes, where the chip counts each length; one that was not
    collected is what the others leave of the total."""
    counted = {length: _requests(means, f"RDREQ_{length}B") for length in (32, 64, 128)}
    known = {length: requests for length, requests in counted.items() if requests is not None}
    total = _requests(means, "RDREQ")
    if len(known) == len(counted) - 1 and total is not None:
        (rest,) = counted.keys() - known.keys()
        known[rest] = total - sum(known.values())
    return known if len(known) == len(counted) and min(known.values()) >= 0 else None


def _kib(means: Mapping[str, float], names: Iterable[str]) -> float | None:
    """Bytes by a counter of KiB, under the first of its names."""
    return next((1024 * means[name] for name in names if name in means), None)


def _requests(means: Mapping[str, float], kind: str) -> float | None:
    """A count of requests under the name that the chip and the tool give it."""
    names = (f"TCC_{unit}_{kind}{suffix}" for unit in ("EA0", "EA") for suffix in ("_sum", ""))
    return next((means[name] for name in names if name in means), None)

"""Bytes and floating-point operations from the hardware counters of AMD's Instinct GPUs.

Neither is counted as such. Bytes come from the requests between the L2 cache and the memory, which
are 32, 64 or 128 bytes long; operations from the instructions that the vector and matrix units
issued.
"""

import collections
import re
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
_FLOPS_OF_NEWER_CHIPS = {f"{_MATRIX}{dtype}": float(_MFMA_UNIT) for dtype in ("F8", "F6F4")}
_FETCHED_KIB = ("FETCH_SIZE", "FetchSize")
_WRITTEN_KIB = ("WRITE_SIZE", "WriteSize")
_REQUESTS = re.compile(r"TCC_(EA0?_(RD|WR)REQ(_32B|_64B|_128B)?|BUBBLE)(_sum)?")
_OF_MI350 = re.compile(r"TCC_EA0_RDREQ_(64|128)B(_sum)?|SQ_INSTS_VALU_MFMA_MOPS_F6F4")
"""Counters that earlier chips do not have."""
_MI350 = re.compile(r"MI35\d|gfx950", re.IGNORECASE)
_CHANNEL = re.compile(r"\[\d+\]$")
_BINARY_SUFFIX = re.compile(r"(\s*\[clone [^\]]*\]|\s*\(\.kd\)|\.kd)+$")
_OPENING = {")": "(", ">": "<"}


def is_used(counter: str) -> bool:
    """Whether bytes or operations follow from a counter, or from one channel of it as in
    "TCC_EA0_RDREQ[3]"."""
    name = _CHANNEL.sub("", counter)
    known = name in _FLOPS or name in _FLOPS_OF_NEWER_CHIPS
    return known or name in _FETCHED_KIB + _WRITTEN_KIB or _REQUESTS.fullmatch(name) is not None


def plain_name(kernel: str) -> str:
    """A kernel's name without what marks the binary's symbol: ".kd" and " [clone .kd]"."""
    return _BINARY_SUFFIX.sub("", kernel)


def short_name(kernel: str) -> str:
    """The name as `rocprofv3 --truncate-kernels` leaves it: without return type, namespaces,
    template arguments and parameters."""
    name = plain_name(kernel).rstrip()
    while name and name[-1] in _OPENING:
        opening = _matching(name)
        if opening <= 0:
            break
        name = name[:opening].rstrip()
    return re.split(r"[ :]", name)[-1] or kernel


def _matching(name: str) -> int:
    """Where the bracket opens that the name ends with; -1 if nowhere."""
    closing, depth = name[-1], 0
    for index in range(len(name) - 1, -1, -1):
        if name[index] == closing:
            depth += 1
        elif name[index] == _OPENING[closing]:
            depth -= 1
            if not depth:
                return index
    return -1


class Counters:
    """Means of the counters over the dispatches of each kernel.

    A run has few counters at once, so they come from several runs of one program, and its times
    from yet another. What they have in common are the kernels: a kernel's bytes and operations are
    the means of its counters, each over the dispatches for which it was collected, times the
    calls in the run that gave the times.
    """

    def __init__(self) -> None:
        self._sums: dict[str, dict[str, tuple[float, int]]] = {}
        self._collected: set[str] = set()
        self._ambiguous = 0
        self._lengths_unknown = False

    def add(self, kernel: str, counter: str, value: float) -> None:
        """Adds a counter's value, at least 0, for one dispatch, or for one channel in it."""
        counter = printable(counter)
        self._collected.add(_CHANNEL.sub("", counter))
        of_kernel = self._sums.setdefault(printable(kernel), {})
        total, dispatches = of_kernel.get(counter, (0.0, 0))
        of_kernel[counter] = total + value, dispatches + 1

    def __bool__(self) -> bool:
        return bool(self._collected)

    def fill(self, kernels: Iterable[Kernel]) -> None:
        """Sets the bytes and operations of the kernels that have counters.

        Kernels are the same if their names are, but for what marks the binary's symbol, or else if
        one name is the other's short name: one tool truncates names where another does not.
        """
        kernels = list(kernels)
        by_name, by_short_name = collections.defaultdict(list), collections.defaultdict(list)
        for name, sums in self._sums.items():
            by_name[plain_name(name)].append(sums)
            by_short_name[short_name(name)].append(sums)
        sharing = collections.Counter(short_name(kernel.name) for kernel in kernels)
        for kernel in kernels:
            name, short = plain_name(kernel.name), short_name(kernel.name)
            found = by_name.get(name, [])
            if not found:
                found = (by_short_name if name == short else by_name).get(short, [])
                if found and sharing[short] > 1:  # no mean over several kernels is one kernel's
                    self._ambiguous += 1
                    continue
            means = _means(found)
            moved, operations = _bytes(means), _flops(means)
            kernel.bytes = kernel.bytes if moved is None else moved * kernel.calls
            kernel.flops = None if operations is None else operations * kernel.calls
            self._lengths_unknown |= moved is not None and _reads_by_length(means) is None

    def warnings(self, device: str | None = None) -> list[str]:
        """Sentences: what the counters don't cover.

        Args:
            device: the GPU's name, where the tool gives it.
        """
        if not self:
            return []
        sentences = []
        if not any(is_used(counter) for counter in self._collected):
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
        if self._ambiguous:
            sentences.append(
                f"{self._ambiguous} kernels have no bytes and operations: the counters' names are "
                "truncated, and mean several kernels each"
            )
        return sentences


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def _means(sums: Iterable[Mapping[str, tuple[float, int]]]) -> dict[str, float]:
    """By counter, over all of the dispatches; those of a counter's channels are added up."""
    totals: dict[str, tuple[float, int]] = {}
    for one in sums:
        for counter, (value, dispatches) in one.items():
            total, count = totals.get(counter, (0.0, 0))
            totals[counter] = total + value, count + dispatches
    means: dict[str, float] = {}
    for counter, (total, count) in totals.items():
        name = _CHANNEL.sub("", counter)
        means[name] = means.get(name, 0.0) + total / count
    return means


def _flops(means: Mapping[str, float]) -> float | None:
    """Operations of a dispatch; None without any counter of the matrix units: what the vector
    units do is next to nothing in a product."""
    factors = {c: n for c, n in (_FLOPS | _FLOPS_OF_NEWER_CHIPS).items() if c in means}
    if not any(counter.startswith(_MATRIX) for counter in factors):
        return None
    return sum(factor * means[counter] for counter, factor in factors.items())


def _bytes(means: Mapping[str, float]) -> float | None:
    """Bytes that a dispatch reads and writes; None unless both are known."""
    read, written = _read_bytes(means), _written_bytes(means)
    if read is None or written is None or min(read, written) < 0:
        return None
    return read + written


def _read_bytes(means: Mapping[str, float]) -> float | None:
    # First, because FETCH_SIZE takes the 128-byte requests of gfx950 for 64 bytes until ROCm 10.
    by_length = _reads_by_length(means)
    if by_length is not None:
        return sum(length * requests for length, requests in by_length.items())
    for counter in _FETCHED_KIB:
        if counter in means:
            return 1024 * means[counter]
    total, short = _requests(means, "RDREQ"), _requests(means, "RDREQ_32B")
    # Request sizes depend on the chip: MI200 counts under "EA" and has no longer
    # ones; later chips count under "EA0", and the longer ones as bubbles.
    has_long = any(counter.startswith("TCC_EA0_RDREQ") for counter in means)
    bubbles = means.get("TCC_BUBBLE_sum", means.get("TCC_BUBBLE")) if has_long else 0.0
    if total is None or short is None or bubbles is None:
        return None
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


def _written_bytes(means: Mapping[str, float]) -> float | None:
    for counter in _WRITTEN_KIB:
        if counter in means:
            return 1024 * means[counter]
    total, long = _requests(means, "WRREQ"), _requests(means, "WRREQ_64B")
    if total is None or long is None:
        return None
    return 64 * long + 32 * (total - long)


def _requests(means: Mapping[str, float], kind: str) -> float | None:
    """A count of requests under the name that the chip and the tool give it."""
    names = (f"TCC_{unit}_{kind}{suffix}" for unit in ("EA0", "EA") for suffix in ("_sum", ""))
    return next((means[name] for name in names if name in means), None)

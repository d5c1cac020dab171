"""Traces of torch.profiler, the Chrome JSON that Kineto writes, as events sorted by their kind.

A trace of a million kernels is half a gigabyte of text, and several gigabytes as Python objects:
decoded entry by entry it needs no more than a block of the text and the fields that are read here.
Unlike other streaming parsers this one accepts the NaN that some traces hold, goes on after an
entry that is no JSON (PyTorch does not escape every name), and gives all entries before the end of
a text that was cut off.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from workshop.errors import WorkshopError
from workshop.profilers import reading
from workshop.profilers.categories import categorize
from workshop.profilers.names import printable
from workshop.profilers.reading import MOST_NS, Invalid, Problems, amount, count, nanoseconds

OPERATOR, ANNOTATION, GPU_ANNOTATION = "cpu_op", "user_annotation", "gpu_user_annotation"
CALLS = ("cuda_runtime", "cuda_driver", "hip_runtime")
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
KINDS = (OPERATOR, ANNOTATION, GPU_ANNOTATION, *CALLS, *ON_GPU)
_WHOLE_TRACE = "Trace"
"""Kineto's own span, from the profiler's start to its stop."""
_ON_HOST = {OPERATOR, ANNOTATION, *CALLS, "python_function", _WHOLE_TRACE}
_READ = {*KINDS, *_ON_HOST}
NO_CORRELATION = 0
_ID = (int, str)
_FOR_ORIGIN = 1000
"""Events from whose starts the clock takes its origin."""
_WEEK_NS = 7 * 24 * 3600e9
_UNSEEN_NS = 10e9
"""The longest that a kernel runs on after the last thing that the host did in the trace."""
_AMD = re.compile(r"AMD|Radeon|Instinct|gfx\d", re.IGNORECASE)

_OCCUPANCY = "est. achieved occupancy %"
_MOST_ESTIMATED = 48 * 1024
"""Bytes of shared memory: Kineto takes this default limit for the chip's, so that kernels with more
have an estimate of 0."""

Track = tuple[int | str, int | str]
"""A thread of the host (its process and number), or a stream of a GPU (device and stream)."""


class Event(NamedTuple):
    """Something with a beginning and an end, in ns by the trace's clock."""

    start: float
    end: float
    name: str
    kind: str
    """One of KINDS."""
    track: Track
    correlation: int
    """The number that a launch shares with what it launched, or NO_CORRELATION."""
    device: int
    """Number of the GPU; 0 for the host's."""
    bytes: float | None
    """Traffic of a copy or memset, where the trace has it."""
    occupancy: float | None = None
    """Kineto's estimate for a kernel, from 0 to 1: by its grid, block, registers and shared memory.
    NVIDIA's traces have it."""

    @property
    def ns(self) -> float:
        return self.end - self.start


@dataclass
class Trace:
    """A trace's events by kind. Times are ns since about its beginning: since 1970, nanoseconds
    would take more digits than a float has."""

    path: Path
    events: defaultdict[str, list[Event]] = field(default_factory=lambda: defaultdict(list))
    begin: float = math.inf
    """The earliest time, from which Perfetto counts."""
    titles: dict[Track, str] = field(default_factory=dict)
    """As the trace names its threads."""
    devices: dict[int, str] = field(default_factory=dict)
    """Names of GPUs by number."""
    warnings: list[str] = field(default_factory=list)

    def of(self, *kinds: str) -> Iterator[Event]:
        return chain.from_iterable(self.events[kind] for kind in kinds)

    def device_name(self, index: int) -> str | None:
        """The name of the GPU on which kernels ran, if it is sure.

        AMD's kernels have the number of an HSA agent. CPU sockets are agents, too, and come first,
        but the trace's list counts GPUs alone.
        """
        different = set(self.devices.values())
        if len(different) == 1:
            return different.pop()
        return None if any(map(_AMD.search, different)) else self.devices.get(index)


def read(path: Path) -> tuple[Trace, Problems]:
    """A trace, and the events that make no sense: CUPTI and roctracer sometimes give one a start of
    0, or a duration of days to centuries. A kernel that outlasts all that the host did is one.

    Args:
        path: a .json or .json.gz, or a folder with such (the newest counts).

    Raises:
        WorkshopError: it can't be read, or has no events.
    """
    path, warnings = _newest(path) if path.is_dir() else (path, [])
    problems = Problems(path)
    entries = _entries(path, problems)
    first = list(islice(entries, _FOR_ORIGIN))
    if not first and not problems.count:
        raise WorkshopError(
            f"{path}: its traceEvents are missing or empty; is it a trace of torch.profiler?"
        )
    reader = _Reader(Trace(path, warnings=warnings), _origin_us(entry for _, entry in first))
    for row, entry in chain(first, entries):
        try:
            reader.add(row, entry)
        except Invalid as error:
            problems.add(row, str(error))
    reader.add_long(problems)
    reader.trace.devices = _device_names(path)
    return reader.trace, problems


def recognises_json(start: str) -> bool:
    """Whether a JSON text that begins so is a trace.

    Args:
        start: the first 64 KiB.
    """
    if start.lstrip("\ufeff \t\r\n").startswith("["):
        return '"ph"' in start and '"cat"' in start
    return any(f'"{key}"' in start for key in ("traceEvents", "schemaVersion", "deviceProperties"))


@cache
def category(name: str, kind: str) -> str:
    """The category of what a GPU or an operator did. A copy between GPUs is communication."""
    found = categorize(name)
    is_copy = kind in ON_GPU[1:] and found != "communication"
    return "copy" if is_copy else found


def _newest(folder: Path) -> tuple[Path, list[str]]:
    """The trace to read of a folder, and a warning where others are passed over."""
    traces = [
        file
        for file in folder.rglob("*.json*")
        if file.name.endswith((".json", ".json.gz"))
        and file.is_file()
        and recognises_json(reading.head(file))
    ]
    if not traces:
        raise WorkshopError(f"{folder}: no trace of torch.profiler (.json, .json.gz) in it")
    newest = max(traces, key=lambda file: (file.stat().st_mtime_ns, file.name))
    others = f"{folder} has {len(traces)} traces; this is the newest, {newest.name}"
    return newest, [others] if len(traces) > 1 else []


def _device_names(path: Path) -> dict[int, str]:
    start = reading.head(path)
    devices: Any = []
    if match := re.search(r'"deviceProperties"\s*:\s*', start):
        with suppress(ValueError, RecursionError):
            devices = _decode(start, match.end())[0]
    return {
        device["id"]: printable(device["name"])
        for device in (devices if isinstance(devices, list) else [])
        if isinstance(device, dict)
        and isinstance(device.get("id"), int)
        and isinstance(device.get("name"), str)
        and device["name"]
    }


# --- single events -------------------------------------------------------------------------------


def _origin_us(entries: Iterable[Any]) -> float:
    """The median of these events' starts: any one of them may be corrupt."""
    starts = []
    for entry in entries:
        if isinstance(entry, dict) and entry.get("ph") == "X":
            with suppress(Invalid):
                starts.append(reading.number(entry.get("ts")))
    return sorted(starts)[len(starts) // 2] if starts else 0.0


class _Reader:
    """Fills a trace entry by entry, and notes how long the host was seen."""

    def __init__(self, trace: Trace, origin_us: float) -> None:
        self.trace, self._origin_us = trace, origin_us
        self._first, self._last = math.inf, -math.inf  # of what the host did
        self._long: list[tuple[int, Event]] = []
        self._names: dict[str, str] = {}  # as read, as printed: one copy of each for all events

    def add(self, row: int, entry: Any) -> None:
        """Raises Invalid: a part of the entry is missing or makes no sense."""
        if not isinstance(entry, dict):
            raise Invalid(f"a {type(entry).__name__} is no event")
        phase, kind, arguments = entry.get("ph"), entry.get("cat"), entry.get("args")
        if not isinstance(arguments, dict):
            arguments = {}
        if phase != "X":
            if phase == "M" and entry.get("name") == "thread_name":
                self._name_thread(_track(entry), arguments.get("name"))
            return
        if not isinstance(kind, str) or kind not in _READ:
            return
        start, end = self._times(entry)
        if kind in _ON_HOST:
            self._first, self._last = min(self._first, start), max(self._last, end)
        if kind not in KINDS:
            self.trace.begin = min(self.trace.begin, start)
            return
        event = self._event(entry, kind, arguments, start, end)
        if end - start > _UNSEEN_NS and kind in (*ON_GPU, GPU_ANNOTATION):
            self._long.append((row, event))
        else:
            self._keep(event)

    def add_long(self, problems: Problems) -> None:
        """All entries were added: the longest can be judged."""
        seen_ns = self._last - self._first
        limit = max(_UNSEEN_NS, seen_ns) if seen_ns > 0 else math.inf
        for row, event in self._long:
            if event.ns <= limit:
                self._keep(event)
                continue
            seconds = f"its duration (dur): {event.ns / 1e9:,.0f} s"
            problems.add(row, f"{seconds}, longer than all that the host did")

    def _keep(self, event: Event) -> None:
        self.trace.events[event.kind].append(event)
        self.trace.begin = min(self.trace.begin, event.start)

    def _event(self, entry: dict, kind: str, arguments: dict, start: float, end: float) -> Event:
        name = entry.get("name")
        if not isinstance(name, str) or not name:
            raise Invalid("it has no name")
        if name not in self._names:
            self._names[name] = printable(name)
        name, correlation, moved = self._names[name], NO_CORRELATION, None
        if "correlation" in arguments:
            with suppress(Invalid):
                correlation = count(arguments["correlation"])
        device, occupancy = 0, None
        if kind in ON_GPU:
            number = arguments.get("device", entry.get("pid"))
            device = number if isinstance(number, int) else 0
            moved = None if kind == "kernel" else _traffic(name, kind, arguments.get("bytes"))
        if _OCCUPANCY in arguments:
            with suppress(Invalid):
                if amount(arguments.get("shared memory")) <= _MOST_ESTIMATED:
                    occupancy = amount(arguments[_OCCUPANCY], 0.01)
        track = _track(entry)
        return Event(start, end, name, kind, track, correlation, device, moved, occupancy)

    def _times(self, entry: dict) -> tuple[float, float]:
        try:
            start_us = reading.number(entry.get("ts"))
        except Invalid as error:
            raise Invalid(f"its start (ts): {error}") from None
        try:
            duration = nanoseconds(entry.get("dur"), 1000.0)
        except Invalid as error:
            raise Invalid(f"its duration (dur): {error}") from None
        if duration > _WEEK_NS:
            raise Invalid(f"its duration (dur): {duration / 1e9:,.0f} s, more than a week")
        start = (start_us - self._origin_us) * 1000.0
        if abs(start) > MOST_NS:
            raise Invalid(f"its start (ts): {start_us:g} is years from the others'")
        return start, start + duration

    def _name_thread(self, track: Track, title: Any) -> None:
        # A thread may be named twice, by its own name and by its process's: "pt_autograd_0" is
        # clearer than "python3".
        if isinstance(title, str) and "autograd" not in self.trace.titles.get(track, ""):
            self.trace.titles[track] = title


def _track(entry: Mapping[str, Any]) -> Track:
    process, thread = entry.get("pid"), entry.get("tid")
    return process if isinstance(process, _ID) else "", thread if isinstance(thread, _ID) else ""


def _traffic(name: str, kind: str, size: Any) -> float | None:
    """The bytes that a copy or memset moves to and from a device's memory: twice its size where it
    reads and writes the same memory. A copy between two devices reads the one and writes the other.
    """
    is_within = "Device -> Device" in name and category(name, kind) == "copy"
    with suppress(Invalid):
        return amount(size, 2 if is_within else 1)
    return None


# --- the entries of the file ---------------------------------------------------------------------

_BARE_LIST = re.compile(r"\A\ufeff?\s*\[")
# Inside a JSON string the quotes would be escaped, and this would not match.
_LIST = re.compile(r'"traceEvents"\s*:\s*\[')
_SEPARATOR = re.compile(r"[\s,]*")
_NEXT_EVENT = re.compile(r'[\[,}\n]\s*(?=\{\s*"ph"\s*:)')
_decode = json.JSONDecoder().raw_decode

_BLOCK = 1 << 20
"""Characters that are read at a time, at least."""
_LONGEST_KEY = 1 << 10
"""Characters from the quote before a key to the bracket after it."""
_LONGEST_ENTRY = 1 << 24
"""Characters. An entry that isn't over by then is broken, and no reason to hold the whole file."""
_LONGEST_TOKEN = 16
"""Characters: a number, or an escape in a string, after which the decoder wants more text."""


def _entries(path: Path, problems: Problems) -> Iterator[tuple[int, Any]]:
    """(number from 1, entry) of `traceEvents`, or of the text where that is a list. An entry that
    is no JSON is left out, has a number too, and is noted in `problems`.

    Quotes and brackets in such an entry mean nothing. So the next entry is the next object that
    begins as Kineto's events do.

    Raises:
        WorkshopError: the file can't be read.
    """
    blocks = _blocks(path)
    held, position, number = next(blocks, ""), 0, 1
    start = _BARE_LIST.match(held)
    if not start:
        held, start = _search(_LIST, held, blocks)
    if not start:
        return
    position = start.end()
    while True:
        position = _SEPARATOR.match(held, position).end()  # type: ignore[union-attr]
        if held.startswith("]", position):
            return
        try:
            entry, position = _decode(held, position)
            yield number, entry
        except (ValueError, RecursionError) as error:
            is_cut = isinstance(error, json.JSONDecodeError) and (
                error.msg.startswith("Unterminated") or error.pos + _LONGEST_TOKEN > len(held)
            )
            may_go_on = is_cut and len(held) - position <= _LONGEST_ENTRY
            if may_go_on and (block := next(blocks, "")):
                held, position = held[position:] + block, 0
                continue
            what = f"no JSON ({getattr(error, 'msg', error)})"
            held, found = _search(_NEXT_EVENT, held[position + 1 :], blocks)
            if not found:
                lost = "the text ends here" if is_cut else f"{what}, nor any event after it"
                problems.add(number, lost)
                return
            problems.add(number, what)
            position = found.end()
        number += 1


def _search(
    pattern: re.Pattern[str], held: str, blocks: Iterator[str]
) -> tuple[str, re.Match[str] | None]:
    """Reads on until a pattern is found: the text then held, and the match."""
    while not (found := pattern.search(held)) and (block := next(blocks, "")):
        held = held[-_LONGEST_KEY:] + block
    return held, found


def _blocks(path: Path) -> Iterator[str]:
    """A file's text in pieces of at least _BLOCK characters, except the last."""
    parts, size = [], 0
    for line in reading.lines(path):
        parts.append(line)
        size += len(line)
        if size >= _BLOCK:
            yield "".join(parts)
            parts, size = [], 0
    yield "".join(parts)

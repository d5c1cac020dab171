"""Places for the labels of a picture, so that none overlaps another or a marker.

All is in pixels, and deterministic: the same picture every time.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """In pixels."""

    left: float
    bottom: float
    right: float
    top: float

    def overlaps(self, other: "Box") -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.bottom < other.top
            and other.bottom < self.top
        )

    def is_in(self, other: "Box") -> bool:
        return (
            self.left >= other.left
            and self.right <= other.right
            and self.bottom >= other.bottom
            and self.top <= other.top
        )

    def meets(self, segment: "Segment") -> bool:
        """Whether a straight line passes through (Liang and Barsky's clipping)."""
        (x0, y0), (x1, y1) = segment
        enter, leave = 0.0, 1.0
        for start, step, low, high in (
            (x0, x1 - x0, self.left, self.right),
            (y0, y1 - y0, self.bottom, self.top),
        ):
            if not step:
                if not low < start < high:
                    return False
                continue
            first, last = sorted(((low - start) / step, (high - start) / step))
            enter, leave = max(enter, first), min(leave, last)
        return enter < leave


Segment = tuple[tuple[float, float], tuple[float, float]]

_DIRECTIONS = 16
DISTANCES = (3, 12, 24, 40, 60, 84, 112, 145, 185, 230, 280)
"""Pixels between a marker and its label."""
_ASIDE = 60
"""Pixels by which a label straight above a marker must be nearer than one beside it."""
MARGIN = 2.0
"""Pixels around a label that stay free."""


class Place(NamedTuple):
    """Where a label may stand: the boxes that cover it, and the line that leads to it."""

    boxes: tuple[Box, ...]
    lead: Segment | None = None


def choose(
    places: Iterable[Place], area: Box, taken: Sequence[Box], segments: Sequence[Segment]
) -> Place | None:
    """The first place that lies in the area, on no taken box and on no line; else the first that
    lies on a line; None where there is no room.

    Args:
        taken: boxes of labels and markers. A lead may not cross the labels among them, which are
            those that it does not start in.
    """
    crossing = None
    for place in places:
        if not all(box.is_in(area) for box in place.boxes):
            continue
        if any(box.overlaps(other) for box in place.boxes for other in taken):
            continue
        on_line = any(box.meets(segment) for box in place.boxes for segment in segments)
        if not on_line and not (place.lead and any(box.meets(place.lead) for box in taken)):
            return place
        crossing = crossing or place
    return crossing


def around(
    centre: tuple[float, float], radius: float, size: tuple[float, float]
) -> Iterator[Place]:
    """Places around a marker: nearer before farther, beside it before above and below it."""
    width, height = size[0] + 2 * MARGIN, size[1] + 2 * MARGIN
    turns = [2 * math.pi * index / _DIRECTIONS for index in range(_DIRECTIONS)]
    ways = [(distance, angle) for distance in DISTANCES for angle in turns]
    for distance, angle in sorted(ways, key=lambda way: way[0] + _ASIDE * abs(math.sin(way[1]))):
        across, up = math.cos(angle), math.sin(angle)
        x = centre[0] + across * (radius + distance + width / 2)
        y = centre[1] + up * (radius + distance + height / 2)
        box = Box(x - width / 2, y - height / 2, x + width / 2, y + height / 2)
        yield Place((box,), _lead(centre, radius, box))


def _lead(centre: tuple[float, float], radius: float, box: Box) -> Segment | None:
    """From a marker to a label; None where the label is beside it."""
    end = min(max(centre[0], box.left), box.right), min(max(centre[1], box.bottom), box.top)
    length = math.dist(centre, end)
    if length < radius + 3 * DISTANCES[0]:
        return None
    part = radius / length
    start = tuple(a + part * (b - a) for a, b in zip(centre, end, strict=True))
    return (start[0], start[1]), end


def along(segment: Segment, size: tuple[float, float], side: int) -> Iterator[Place]:
    """Places for a label that runs along a rising line: from the middle to its ends.

    Args:
        side: 1 for above the line, -1 for below it.
    """
    (x0, y0), (x1, y1) = segment
    length = math.dist(*segment) or 1.0
    across, up = (x1 - x0) / length, (y1 - y0) / length
    clear = side * (size[1] / 2 + 5)
    half = size[1] / 2 + MARGIN
    pieces = max(2, math.ceil(size[0] / size[1]))
    for step in range(40):
        part = 0.5 + (step + 1) // 2 * (1 if step % 2 else -1) / 42
        x, y = x0 + part * (x1 - x0) - up * clear, y0 + part * (y1 - y0) + across * clear
        offsets = [(index / (pieces - 1) - 0.5) * size[0] for index in range(pieces)]
        centres = [(x + offset * across, y + offset * up) for offset in offsets]
        yield Place(tuple(Box(a - half, b - half, a + half, b + half) for a, b in centres))


def stack(heights: Sequence[float], size: float) -> list[float]:
    """Where labels of a size stand in a column: at their heights, or as little lower as is needed
    for them not to overlap."""
    found: dict[int, float] = {}
    above = math.inf
    for index in sorted(range(len(heights)), key=lambda index: -heights[index]):
        above = found[index] = min(heights[index], above - size)
    return [found[index] for index in range(len(heights))]

"""Pictures of where the time of training steps goes: a trace's steps, or a ladder's rungs."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workshop.errors import WorkshopError
from workshop.profilers import kineto, step_time
from workshop.profilers import picture as pictures
from workshop.profilers.names import printable
from workshop.profilers.step_time import (
    COPY,
    CPU,
    KERNEL,
    LOADING,
    OTHER,
    RUNTIME,
    TENSOR,
    StepTime,
)

# Colours that the colour-blind can distinguish (Okabe and Ito's), and greys.
COLOURS = {
    TENSOR: "#00523B",
    KERNEL: "#009E73",
    COPY: "#D55E00",
    LOADING: "#F0C808",
    RUNTIME: "#5B6770",
    CPU: "#56B4E9",
    OTHER: "#DDE1E5",
}
_DIM, _GRID = "#707070", "#D9DDE2"
_STYLE: Any = {
    "font.size": 13,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "text.parse_math": False,  # a title may contain dollars
}
_MOST_STEPS = 50
"""In one picture."""


def picture(trace: Path, target: Path, title: str = "") -> None:
    """Writes a PNG of a trace's mean step and its first steps, as `compare_pictures`. What could
    not be read is reported on stderr.

    Args:
        trace: a .json or .json.gz of torch.profiler, or a folder with one (the newest counts).
        title: by default the trace's name.

    Raises:
        WorkshopError: the trace can't be read, has no steps, or the picture can't be written.
        NotOnThisMachine: there is no matplotlib.
    """
    pictures.check_target(target)
    table = kineto.read(trace)
    for warning in table.warnings:
        print(f"warning: {printable(warning)}", file=sys.stderr)
    steps = table.step_times
    if not steps:
        raise WorkshopError(
            f"{trace}: no times of steps in it: torch.profiler's traces have them, where its "
            "step() follows each, or ranges named step mark them"
        )
    means = [(f"step {number}", step) for number, step in enumerate(steps[:_MOST_STEPS], 1)]
    if len(steps) > 1:
        means.insert(0, (f"mean of {len(steps):,}", step_time.mean(steps)))
    compare_pictures(means, target, title or trace.name)


def compare_pictures(means: Sequence[tuple[str, StepTime]], target: Path, title: str = "") -> None:
    """Writes a PNG: a bar for each step, divided by what then ran; at the left in ms, at the right
    in shares.

    Args:
        means: name and step of each.

    Raises:
        WorkshopError, NotOnThisMachine: the picture can't be written, or matplotlib is missing.
    """
    pictures.check_target(target)
    from matplotlib import rc_context

    with rc_context(_STYLE):
        shown = [printable(name) for name, _ in means]
        figure = _draw(shown, [step for _, step in means], printable(title))
        pictures.write(figure, target)


def _draw(names: list[str], steps: list[StepTime], title: str) -> Any:
    from matplotlib.figure import Figure

    row = min(0.55, 20 / len(steps))
    figure = Figure(figsize=(16, 2.2 + row * len(steps)), layout="constrained")
    times, shares = figure.subplots(1, 2, sharey=True)
    _draw_bars(times, steps, [1e6] * len(steps))
    for number, step in enumerate(steps):
        _write_beside(times, number, step.ns / 1e6, f"{_ms(step.ns)} ms")
    times.set_yticks(range(len(steps)), names)
    times.set_ylim(len(steps) - 0.5, -0.5)
    times.margins(x=0.14)
    times.set_xlabel("ms a step")
    _draw_bars(shares, steps, [step.ns / 100 for step in steps])
    if any(step.parts_ns[KERNEL] for step in steps):
        for number, step in enumerate(steps):
            used = f"{step.gpu_share:.0%}, {step.tensor_share:.0%}"
            _write_beside(shares, number, 100, used if step.parts_ns[KERNEL] else "no GPU")
        words = "at the right: GPU utilisation; of that on tensor cores"
        shares.set_title(words, loc="right", color=_DIM, fontsize=13)
    shares.set_xlim(0, 100)
    shares.set_xlabel("% of the step")
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=15)
    handles, labels = times.get_legend_handles_labels()
    look = {"frameon": False, "handlelength": 1.3, "columnspacing": 1.4}
    figure.legend(handles, labels, loc="outside lower left", ncols=len(labels), **look)
    return figure


def _ms(ns: float) -> str:
    """Three digits, or all before the decimal point."""
    ms = ns / 1e6
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:#.3g}".rstrip(".")


def _draw_bars(axis: Any, steps: list[StepTime], units_ns: list[float]) -> None:
    """A bar for each step, in its unit; kernels on tensor cores and others apart."""
    lefts = [0.0] * len(steps)
    for category, colour in COLOURS.items():
        parts = (step.parts_ns | {TENSOR: step.tensor_ns} for step in steps)
        ns = [part[category] - (part[TENSOR] if category == KERNEL else 0.0) for part in parts]
        widths = [part / unit for part, unit in zip(ns, units_ns, strict=True)]
        if any(widths):
            name = "other kernels" if category == KERNEL else category
            axis.barh(range(len(steps)), widths, 0.66, left=lefts, color=colour, label=name)
            lefts = [a + b for a, b in zip(lefts, widths, strict=True)]
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x", color=_GRID)
    axis.xaxis.set_major_formatter("{x:,.12g}")


def _write_beside(axis: Any, row: int, end: float, text: str) -> None:
    """A text at the end of a bar."""
    look = {"xytext": (7, 0), "textcoords": "offset points", "va": "center"}
    axis.annotate(text, (end, row), annotation_clip=False, **look)

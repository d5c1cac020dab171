"""Pictures of where the time of training steps goes: a trace's steps, or a ladder's rungs."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workshop import results
from workshop.errors import WorkshopError
from workshop.profilers import kineto, picture, step_time
from workshop.profilers.metrics import digits
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
from workshop.show import drawing
from workshop.show.drawing import Bars

# Colours that the colour-blind can distinguish (Okabe and Ito's), and greys.
COLOURS = {
    TENSOR: "#00785A",
    KERNEL: "#009E73",
    COPY: "#D55E00",
    LOADING: "#F0C808",
    RUNTIME: "#8A969E",
    CPU: "#56B4E9",
    OTHER: "#DDE1E5",
}


def draw_steps(trace: Path, target: Path, title: str = "") -> None:
    """Writes a PNG of a trace's mean step and its first steps, as `compare_pictures`. What could
    not be read is reported on stderr.

    Args:
        trace: a .json or .json.gz of torch.profiler, or a folder with one (the newest counts).
        title: by default the trace's name.

    Raises:
        WorkshopError: the trace can't be read, has no steps, or the picture can't be written.
        NotOnThisMachine: there is no matplotlib.
    """
    picture.check_target(target)
    table = kineto.read(trace)
    for warning in table.warnings:
        print(f"warning: {printable(warning)}", file=sys.stderr)
    steps = table.step_times
    if not steps:
        raise WorkshopError(
            f"{trace}: no times of steps in it: torch.profiler's traces have them, where its "
            "step() follows each, or ranges named step mark them"
        )
    means = [(f"step {number}", step) for number, step in enumerate(steps, 1)]
    if len(steps) > 1:
        means.insert(0, (f"mean of {len(steps):,}", step_time.mean(steps)))
    compare_pictures(means, target, title or trace.name)


def compare_pictures(means: Sequence[tuple[str, StepTime]], target: Path, title: str = "") -> None:
    """Writes a PNG: a bar for each step, up to drawing.MOST_BARS, divided by what then ran; at the
    left in ms, at the right in shares, with GPU utilisation and the share of that on tensor cores.

    Args:
        means: name and step of each.

    Raises:
        WorkshopError, NotOnThisMachine: the picture can't be written, or matplotlib is missing.
    """
    picture.check_target(target)
    names, steps = zip(*means, strict=True)
    lengths = [f"{digits(step.ns / 1e6)} ms" for step in steps]
    used = [
        f"{step.gpu_share:.0%}, {step.tensor_share:.0%}" if step.parts_ns[KERNEL] else "no GPU"
        for step in steps
    ]
    times = _bars(names, steps, "ms a step", [1e6] * len(steps), lengths)
    shares = _bars(names, steps, "% of the step", [step.ns / 100 for step in steps], used)

    def draw(_: object) -> Any:
        figure = drawing.figure(16, 2.6 + 0.45 * min(len(steps), drawing.MOST_BARS))
        axes = figure.subplots(1, 2)
        for place, bars in zip(axes, (times, shares), strict=True):
            drawing.plot_bars(place, bars)
        drawing.write_legend(axes[0], ncols=4)
        if any(step.parts_ns[KERNEL] for step in steps):
            words = "after each bar: GPU utilisation, of that on tensor cores"
            axes[1].set_title(words, loc="left", fontsize=12)
        figure.suptitle(printable(title), x=0.01, ha="left", fontweight="bold")
        return figure

    try:
        with results.atomic_path(target) as path:
            drawing.save(draw, None, path)
    except OSError as error:
        raise WorkshopError(f"{target} can't be written: {error.strerror}") from None


def _bars(
    names: Sequence[str],
    steps: Sequence[StepTime],
    axis: str,
    units_ns: Sequence[float],
    words: Sequence[str],
) -> Bars:
    """The steps, each in its unit; kernels on tensor cores and others apart."""
    series = {}
    for category in COLOURS:
        parts = (step.parts_ns | {TENSOR: step.tensor_ns} for step in steps)
        ns = [part[category] - (part[TENSOR] if category == KERNEL else 0.0) for part in parts]
        if any(ns):
            name = "other kernels" if category == KERNEL else category
            series[name] = [part / unit for part, unit in zip(ns, units_ns, strict=True)]
    colours = [COLOURS.get(name, COLOURS[KERNEL]) for name in series]
    return Bars(names, series, axis, colours, words)

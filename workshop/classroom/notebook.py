"""Functions for notebooks: they run the tools from a cell, and show what these made.

No number is made here: each comes from the gate or from a result file. Nothing of Jupyter is
imported: an object with `_repr_html_` is enough.
"""

import base64
import dataclasses
import difflib
import html
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from workshop import versions
from workshop.collection import Collection
from workshop.errors import DONE, WorkshopError
from workshop.exercises.frame import Item
from workshop.gate import parity
from workshop.gate.parity import ParityReport
from workshop.show import drawing, ladders
from workshop.show.drawing import INK, LINE, Chart

_THEME = (
    "--ink: var(--jp-content-font-color1, currentColor); "
    "--line: var(--jp-border-color2, #9aa3ad); --panel: transparent"
)
"""The names that a report's charts give their colours, as Jupyter's theme has them."""
_CODE = "font-family: var(--jp-code-font-family, monospace); white-space: pre; line-height: 1.3"
_BEHIND = {"+": "#2e9e5b40", "-": "#d1495b40", "@": "#80808030"}
"""Behind the lines of a diff: half transparent, readable on light and dark."""
_PASSED, _FAILED = "#2e9e5b", "#d1495b"
_NEAREST, _FARTHEST = 1e-3, 1e6
"""Shares of what the gate allows: for errors that hardly are any, and for those without number."""
_WIDTH = "110"
"""Columns of what a script prints into a cell."""


@dataclasses.dataclass(frozen=True)
class Shown:
    """HTML that Jupyter draws below a cell."""

    html: str

    def _repr_html_(self) -> str:
        return self.html


# --- running -------------------------------------------------------------------------------------


def tool(main: Callable[[list[str]], int], *words: object) -> None:
    """Runs a tool in this process, as its command line would.

    Args:
        main: of the tool; gives its exit status.
        words: of the command line, after the tool's name.

    Raises:
        WorkshopError: the exit status is not 0.
    """
    _require_done(Path(inspect.getfile(main)), main([str(word) for word in words]))


def script(path: Path, *words: object) -> None:
    """Runs a Python file in a separate process, and prints what it prints.

    Raises:
        WorkshopError: its exit status is not 0.
    """
    with subprocess.Popen(
        [sys.executable, str(path), *map(str, words)],
        env=os.environ | {"COLUMNS": _WIDTH},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        for line in process.stdout or ():
            print(line, end="")
    _require_done(path, process.returncode)


def _require_done(path: Path, status: int) -> None:
    if status != DONE:
        raise WorkshopError(f"{path.name}: ended with status {status}, for the reason above")


# --- showing -------------------------------------------------------------------------------------


def changes(name: str, old: str, new: str) -> Shown:
    """Changes of a class or function of the model from one version to another, as a diff.

    Raises:
        WorkshopError: one of the versions has no such definition.
    """
    sources = []
    for key in (old, new):
        definition = getattr(versions.load(key), name, None)
        if definition is None:
            raise WorkshopError(f"{versions.get_version(key).path.name} defines no {name}")
        sources.append(inspect.getsource(definition).splitlines())
    before, after = sources
    diff = [*difflib.unified_diff(before, after, n=2, lineterm="")][2:]  # without the files' names
    shown = [f"<p><b>{html.escape(name)}, from {old} to {new}</b></p>"]
    for line in diff or ["no change"]:
        colour = _BEHIND.get(line[:1], "transparent")
        text = "⋯" if line[:1] == "@" else html.escape(line) or " "
        shown.append(f'<div style="{_CODE}; background: {colour}">{text}</div>')
    return Shown("".join(shown))


def answers(items: Iterable[Item]) -> Shown:
    """Predictions and what became of them."""
    lines = []
    for item in items:
        why = "<br>".join(html.escape(item.why).splitlines())
        lines.append(f"<li><b>{html.escape(item.what)}</b>: {why}</li>")
    return Shown(f"<ul>{''.join(lines)}</ul>")


def image(path: Path, alt: str) -> Shown:
    """A PNG, no wider than the cell.

    Raises:
        WorkshopError: it can't be read.
    """
    try:
        content = base64.b64encode(path.read_bytes()).decode()
    except OSError as error:
        raise WorkshopError(f"{path}: can't be read: {error.strerror}") from None
    style = "max-width: 100%; background: white"
    source = f"data:image/png;base64,{content}"
    return Shown(f'<img src="{source}" alt="{html.escape(alt)}" style="{style}">')


def picture(drawn: Chart) -> Shown:
    """A page's chart below its title."""
    title = f"<p><b>{html.escape(drawn.title)}</b></p>"
    return Shown(f'<div style="max-width: 50em; {_THEME}">{title}{drawn.markup}</div>')


def pictures(folder: Path) -> list[Shown]:
    """The newest comparisons among the results in a folder: for each size throughput, time and
    memory, and the losses; before them all speed-ups that have an interval.

    Raises:
        WorkshopError: there is no such folder.
    """
    collection = Collection([folder])
    collection.refresh()
    groups = ladders.ladders(collection.runs)
    drawn = ladders.speedups(groups)
    for group in groups:
        drawn += ladders.ladder_section(group, collection.folders).charts
    charts = (one for one in drawn if not one.as_png)
    # No two drawings of a page may share a name.
    return [
        picture(dataclasses.replace(chart, name=f"{folder.name}-{i}-{chart.name}"))
        for i, chart in enumerate(charts)
    ]


def gate(reports: Mapping[str, ParityReport]) -> Shown:
    """All that the gate measured: a dot for each quantity, left of the line if it passed. One whose
    error is no number is farthest to the right, those without any farthest to the left.

    Args:
        reports: by what was checked; no two of a notebook have the same names.
    """

    def draw() -> Any:
        drawn = drawing.figure(7.5, 1.2 + 0.7 * len(reports))
        axis = drawn.subplots()
        labels = []
        for place, (label, report) in enumerate(reports.items()):
            measures = report.measures.values()
            shares = [min(max(parity.badness(m), _NEAREST), _FARTHEST) for m in measures]
            colours = [_PASSED if measure.passed else _FAILED for measure in measures]
            axis.scatter(shares, [place] * len(shares), s=90, c=colours, alpha=0.5, linewidths=0)
            reached = f"{report.tensors_with_grad} of {report.tensors_total} gradients"
            labels.append(f"{label}\n{reached}")
        axis.set_yticks(range(len(labels)), labels)
        axis.set_ylim(len(labels) - 0.5, -0.5)
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter("{x:,.6g}")
        axis.axvline(1, color=INK, linewidth=1)
        axis.set_xlabel("error, as a share of what is allowed")
        axis.grid(axis="x", color=LINE)
        axis.tick_params(length=0)
        return drawn

    name = f"gate-{'-'.join(reports)}".replace(" ", "-")
    title = "Distance from V1, of logits, loss, loss curve, gradients and movements"
    alt = "; ".join(f"{label}: {report.summary()}" for label, report in reports.items())
    return picture(Chart(name, title, alt, (), draw))

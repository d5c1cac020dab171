"""The page's figures, for plotly.

Their texts may come from files, and plotly reads a little HTML: `text` makes them text. Colours of
words, axes and grids are left to the page's style sheet, which knows whether it is dark.
"""

import html
import itertools
from collections.abc import Callable, Iterable, Sequence

import plotly.graph_objects as go

from workshop.compare.rows import Row
from workshop.dashboard.data import SWEPT, LossCurve, SweepPoint
from workshop.profilers.categories import CATEGORIES
from workshop.profilers.names import display_name
from workshop.profilers.picture import COLOURS as CATEGORY_COLOURS
from workshop.profilers.table import KernelTable
from workshop.run.interpreter import NOT_COMPARABLE
from workshop.versions import ALL, BASELINE

DASHES = ("solid", "dot", "dash", "dashdot", "longdash")
"""Of a version's variants."""
PHASES = {"forward": "#3B7DD8", "backward": "#E07B39", "optimizer": "#5AA469"}
MEMORY_PARTS = {
    "weights": ("weights", "#3B7DD8"),
    "gradients": ("gradients", "#E07B39"),
    "optimizer_state": ("AdamW moments", "#5AA469"),
    "rest": ("activations and rest", "#A8A8A8"),
}
SAVED, LOST = "#009E73", "#D55E00"
GRID = "#D9DDE2"
FONT_SIZE = 18
_LONGEST_LABEL, _SHORT_LABEL = 60, 4
_DARK_LINE, _ON_BOTH = ("#1A1F24", "#222222", "#9C2C77"), ("#7F8790", "#7F8790", "#C2569B")
"""Colours of a roofline's lines and steps that a dark page would hide, and their like on any."""
_EMPTY_TEMPLATE = go.layout.Template()


def text(name: str) -> str:
    """A name from a file as plotly will show it: itself, with no markup in it."""
    return html.escape(display_name(name, _LONGEST_LABEL), quote=False)


def colour(row: Row) -> str:
    return ALL[row.version].colour


def _figure(
    *, y: str, x: str = "", height: int = 430, legend: bool = True, **xaxis: object
) -> go.Figure:
    # In one piece: each change to a figure costs milliseconds.
    layout = go.Layout(
        template=_EMPTY_TEMPLATE,
        font={"size": FONT_SIZE, "family": "system-ui, sans-serif"},
        height=height,
        margin={"t": 24, "r": 16, "l": 16, "b": 16},
        barmode="relative",
        bargap=0.35,
        showlegend=legend,
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        hoverlabel={"font": {"size": 15}, "namelength": -1},
        xaxis={"title": {"text": x}, "showgrid": False, "automargin": True, **xaxis},
        yaxis={
            "title": {"text": y, "standoff": 8},
            "gridcolor": GRID,
            "automargin": True,
            "rangemode": "tozero",
        },
    )
    return go.Figure(layout=layout)


def _by_version(rows: Sequence[Row], y: str, *, legend: bool) -> go.Figure:
    """An empty figure with a place for each row, and words in the places of those without times."""
    names = [text(row.label) for row in rows]
    figure = _figure(y=y, legend=legend, type="category", categoryorder="array",
                     categoryarray=names, range=[-0.5, len(rows) - 0.5])  # fmt: skip
    if max(map(len, names)) <= _SHORT_LABEL:
        # Axes that find out their own room are drawn twice, which takes half of the time.
        figure.layout.xaxis.automargin = figure.layout.yaxis.automargin = False
        figure.layout.margin = {"t": 24, "r": 16, "l": 85, "b": 40}
    for row in rows:
        if row.step_ms is None:
            words = f"{row.refused.upper()} RED" if row.refused else row.status
            words = NOT_COMPARABLE.replace(", ", ",<br>") if words == "interpreted" else words
            _write_in_place(figure, row, words)
    return figure


def throughput(rows: Sequence[Row]) -> go.Figure:
    """Tokens a second."""
    figure = _by_version(rows, "tokens a second", legend=False)
    shown = [row for row in rows if row.tokens_per_s]
    rates = [row.tokens_per_s or 0.0 for row in shown]
    figure.add_bar(
        x=[text(row.label) for row in shown],
        y=rates,
        marker_color=[colour(row) for row in shown],
        hovertemplate="%{x}: %{y:,.0f} tokens/s<extra></extra>",
    )
    _write_above(figure, shown, rates, [_compact(rate) for rate in rates])
    return figure


def _compact(number: float) -> str:
    """As in "382k": four bars of a narrow page have no room for more, and the table has it all."""
    return f"{number / 1e3:,.3g}k" if 1e4 <= number < 1e6 else f"{number:,.0f}"


def speedups(rows: Sequence[Row]) -> go.Figure:
    """How many times as fast as V1, with the 95% interval as a bar, for rows with a green gate."""
    figure = _by_version(rows, "times as fast as V1", legend=False)
    shown = [row for row in rows if row.speedup]
    ratios = [row.speedup or 0.0 for row in shown]
    intervals = [row.speedup_ci or (None, None) for row in shown]
    figure.add_bar(
        x=[text(row.label) for row in shown],
        y=ratios,
        marker_color=[colour(row) for row in shown],
        error_y={
            "array": [high and high - r for (_, high), r in zip(intervals, ratios, strict=True)],
            "arrayminus": [low and r - low for (low, _), r in zip(intervals, ratios, strict=True)],
            "color": "#808080",
            "thickness": 3,
            "width": 10,
        },
        hovertemplate="%{x}: %{y:.3f}x<extra></extra>",
    )
    tops = [high or ratio for (_, high), ratio in zip(intervals, ratios, strict=True)]
    _write_above(figure, shown, tops, [row.short_verdict().replace("\n", "<br>") for row in shown])
    figure.add_hline(y=1, line={"color": "#808080", "dash": "dash", "width": 2})
    for row in rows:
        if row.step_ms is not None and row not in shown:
            _write_in_place(figure, row, "no speed-up:<br>no green gate" if row.parity != "pass"
                            else "no speed-up:<br>no V1 to compare")  # fmt: skip
    return figure


def _write_above(
    figure: go.Figure, rows: Sequence[Row], heights: Sequence[float], texts: Sequence[str]
) -> None:
    """A text on top of each row's bar, and room for it."""
    figure.add_scatter(
        x=[text(row.label) for row in rows],
        y=heights,
        mode="text",
        text=[f"<b>{words}</b>" for words in texts],
        textposition="top center",
        cliponaxis=False,
        showlegend=False,
        hoverinfo="skip",
    )
    lines = max((words.count("<br>") + 1 for words in texts), default=1)
    figure.layout.yaxis.range = [0, (1.04 + 0.08 * lines) * max(heights, default=1) or 1]


def _write_in_place(figure: go.Figure, row: Row, words: str) -> None:
    """In the place of a bar."""
    figure.add_annotation(x=text(row.label), y=0, text=words, showarrow=False, yanchor="bottom",
                          font={"color": LOST if row.failed else "#808080"})  # fmt: skip


def phases(rows: Sequence[Row]) -> go.Figure:
    """A step's parts on top of each other, and beside them the whole step as it was timed."""
    figure = _by_version(rows, "ms a step", legend=True)
    names = [text(row.label) for row in rows]
    for phase, hue in PHASES.items():
        figure.add_bar(x=names, y=[_part(row, phase) for row in rows], name=phase,
                       marker_color=hue, hovertemplate="%{y:,.2f} ms")  # fmt: skip
    figure.add_scatter(
        x=names,
        y=[row.step_ms for row in rows],
        name="whole step",
        mode="markers",
        marker={"symbol": "line-ew", "size": 46, "line": {"width": 4, "color": "#C2569B"}},
        hovertemplate="%{y:,.2f} ms",
    )
    timed = [row for row in rows if row.step_ms]
    heights = [max(row.step_ms or 0.0, _sum_of_phases(row)) for row in timed]
    _write_above(figure, timed, heights, [f"{row.step_ms:,.4g}" for row in timed])
    return figure


def _sum_of_phases(row: Row) -> float:
    return sum(_part(row, phase) or 0.0 for phase in PHASES)


def memory(rows: Sequence[Row]) -> go.Figure:
    """Peak memory by what holds it."""
    divisor, unit = _memory_unit(row.peak_memory_mb for row in rows)
    figure = _by_version(rows, f"peak memory, {unit}", legend=True)
    known = [row for row in rows if row.peak_memory_mb]
    names = [text(row.label) for row in known]
    for part, (name, hue) in MEMORY_PARTS.items():
        amounts = [float(row.memory_mb.get(part, 0.0)) / divisor for row in known]
        figure.add_bar(x=names, y=amounts, name=name, marker_color=hue,
                       hovertemplate=f"%{{y:,.4g}} {unit}")  # fmt: skip
    peaks = [(row.peak_memory_mb or 0.0) / divisor for row in known]
    _write_above(figure, known, peaks, [f"{x:,.1f}" for x in peaks])
    return figure


def _memory_unit(amounts_mb: Iterable[float | None]) -> tuple[float, str]:
    largest = max((x for x in amounts_mb if x), default=0.0)
    return (1e3, "GB") if largest >= 2000 else (1.0, "MB")


def losses(curves: Sequence[LossCurve]) -> go.Figure:
    """All versions' losses over the same steps: where they learn the same, one line is seen."""
    figure = _figure(y="loss", x="step", height=470)
    seen: dict[str, int] = {}
    for index, curve in enumerate(curves):
        row, values = curve.row, curve.run.losses
        nth = seen[row.version] = seen.get(row.version, -1) + 1
        figure.add_scatter(
            x=list(range(1, len(values) + 1)),
            y=values,
            name=text(row.label),
            mode="lines+markers",
            # Each later line is thinner, so that those below it stay visible.
            line={
                "color": colour(row),
                "width": max(1.5, 8 - 2 * index),
                "dash": DASHES[nth % len(DASHES)],
            },
            marker={
                "symbol": ALL[row.version].marker,
                "size": max(5, 13 - 2.5 * index),
            },
            hovertemplate="%{y:.4f}",
        )
    figure.layout.hovermode = "x unified"
    figure.layout.yaxis.rangemode = "normal"
    figure.layout.xaxis.zeroline = False
    return figure


def waterfall(rows: Sequence[Row]) -> go.Figure:
    """From the first row's step to the last one's: what each rung saves of the one before it."""
    figure = _figure(y="ms a step", height=470, legend=False, type="category")
    steps = [row.step_ms or 0.0 for row in rows]
    changes = [b - a for a, b in itertools.pairwise(steps)]
    names = [text(row.label) for row in rows]
    words = [
        f"<b>{change:+,.3g} ms</b><br>{change / before:+.0%}"
        for change, before in zip(changes, steps, strict=False)
    ]
    figure.add_waterfall(
        x=[names[0], *(f"{a} → {b}" for a, b in itertools.pairwise(names)), "left"],
        y=[steps[0], *changes, 0],
        measure=["absolute", *("relative" for _ in changes), "total"],
        text=[f"<b>{steps[0]:,.4g} ms</b>", *words, f"<b>{steps[-1]:,.4g} ms</b>"],
        textposition="outside",
        cliponaxis=False,
        decreasing={"marker": {"color": SAVED}},
        increasing={"marker": {"color": LOST}},
        totals={"marker": {"color": ALL[BASELINE].colour}},
        connector={"line": {"color": "#808080", "width": 1}},
        hovertemplate="%{x}: %{delta:,.2f} ms<extra></extra>",
    )
    figure.layout.yaxis.range = [0, 1.2 * max(steps)]
    return figure


def savings(baseline: Row, others: Sequence[Row]) -> go.Figure:
    """How many ms of each part of V1's step a version saves; below zero what it adds."""
    figure = _figure(y="ms a step saved of V1", height=470)
    figure.layout.barmode = "group"
    names = [text(row.label) for row in others]
    for phase, hue in PHASES.items():
        before, after = _part(baseline, phase), [_part(row, phase) for row in others]
        saved = [before - own if before and own else None for own in after]
        shares = [f"{x / before:+.0%}" if x is not None and before else "" for x in saved]
        figure.add_bar(x=names, y=saved, name=phase, marker_color=hue, customdata=shares,
                       text=[f"{x:,.3g}" if x is not None else "" for x in saved],
                       textposition="outside", cliponaxis=False,
                       hovertemplate="%{y:,.2f} ms, %{customdata} of V1's")  # fmt: skip
    return figure


def _part(row: Row, phase: str) -> float | None:
    value: float | None = getattr(row, f"{phase}_ms")
    return value


def switches(whole: Row, variants: Sequence[Row]) -> go.Figure:
    """What each switch of a version is worth: the step without it, less the step with all."""
    figure = _figure(y="", x="ms a step longer without it", height=150 + 55 * len(variants),
                     legend=False)  # fmt: skip
    base = whole.step_ms or 0.0
    longer = [(row.step_ms or 0.0) - base for row in variants]
    figure.add_bar(
        y=[text(row.variant) for row in variants],
        x=longer,
        orientation="h",
        marker_color=[SAVED if x > 0 else LOST for x in longer],
        text=[f"<b>{x:+,.3g} ms</b> ({x / base:+.0%})" for x in longer],
        textposition="outside",
        cliponaxis=False,
        hovertemplate="%{y}: %{x:+,.2f} ms<extra></extra>",
    )
    span = max((abs(x) for x in longer), default=1.0)
    figure.update_xaxes(range=[1.5 * min(0.0, *longer) - 0.02 * span, 1.5 * max(longer)])
    figure.update_yaxes(type="category", autorange="reversed", ticksuffix="  ")
    return figure


def sweep(
    lines: Sequence[tuple[Row, Sequence[SweepPoint]]],
    axis: str,
    title: str,
    value: Callable[[SweepPoint], float | None],
) -> go.Figure:
    """A figure of each version's runs over one size; open markers where no gate was run."""
    figure = _figure(y=title, x=SWEPT[axis], height=400)
    sizes = sorted({point.size for _, points in lines for point in points})
    for row, points in lines:
        symbol = ALL[row.version].marker
        figure.add_scatter(
            x=[point.size for point in points],
            y=[value(point) for point in points],
            name=text(row.label),
            mode="lines+markers",
            line={"color": colour(row), "width": 3},
            marker={
                "size": 12,
                "symbol": [symbol if point.proven else f"{symbol}-open" for point in points],
            },
            hovertemplate="%{x:,}: %{y:,.4g}",
        )
    figure.update_xaxes(type="log", tickvals=sizes, ticktext=[f"{size:,}" for size in sizes])
    return figure


def categories(tables: Sequence[tuple[str, KernelTable]]) -> go.Figure:
    """Where the time of each profile goes, in ms a step where the steps are known."""
    steps_known = all(table.steps for _, table in tables)
    figure = _figure(y="", x="ms a step" if steps_known else "ms in all",
                     height=170 + 60 * len(tables))  # fmt: skip
    sums = [table.category_ns() for _, table in tables]
    divisors = [1e6 * ((table.steps or 1) if steps_known else 1) for _, table in tables]
    for category in CATEGORIES:
        times = [own.get(category, 0.0) / d for own, d in zip(sums, divisors, strict=True)]
        if any(times):
            figure.add_bar(y=[text(name) for name, _ in tables], x=times, name=category,
                           orientation="h", marker_color=CATEGORY_COLOURS[category],
                           hovertemplate="%{x:,.3g} ms")  # fmt: skip
    figure.update_yaxes(type="category", autorange="reversed", ticksuffix="  ")
    figure.update_xaxes(showgrid=True, gridcolor=GRID)
    return figure


def fit_for_both_themes(figure: go.Figure) -> go.Figure:
    """A figure of another tool, with its dark lines exchanged for some that a dark page shows."""
    exchange = dict(zip(_DARK_LINE, _ON_BOTH, strict=True))
    for trace in figure.data:
        for part in (trace.line, trace.marker):
            if isinstance(part.color, str):
                part.color = exchange.get(part.color, part.color)
    figure.update_layout(
        template=_EMPTY_TEMPLATE,
        font={"size": FONT_SIZE, "family": "system-ui, sans-serif"},
        height=720,
        legend={"orientation": "h", "y": -0.16, "font": {"size": 15}},
    )
    figure.update_xaxes(gridcolor=GRID)
    figure.update_yaxes(gridcolor=GRID)
    return figure

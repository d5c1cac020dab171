"""The dashboard's figures, for plotly.

Their texts may come from files, and plotly reads a little HTML: `text` escapes it. The page's style
sheet gives words, axes and grids their colours, light or dark.
"""

import html
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from workshop.compare.figures import LOST, MEMORY_COLOURS, NEITHER, PHASE_COLOURS, SAVED
from workshop.compare.rows import ONE_PROCESS, Row
from workshop.compare.sweep import Axis, Point
from workshop.dashboard.data import Curve
from workshop.labs import LabRow
from workshop.profilers.categories import CATEGORIES
from workshop.profilers.names import display_name
from workshop.profilers.picture import COLOURS as CATEGORY_COLOURS
from workshop.profilers.table import KernelTable
from workshop.results import FAIL
from workshop.run.interpreter import NOT_COMPARABLE
from workshop.versions import ALL, BASELINE

_DASHES = ("solid", "dot", "dash", "dashdot", "longdash")
"""Of a version's variants."""
_GREY, _PINK, _GRID = "#808080", "#C2569B", "#D9DDE2"
_FONT: Any = {"size": 18, "family": "system-ui, sans-serif"}
_LONGEST_LABEL, _SHORT_LABEL = 60, 4
_ON_BOTH = {"#1A1F24": "#7F8790", "#222222": "#7F8790", "#9C2C77": _PINK}
"""Dark colours of a roofline, each with one that a dark page shows too."""
_EMPTY_TEMPLATE = go.layout.Template()
Interval = Sequence[float]
"""The lower and the upper end."""


def text(name: str) -> str:
    """A name from a file, without markup for plotly."""
    return html.escape(display_name(name, _LONGEST_LABEL), quote=False)


def _colour(row: Row) -> str:
    return ALL[row.version].colour


def _figure(
    *, y: str = "", x: str = "", height: int = 430, legend: bool = True, **xaxis: object
) -> go.Figure:
    # In one piece: each change to a figure costs milliseconds.
    layout = go.Layout(
        template=_EMPTY_TEMPLATE,
        font=_FONT,
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
            "gridcolor": _GRID,
            "automargin": True,
            "rangemode": "tozero",
        },
    )
    return go.Figure(layout=layout)


# --- a place for each row ------------------------------------------------------------------------


def _by_version(rows: Sequence[Row], y: str, *, legend: bool) -> go.Figure:
    """An empty figure with a place for each row, and words in the places of those without times."""
    names = [text(row.label) for row in rows]
    figure = _figure(y=y, legend=legend, type="category", categoryorder="array",
                     categoryarray=names, range=[-0.5, len(rows) - 0.5])  # fmt: skip
    if max(map(len, names)) <= _SHORT_LABEL:
        # Automatic margins draw a figure twice, which takes half of the time.
        figure.layout.xaxis.automargin = figure.layout.yaxis.automargin = False
        figure.layout.margin = {"t": 24, "r": 16, "l": 85, "b": 40}
    for row in rows:
        if row.step_ms is None:
            words = FAIL if row.failed else row.status
            words = NOT_COMPARABLE.replace(", ", ",<br>") if words == "interpreted" else words
            _write_in_place(figure, row, words)
    return figure


def throughput(rows: Sequence[Row]) -> go.Figure:
    """Tokens a second."""
    figure = _by_version(rows, "tokens a second", legend=False)
    shown = {row.label: (row, row.tokens_per_s) for row in rows if row.tokens_per_s}
    _add_bars(figure, shown, "%{x}: %{y:,.0f} tokens/s<extra></extra>")
    # As in "382k": the bars of a narrow page have room for no more.
    _write_above(figure, {
        label: (rate, f"{rate / 1e3:,.3g}k" if 1e4 <= rate < 1e6 else f"{rate:,.0f}")
        for label, (_, rate) in shown.items()
    })  # fmt: skip
    return figure


def speedups(rows: Sequence[Row]) -> go.Figure:
    """How many times as fast as V1, with the 95% interval, for rows that passed the gate."""
    figure = _by_version(rows, "times as fast as V1", legend=False)
    shown = {row.label: (row, row.speedup) for row in rows if row.speedup}
    intervals = [
        row.speedup_ci if row.speedup_text() != "baseline" else None for row, _ in shown.values()
    ]
    lows, highs = ([ci[i] if ci else None for ci in intervals] for i in (0, 1))
    ratios = [ratio for _, ratio in shown.values()]
    errors = {
        "array": [high and high - r for high, r in zip(highs, ratios, strict=True)],
        "arrayminus": [low and r - low for low, r in zip(lows, ratios, strict=True)],
        "color": _GREY,
        "thickness": 3,
        "width": 10,
    }
    _add_bars(figure, shown, "%{x}: %{y:.3f}x<extra></extra>", error_y=errors)
    _write_above(figure, {
        label: (high or ratio, row.short_speedup_text().replace("\n", "<br>"))
        for (label, (row, ratio)), high in zip(shown.items(), highs, strict=True)
    })  # fmt: skip
    figure.add_hline(y=1, line={"color": _GREY, "dash": "dash", "width": 2})
    for row in rows:
        if row.step_ms is not None and not row.speedup:
            why = "gate not run" if row.parity != "pass" else "no V1 to compare"
            _write_in_place(figure, row, f"no speed-up:<br>{why}")
    return figure


def _add_bars(
    figure: go.Figure, shown: Mapping[str, tuple[Row, float]], hover: str, **more: object
) -> None:
    """A bar a row, in its version's colour."""
    figure.add_bar(
        x=list(map(text, shown)),
        y=[value for _, value in shown.values()],
        marker_color=[_colour(row) for row, _ in shown.values()],
        hovertemplate=hover,
        **more,
    )


def _write_above(figure: go.Figure, tops: Mapping[str, tuple[float, str]]) -> None:
    """Words at a height above each label, and room for them."""
    figure.add_scatter(
        x=list(map(text, tops)),
        y=[height for height, _ in tops.values()],
        mode="text",
        text=[f"<b>{words}</b>" for _, words in tops.values()],
        textposition="top center",
        cliponaxis=False,
        showlegend=False,
        hoverinfo="skip",
    )
    lines = max((words.count("<br>") + 1 for _, words in tops.values()), default=1)
    highest = max((height for height, _ in tops.values()), default=1.0)
    figure.layout.yaxis.range = [0, (1.04 + 0.08 * lines) * highest or 1]


def _write_in_place(figure: go.Figure, row: Row, words: str) -> None:
    """In place of a bar."""
    figure.add_annotation(x=text(row.label), y=0, text=words, showarrow=False, yanchor="bottom",
                          font={"color": LOST if row.failed else _GREY})  # fmt: skip


def phases(rows: Sequence[Row]) -> go.Figure:
    """A step's parts on top of each other, and beside them the whole step as it was timed."""
    figure = _by_version(rows, "ms a step", legend=True)
    names = [text(row.label) for row in rows]
    for field, name, colour in PHASE_COLOURS:
        figure.add_bar(x=names, y=[getattr(row, field) for row in rows], name=name,
                       marker_color=colour, hovertemplate="%{y:,.2f} ms")  # fmt: skip
    figure.add_scatter(
        x=names,
        y=[row.step_ms for row in rows],
        name="whole step",
        mode="markers",
        marker={"symbol": "line-ew", "size": 46, "line": {"width": 4, "color": _PINK}},
        hovertemplate="%{y:,.2f} ms",
    )
    parts = [sum(getattr(row, field) or 0.0 for field, *_ in PHASE_COLOURS) for row in rows]
    _write_above(figure, {
        row.label: (max(row.step_ms, sum_of_parts), f"{row.step_ms:,.4g}")
        for row, sum_of_parts in zip(rows, parts, strict=True)
        if row.step_ms
    })  # fmt: skip
    return figure


def memory(rows: Sequence[Row]) -> go.Figure:
    """Peak memory by its contents."""
    peaks = {row.label: row.peak_memory_mb for row in rows if row.peak_memory_mb}
    divisor, unit = (1e3, "GB") if max(peaks.values(), default=0.0) >= 2000 else (1.0, "MB")
    figure = _by_version(rows, f"peak memory, {unit}", legend=True)
    known = [row for row in rows if row.label in peaks]
    for field, name, colour in MEMORY_COLOURS:
        amounts = [float(row.memory_mb.get(field, 0.0)) / divisor for row in known]
        figure.add_bar(x=list(map(text, peaks)), y=amounts, name=name, marker_color=colour,
                       hovertemplate=f"%{{y:,.4g}} {unit}")  # fmt: skip
    tops = {label: (peak / divisor, f"{peak / divisor:,.1f}") for label, peak in peaks.items()}
    _write_above(figure, tops)
    return figure


# --- losses, savings, sweeps, kernels ------------------------------------------------------------


def losses(curves: Sequence[Curve]) -> go.Figure:
    """All versions' losses over the same steps: equal ones lie on each other."""
    figure = _figure(y="loss", x="step", height=470)
    variants: dict[str, int] = {}
    for index, (row, run) in enumerate(curves):
        nth = variants[row.version] = variants.get(row.version, -1) + 1
        # Each later line is thinner, so that those below it stay visible.
        width, size = max(1.5, 8 - 2 * index), max(5, 13 - 2.5 * index)
        figure.add_scatter(
            x=list(range(1, len(run.losses) + 1)),
            y=run.losses,
            name=text(row.label),
            mode="lines+markers",
            line={"color": _colour(row), "width": width, "dash": _DASHES[nth % len(_DASHES)]},
            marker={"symbol": ALL[row.version].marker, "size": size},
            hovertemplate="%{y:.4f}",
        )
    figure.layout.hovermode = "x unified"
    figure.layout.yaxis.rangemode = "normal"
    figure.layout.xaxis.zeroline = False
    return figure


def waterfall(rows: Sequence[Row], gains: Sequence[Interval | None]) -> go.Figure:
    """From the first row's step to the last one's: what each version saves of the one before it.

    Args:
        gains: of each row but the first, the interval of its speed-up over the row before.
    """
    figure = _figure(y="ms a step", height=470, legend=False, type="category")
    steps = [row.step_ms or 0.0 for row in rows]
    names = [text(row.label) for row in rows]
    whole = ALL[BASELINE].colour
    bars = [(names[0], 0.0, steps[0], f"<b>{steps[0]:,.4g} ms</b>", whole)]
    for (a, b), (x, y), gain in zip(
        itertools.pairwise(names), itertools.pairwise(steps), gains, strict=True
    ):
        words = [f"<b>{y - x:+,.3g} ms</b>", f"{y / x - 1:+.0%}"]
        words += [] if differs(gain) else [ONE_PROCESS if gain is None else "no difference"]
        colour = NEITHER if not differs(gain) else SAVED if y < x else LOST
        bars.append((f"{a} → {b}", min(x, y), abs(y - x), "<br>".join(words), colour))
    bars.append(("left", 0.0, steps[-1], f"<b>{steps[-1]:,.4g} ms</b>", whole))
    places, bases, heights, texts, colours = zip(*bars, strict=True)
    figure.add_bar(x=places, base=bases, y=heights, text=texts, marker_color=colours,
                   textposition="outside", cliponaxis=False,
                   hovertemplate="%{x}: %{y:,.2f} ms<extra></extra>")  # fmt: skip
    figure.layout.yaxis.range = [0, 1.25 * max(steps)]
    return figure


def differs(ratio: Interval | None) -> bool:
    """Whether the interval of a ratio is known, and shows a difference."""
    return ratio is not None and not ratio[0] <= 1 <= ratio[1]


def savings(baseline: Row, others: Sequence[Row]) -> go.Figure:
    """How many ms of each part of V1's step a version saves; below zero what it adds."""
    figure = _figure(y="ms a step saved of V1", height=470)
    figure.layout.barmode = "group"
    for field, name, colour in PHASE_COLOURS:
        before, after = getattr(baseline, field), [getattr(row, field) for row in others]
        saved = [before - own if before and own else None for own in after]
        shares = [f"{x / before:+.0%}" if x is not None else "" for x in saved]
        figure.add_bar(x=[text(row.label) for row in others], y=saved, name=name,
                       marker_color=colour, customdata=shares,
                       text=[f"{x:,.3g}" if x is not None else "" for x in saved],
                       textposition="outside", cliponaxis=False,
                       hovertemplate="%{y:,.2f} ms, %{customdata} of V1's")  # fmt: skip
    return figure


def _horizontal(x: str, names: Sequence[str], height: int, *, legend: bool) -> go.Figure:
    """An empty figure with a place for each name, 0 for the first: plotly stacks bars at one name,
    and `text` may cut two to the same."""
    figure = _figure(x=x, height=height, legend=legend)
    return figure.update_yaxes(
        tickvals=list(range(len(names))),
        ticktext=list(map(text, names)),
        autorange="reversed",
        ticklabelstandoff=8,
        showgrid=False,
        zeroline=False,
    )


def switches(whole: Row, variants: Sequence[Row]) -> go.Figure:
    """What each switch of a version is worth: the step without it, less the step with all."""
    height = 150 + 55 * len(variants)
    names = [row.variant for row in variants]
    figure = _horizontal("ms a step longer without it", names, height, legend=False)
    base = whole.step_ms or 0.0
    longer = [(row.step_ms or 0.0) - base for row in variants]
    figure.add_bar(
        x=longer,
        orientation="h",
        marker_color=[SAVED if x > 0 else LOST for x in longer],
        text=[f"<b>{x:+,.3g} ms</b> ({x / base:+.0%})" for x in longer],
        textposition="outside",
        cliponaxis=False,
        hovertemplate="%{x:+,.2f} ms<extra></extra>",
    )
    span = max(map(abs, longer))
    figure.update_xaxes(range=[1.5 * min(0.0, *longer) - 0.02 * span, 1.5 * max(longer)])
    return figure


def sweep(
    lines: Sequence[tuple[Row, Sequence[Point]]],
    axis: Axis,
    title: str,
    value: Callable[[Row], float | None],
) -> go.Figure:
    """Each version's runs over one size; open markers where no gate was run."""
    figure = _figure(y=title, x=axis.words, height=400)
    for row, points in lines:
        symbol = ALL[row.version].marker
        marks = [symbol if p.row.parity == "pass" else f"{symbol}-open" for p in points]
        figure.add_scatter(
            x=[point.size for point in points],
            y=[value(point.row) for point in points],
            name=text(row.label),
            mode="lines+markers",
            line={"color": _colour(row), "width": 3},
            marker={"size": 12, "symbol": marks},
            hovertemplate="%{x:,}: %{y:,.4g}",
        )
    sizes = sorted({point.size for _, points in lines for point in points})
    figure.update_xaxes(type="log", tickvals=sizes, ticktext=[f"{size:,}" for size in sizes])
    return figure


def categories(tables: Sequence[tuple[str, KernelTable]]) -> go.Figure:
    """Where the time of each profile goes, in ms a step where the steps are known: of all profiles,
    or of none."""
    unit = "ms a step" if tables[0][1].steps else "ms in all"
    names = [name for name, _ in tables]
    figure = _horizontal(unit, names, 170 + 60 * len(tables), legend=True)
    sums = [table.category_ns() for _, table in tables]
    divisors = [1e6 * (table.steps or 1) for _, table in tables]
    for category in CATEGORIES:
        times = [own.get(category, 0.0) / d for own, d in zip(sums, divisors, strict=True)]
        if any(times):
            figure.add_bar(x=times, name=category,
                           orientation="h", marker_color=CATEGORY_COLOURS[category],
                           hovertemplate="%{x:,.3g} ms")  # fmt: skip
    figure.update_xaxes(showgrid=True, gridcolor=_GRID)
    return figure


def lab_rates(rows: Sequence[LabRow]) -> go.Figure:
    """Units a second of a lab's variants that have a time, coloured by their verdicts."""
    timed = [row for row in rows if row.times]
    unit = text(rows[0].first.unit)
    names = [row.label for row in timed]
    figure = _horizontal(f"{unit} a second", names, 150 + 55 * len(timed), legend=False)
    rates = [row.units_per_s or 0.0 for row in timed]
    figure.add_bar(
        x=rates,
        orientation="h",
        marker_color=list(map(_verdict_colour, timed)),
        text=[f"<b>{rate:,.4g}</b>" if rate < 1e4 else f"<b>{rate:,.0f}</b>" for rate in rates],
        textposition="outside",
        cliponaxis=False,
        hovertemplate=f"%{{x:,.1f}} {unit}/s<extra></extra>",
    )
    return figure.update_xaxes(range=[0, 1.2 * max(rates)], showgrid=True, gridcolor=_GRID)


def _verdict_colour(row: LabRow) -> str:
    if row.is_baseline:
        return ALL[BASELINE].colour
    if row.speedup is None or not row.speedup.significant:
        return NEITHER
    return SAVED if row.speedup.value > 1 else LOST


def fit_for_both_themes(figure: go.Figure) -> go.Figure:
    """A figure of another tool, without lines that a dark page hides."""
    for trace in figure.data:
        for part in (trace.line, trace.marker):
            if isinstance(part.color, str):
                part.color = _ON_BOTH.get(part.color, part.color)
    figure.update_layout(
        template=_EMPTY_TEMPLATE,
        font=_FONT,
        height=720,
        legend={"orientation": "h", "y": -0.16, "font": {"size": 15}},
    )
    figure.update_xaxes(gridcolor=_GRID)
    figure.update_yaxes(gridcolor=_GRID)
    return figure

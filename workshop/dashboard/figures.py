"""The dashboard's figures that answer to the pointer, for plotly.

Their texts may come from files, and plotly reads a little HTML: `text` escapes it. The page's style
sheet gives words, axes and grids their colours, light or dark.
"""

import html
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from workshop.compare.rows import Row
from workshop.profilers.names import display_name
from workshop.results import FAIL
from workshop.run.interpreter import NOT_COMPARABLE
from workshop.show.charts import LOST
from workshop.versions import ALL

_GREY, _GRID = "#808080", "#D9DDE2"
_FONT: Any = {"size": 18, "family": "system-ui, sans-serif"}
_LONGEST_LABEL, _SHORT_LABEL = 60, 4
_EMPTY_TEMPLATE = go.layout.Template()


def text(name: str) -> str:
    """A name from a file, without markup for plotly."""
    return html.escape(display_name(name, _LONGEST_LABEL), quote=False)


def _by_version(rows: Sequence[Row], y: str) -> go.Figure:
    """An empty figure with a place for each row, and words in the places of those without times."""
    names = [text(row.label) for row in rows]
    # In one piece: each change to a figure costs milliseconds.
    layout = go.Layout(
        template=_EMPTY_TEMPLATE,
        font=_FONT,
        height=430,
        margin={"t": 24, "r": 16, "l": 16, "b": 16},
        barmode="relative",
        bargap=0.35,
        showlegend=False,
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        hoverlabel={"font": {"size": 15}, "namelength": -1},
        xaxis={
            "title": {"text": ""},
            "showgrid": False,
            "automargin": True,
            "type": "category",
            "categoryorder": "array",
            "categoryarray": names,
            "range": [-0.5, len(rows) - 0.5],
        },
        yaxis={
            "title": {"text": y, "standoff": 8},
            "gridcolor": _GRID,
            "automargin": True,
            "rangemode": "tozero",
        },
    )
    figure = go.Figure(layout=layout)
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
    figure = _by_version(rows, "tokens a second")
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
    figure = _by_version(rows, "times as fast as V1")
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
        marker_color=[ALL[row.version].colour for row, _ in shown.values()],
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

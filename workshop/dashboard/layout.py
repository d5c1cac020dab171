"""The page as Dash components. All names become text nodes, which hold no markup."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from dash import dcc, html
from dash.development.base_component import Component

from workshop.dashboard import data
from workshop.dashboard.blocks import CONTENTS, KERNELS, LABS, ROOFLINE, VIEWS, Block, view
from workshop.dashboard.data import Choice, Snapshot
from workshop.profilers.names import printable
from workshop.report.parts import BAD, Cell, Table

POLL_MS = 2000
TITLE = "Performance dashboard"
GRAPH_CONFIG: Any = {"displayModeBar": False, "responsive": True}
PICTURE_STYLE = {"width": "100%", "background": "white", "borderRadius": "0.3rem"}
"""Style of the report's pictures, whose letters are dark."""
THEMES = {"auto": "as the system", "light": "light", "dark": "dark"}
CONTROLS = {
    "device": "Device",
    "preset": "Size",
    "precision": "Precision",
    "shape": "Batch × sequence",
    "versions": "Versions",
    "profile": "Profile",
    "lab": "Lab",
}
"""Ids of the controls that depend on what there is, and their labels."""
_OF_VERSIONS = ("device", "preset", "precision", "shape", "versions")
_CONTROLS_OF: dict[str, tuple[str, ...]] = {
    CONTENTS: (),
    ROOFLINE: (*_OF_VERSIONS, "profile"),
    KERNELS: ("profile",),
    LABS: ("lab",),
}
"""Controls of the views that have others than the versions' controls."""


def page(snapshot: Snapshot, generation: int) -> Component:
    """The whole page with what a first visitor sees."""
    choice = snapshot.settle(Choice())
    first = next(iter(VIEWS))
    return html.Div(
        [
            html.Header(
                [html.H1(TITLE), _field("theme", "Colours", THEMES, "auto", persistence=True)]
            ),
            html.Div([*alarms(snapshot, choice), *broken(snapshot)], id="alarms", role="alert"),
            html.Div(controls(snapshot, choice, first), id="controls"),
            _field("view", "View", {name: name for name in VIEWS}, first),
            html.Main(id="content", children=content(view(first, snapshot, choice))),
            html.Footer(id="footer", children=footer(snapshot)),
            dcc.Interval(id="poll", interval=POLL_MS),
            dcc.Store(id="generation", data=generation),
        ],
        id="page",
    )


def controls(snapshot: Snapshot, choice: Choice, name: str) -> list[Component]:
    return [
        _field(key, label, options(snapshot, choice, key, name), value_of(choice, key),
               hidden=hidden(snapshot, choice, key, name))
        for key, label in CONTROLS.items()
    ]  # fmt: skip


def options(snapshot: Snapshot, choice: Choice, key: str, name: str) -> dict[str, str]:
    """The values that a control offers in a view, with their labels."""
    if key == "versions":
        return {row.label: printable(row.label) for row in snapshot.rows(choice.group)}
    if key == "profile":
        of_device = snapshot.profiles_of(choice.device)
        offered = of_device if name == ROOFLINE else snapshot.profiles
        return {key: snapshot.profile_labels[key] for key in offered}
    values = list(snapshot.labs) if key == "lab" else snapshot.offered(key, choice)
    return {value: value for value in values}


def value_of(choice: Choice, key: str) -> Any:
    return list(choice.versions) if key == "versions" else getattr(choice, key)


def hidden(snapshot: Snapshot, choice: Choice, key: str, name: str) -> bool:
    """Whether a control has nothing to choose in a view."""
    if key not in _CONTROLS_OF.get(name, _OF_VERSIONS):
        return True
    return len(options(snapshot, choice, key, name)) < (2 if key == "shape" else 1)


def option_list(options: dict[str, str]) -> list[dict[str, str]]:
    return [{"value": value, "label": label} for value, label in options.items()]


def _field(
    key: str, label: str, options: dict[str, str], value: Any, *, hidden: bool = False, **more: Any
) -> Component:
    kind = dcc.Checklist if key == "versions" else dcc.RadioItems
    chooser = kind(option_list(options), value, id=key, **more)
    return html.Fieldset([html.Legend(label), chooser], id=f"{key}-field", hidden=hidden)


# --- what depends on the choice ------------------------------------------------------------------


def content(blocks: Iterable[Block]) -> list[Component]:
    return [_block(block) for block in blocks]


def _block(block: Block) -> Component:
    parts: list[Component] = [html.H2(block.title)]
    parts += [html.P(sentence, className=f"say {look}") for sentence, look in block.before]
    if block.figure is not None:
        graph = dcc.Graph(id=f"graph-{block.key}", figure=block.figure, config=GRAPH_CONFIG)
        label: Any = {"aria-label": block.title}
        parts.append(html.Figure(graph, role="img", **label))
    for table in block.tables:
        parts += _table(table)
    for picture in block.pictures:
        parts.append(html.Img(src=picture.source, alt=picture.alt, style=PICTURE_STYLE))
    parts += [html.P(sentence, className="note") for sentence in block.after]
    name = "block wide" if block.wide else "block"
    return html.Section(parts, className=name, id=f"block-{block.key}")


def _table(table: Table) -> Iterator[Component]:
    """Its caption, where it has one, and itself without links to files, which the server does not
    give."""
    shown = [i for i in range(len(table.header)) if any(line.cells[i].text for line in table.lines)]
    if table.caption:
        yield html.P(table.caption, className="say")
    head = html.Thead(html.Tr([html.Th(table.header[i], scope="col") for i in shown]))
    tones: list[Any] = [{"className": line.tone} if line.tone else {} for line in table.lines]
    body = html.Tbody(
        [
            html.Tr([_cell(line.cells[i]) for i in shown], **tone)
            for line, tone in zip(table.lines, tones, strict=True)
        ]
    )
    drawn = html.Table([head, body], className=f"texts-{table.texts}")
    yield html.Div(drawn, className="scroll", tabIndex=0)


def _cell(cell: Cell) -> Component:
    if cell.look is None:
        return html.Td(cell.text)
    attributes: dict[str, Any] = {"title": cell.title} if cell.title else {}
    colour: dict[str, Any] = {"style": {"--swatch": cell.colour}} if cell.colour else {}
    return html.Td(html.Span(cell.text, className=cell.look, **colour), **attributes)


def alarms(snapshot: Snapshot, choice: Choice) -> list[Component]:
    """Failed checks and implausible numbers of the chosen size."""
    lines = data.alarms(snapshot.chosen(choice))
    return [html.P(printable(line), className=f"say {BAD}") for line in lines]


def broken(snapshot: Snapshot) -> list[Component]:
    """The files that can't be read."""
    if not snapshot.broken:
        return []
    count = len(snapshot.broken)
    title = f"Left out: {count} file{'s' if count > 1 else ''} that can't be read"
    reasons = html.Ul([html.Li(printable(broken.reason)) for broken in snapshot.broken])
    return [html.Details([html.Summary(title), reasons], className=BAD, open=count < 6)]


def footer(snapshot: Snapshot) -> list[Component]:
    folders: Sequence[str] = [data.shown_path(folder) for folder in snapshot.folders]
    return [
        html.P(f"{snapshot.runs:,} runs and {len(snapshot.profiles)} profiles, from "
               f"{', '.join(folders)}. New ones appear by themselves.")
    ]  # fmt: skip

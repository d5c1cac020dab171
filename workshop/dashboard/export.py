"""The page as one file, for those who have neither the results nor Python."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import plotly.offline
from rich.console import Console
from rich.progress import track

from workshop import results
from workshop.compare.collection import Collection
from workshop.dashboard import blocks, data, layout
from workshop.dashboard.data import Choice, Group, Snapshot
from workshop.profilers.names import printable

_FOLDER = Path(__file__).parent


def page(collection: Collection) -> str:
    """The HTML of all groups and profiles of a collection, with its style and all of plotly.js.
    Nothing is chosen but groups and profiles: each shows all its versions."""
    snapshot = Snapshot(collection)
    first = snapshot.settle(Choice(), of_its_device=True)
    figures: list[Any] = []
    views = list(_views(snapshot, figures))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template("export.html.j2").render(
        title=layout.TITLE,
        created=results.now(),
        style=(_FOLDER / "assets" / "style.css").read_text(encoding="utf-8"),
        script=(_FOLDER / "export.js").read_text(encoding="utf-8"),
        plotly=plotly.offline.get_plotlyjs(),
        figures=_as_json(figures),
        config=_as_json(layout.GRAPH_CONFIG),
        themes=layout.THEMES,
        names={name: name for name in blocks.VIEWS},
        first_view=next(iter(blocks.VIEWS)),
        of_profiles=[blocks.KERNELS],
        groups={_key(group): " · ".join(group) for group in _ordered(snapshot)},
        profiles={key: data.profile_label(p) for key, p in snapshot.profiles.items()},
        first=_key(first.group),
        first_profile=first.profile,
        views=views,
        broken=[printable(broken.reason) for broken in snapshot.broken],
    )


def _views(snapshot: Snapshot, figures: list[Any]) -> Iterator[dict[str, Any]]:
    """Each view of each group, and the hot lists of each profile; `figures` gets their figures,
    and each block the index of its own."""
    console = Console(stderr=True)
    choices: list[tuple[str, str, Choice]] = []
    for group in _ordered(snapshot):
        labels = tuple(row.label for row in snapshot.rows(group))
        choice = snapshot.settle(Choice(*group, labels), of_its_device=True)
        choices += [(name, _key(group), choice) for name in blocks.VIEWS if name != blocks.KERNELS]
    choices += [(blocks.KERNELS, key, Choice(profile=key)) for key in snapshot.profiles]
    for name, key, choice in track(
        choices, "drawing", console=console, disable=not console.is_terminal, transient=True
    ):
        rows = [row for row in snapshot.rows(choice.group) if row.label in choice.versions]
        found = []
        for block in blocks.view(name, snapshot, choice):
            index = None
            if block.figure is not None:
                index = len(figures)
                figures.append(block.figure.to_plotly_json())
            found.append((block, index))
        alarms = [printable(line) for line in data.alarms(rows)]
        yield {"name": name, "key": key, "blocks": found, "alarms": alarms}


def _ordered(snapshot: Snapshot) -> list[Group]:
    return [
        Group(device, preset, precision, shape)
        for device in snapshot.devices()
        for preset in snapshot.presets(device)
        for precision in snapshot.precisions(device, preset)
        for shape in snapshot.shapes(device, preset, precision)
    ]


def _key(group: Group) -> str:
    return json.dumps(group)


def _as_json(content: Any) -> str:
    """JSON that can stand in a script element: no name in it can end that."""
    from plotly.utils import PlotlyJSONEncoder

    text = json.dumps(content, cls=PlotlyJSONEncoder, separators=(",", ":"))
    return text.replace("<", "\\u003c")

"""The dashboard as one file, which needs neither the results nor Python."""

import html
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import plotly.offline
from dash import dcc
from dash.development.base_component import Component
from markupsafe import Markup
from plotly.utils import PlotlyJSONEncoder

from workshop import results
from workshop.collection import Collection
from workshop.compare import tables
from workshop.dashboard import blocks, layout
from workshop.dashboard.data import Choice, Group, Snapshot

_FOLDER = Path(__file__).parent
_ATTRIBUTES = {"className": "class", "tabIndex": "tabindex"}
_CHOSEN_BY = {blocks.CONTENTS: "", blocks.KERNELS: "profile", blocks.LABS: "lab"}
"""The list from which a view's content is chosen, where that is not a group; "" for none."""


def page(collection: Collection) -> str:
    """The HTML of all groups, profiles and labs of a collection, with its style and all of
    plotly.js. The reader chooses among them; a group shows all its versions."""
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
        data=_as_json({
            "figures": figures, "config": layout.GRAPH_CONFIG, "chosenBy": _CHOSEN_BY
        }),
        radios={
            "theme": ("Colours", "auto", layout.THEMES),
            "view": ("View", next(iter(blocks.VIEWS)), dict.fromkeys(blocks.VIEWS)),
        },
        selects={
            "group": ("Device, size, precision, batch × sequence", _key(first.group),
                      {_key(group): " · ".join(group) for group in snapshot.sizes()}),
            "profile": ("Profile", first.profile, snapshot.profile_labels),
            "lab": ("Lab", first.lab, {key: key for key in snapshot.labs}),
        },
        views=views,
        broken=Markup(_markup(layout.broken(snapshot), figures)),
    )  # fmt: skip


def _views(snapshot: Snapshot, figures: list[Any]) -> Iterator[dict[str, Any]]:
    """Each view of each group, the hot lists of each profile and the rows of each lab, as HTML;
    their figures are appended to `figures`. A view without any has a note, under an empty key."""
    of_groups = [name for name in blocks.VIEWS if name not in _CHOSEN_BY]
    choices = [(blocks.CONTENTS, "", Choice())]
    for group in snapshot.sizes():
        labels = tuple(row.label for row in snapshot.rows(group))
        choice = snapshot.settle(Choice(*group, labels), of_its_device=True)
        choices += [(name, _key(group), choice) for name in of_groups]
    if not snapshot.groups:
        choices += [(name, "", Choice()) for name in of_groups]
    choices += [(blocks.KERNELS, key, Choice(profile=key)) for key in snapshot.profiles or [""]]
    choices += [(blocks.LABS, key, Choice(lab=key)) for key in snapshot.labs or [""]]
    for name, key, choice in tables.tracked(choices, "drawing"):
        found = layout.content(blocks.view(name, snapshot, choice))
        content = _markup([*layout.alarms(snapshot, choice), *found], figures)
        yield {"name": name, "key": key, "content": Markup(content)}


def _markup(content: Any, figures: list[Any]) -> str:
    """A tree of Dash's components as HTML. A figure becomes an element with its index in `figures`,
    to which it is appended."""
    if content is None:
        return ""
    if isinstance(content, (list, tuple)):
        return "".join(_markup(part, figures) for part in content)
    if not isinstance(content, Component):
        return html.escape(str(content))
    properties = content.to_plotly_json()["props"]
    if isinstance(content, dcc.Graph):
        figures.append(properties["figure"].to_plotly_json())
        return f'<div data-figure="{len(figures) - 1}"></div>'
    children = properties.pop("children", None)
    properties.pop("id", None)  # the same in all views
    if "style" in properties:
        properties["style"] = "; ".join(f"{k}: {v}" for k, v in properties["style"].items())
    tag = type(content).__name__.lower()
    attributes = "".join(
        f' {_ATTRIBUTES.get(name, name)}="{html.escape(str(value))}"'
        for name, value in properties.items()
        if value is not False
    )
    return f"<{tag}{attributes}>{_markup(children, figures)}</{tag}>"


def _key(group: Group) -> str:
    return json.dumps(group)


def _as_json(content: Any) -> Markup:
    """JSON that can be the content of a script element: no name in it can end that."""
    text = json.dumps(content, cls=PlotlyJSONEncoder, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))

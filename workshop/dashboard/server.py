"""The page on a server of this machine's own."""

import logging
import socket
from pathlib import Path
from typing import Any

import dash
from dash import Input, Output, State, ctx, no_update
from werkzeug import serving

from workshop.dashboard import blocks, layout
from workshop.dashboard.data import Choice, Live
from workshop.dashboard.layout import CONTROLS
from workshop.errors import WorkshopError

HOST = "127.0.0.1"
"""No other machine may ask: the page has no password."""
ASSETS = Path(__file__).with_name("assets")


def make_app(live: Live) -> dash.Dash:
    """The page and its callbacks. It loads nothing from other machines."""
    app = dash.Dash(
        __name__,
        assets_folder=str(ASSETS),
        serve_locally=True,
        title=layout.TITLE,
        update_title="",
        meta_tags=[
            {"name": "viewport", "content": "width=device-width, initial-scale=1"},
            {"name": "color-scheme", "content": "light dark"},
        ],
        add_log_handler=False,
        enable_mcp=False,
    )
    app.index_string = app.index_string.replace("<html>", '<html lang="en">')
    app.server.config["TRUSTED_HOSTS"] = [HOST, "localhost"]

    def page() -> Any:
        generation = live.refresh()  # first: it replaces the snapshot
        return layout.page(live.snapshot, generation)

    app.layout = page
    _add_callbacks(app, live)
    return app


def _add_callbacks(app: dash.Dash, live: Live) -> None:
    @app.callback(
        Output("generation", "data"),
        Input("poll", "n_intervals"),
        State("generation", "data"),
        prevent_initial_call=True,
    )
    def look_for_news(_: int, shown: int) -> Any:
        newest = live.refresh()
        return no_update if newest == shown else newest

    @app.callback(
        output={
            "options": {key: Output(key, "options") for key in CONTROLS},
            "values": {key: Output(key, "value") for key in CONTROLS},
            "hidden": {key: Output(f"{key}-field", "hidden") for key in CONTROLS},
            "alarms": Output("alarms", "children"),
            "content": Output("content", "children"),
            "footer": Output("footer", "children"),
        },
        inputs={
            "chosen": {key: Input(key, "value") for key in CONTROLS},
            "view": Input("view", "value"),
            "_generation": Input("generation", "data"),
            "offered": State("versions", "options"),
        },
        prevent_initial_call=True,
    )
    def show(
        chosen: dict[str, Any], view: str, _generation: int, offered: list[dict[str, str]]
    ) -> dict[str, Any]:
        snapshot = live.snapshot
        wanted: dict[str, Any] = {key: value or "" for key, value in chosen.items()}
        wanted["versions"] = tuple(chosen["versions"] or ())
        choice = snapshot.settle(
            Choice(**wanted),
            seen=[option["value"] for option in offered],
            of_its_device=view == blocks.ROOFLINE,
        )
        return {
            "options": {
                key: layout.option_list(layout.options(snapshot, choice, key, view))
                for key in CONTROLS
            },
            "values": {key: layout.value_of(choice, key) for key in CONTROLS},
            "hidden": {key: layout.hidden(snapshot, choice, key, view) for key in CONTROLS},
            # A screen reader reads them again whenever they are set.
            "alarms": no_update
            if ctx.triggered_id == "view"
            else [*layout.alarms(snapshot, choice), *layout.broken(snapshot)],
            "content": layout.content(blocks.view(view, snapshot, choice)),
            "footer": layout.footer(snapshot),
        }


def listen(port: int) -> socket.socket:
    """A socket on this machine alone; with port 0 on one that is free.

    Raises:
        WorkshopError: the port is in use, or not allowed.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise WorkshopError(
            f"--port {port}: {error.strerror}: choose another one, or 0 for any that is free"
        ) from None
    return listener


def make_server(app: dash.Dash, listener: socket.socket) -> serving.BaseWSGIServer:
    """Call `serve_forever` on it."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # no line for every poll
    host, port = listener.getsockname()
    return serving.make_server(host, port, app.server, threaded=True, fd=listener.fileno())

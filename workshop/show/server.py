"""The dashboard: the page on a server of this machine's own, with a choice and new results.

Nothing is loaded from other machines. Charts are drawn when the browser asks for them.
"""

import threading
import urllib.parse
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from workshop.collection import Collection
from workshop.errors import WorkshopError, printable
from workshop.show import page
from workshop.show.page import Choice, Page
from workshop.versions import ALL

HOST = "127.0.0.1"
"""No other machine may ask: the page has no password."""
TITLE = "Performance dashboard"
_KEYS = ("device", "size", "precision", "show")


@dataclass(frozen=True)
class Field:
    """A control of the page: the values that it offers, each with its label, and those chosen."""

    key: str
    label: str
    kind: str
    options: list[tuple[str, str]]
    chosen: tuple[str, ...]


@dataclass(frozen=True)
class Live:
    """The controls of the served page, and the number of the results that it shows."""

    fields: list[Field]
    generation: int


class Results:
    """The newest results of a collection, and the pages made of them, for any number of threads."""

    def __init__(self, collection: Collection) -> None:
        self._collection, self._lock = collection, threading.Lock()
        self._collection.refresh()
        self.generation, self.parts = 1, page.read(collection)
        self._pages: dict[Choice, Page] = {}

    def refresh(self) -> int:
        """Looks for new files, unless another thread is doing so; the number of the results."""
        if self._lock.acquire(blocking=False):
            try:
                if self._collection.refresh():
                    self.parts, self._pages = page.read(self._collection), {}
                    self.generation += 1
            finally:
                self._lock.release()
        return self.generation

    def page(self, choice: Choice) -> Page:
        pages = self._pages
        if choice not in pages:
            pages[choice] = page.make(self.parts, choice, title=TITLE)
        return pages[choice]

    def html(self, choice: Choice) -> str:
        live = Live(self._fields(choice), self.generation)
        return page.html_page(self.page(choice), None, live=live)

    def _fields(self, choice: Choice) -> list[Field]:
        """The controls that have something to choose among."""
        devices = (one for shelf in self.page(Choice()).shelves for one in shelf.devices)
        every = [section for device in devices for section in device.sections]
        of_device = [one for one in every if choice.device in ("", printable(one.device))]
        found = {
            "show": [one.kind for one in every],
            "device": [printable(one.device) for one in every],
            "size": [one.size for one in of_device],
            "precision": [one.precision for one in of_device],
        }
        shown = []
        for key, values in found.items():
            own, chosen = dict.fromkeys(filter(None, values)), getattr(choice, key)
            if len(own) > 1 or chosen:
                options = [("", "all"), *((value, value) for value in own)]
                shown.append(Field(key, key.capitalize(), "radio", options, (chosen,)))
        keys = {row.version for part in self.parts for group in part.groups for row in group.rows}
        if len(keys) > 1:
            options = [(key, key) for key in ALL if key in keys]
            chosen = choice.versions or tuple(keys)
            shown.append(Field("versions", "Versions", "checkbox", options, chosen))
        return shown


def choice_of(query: str) -> Choice:
    """The choice in an address."""
    given = urllib.parse.parse_qs(query)
    device, size, precision, show = (given.get(key, [""])[0] for key in _KEYS)
    return Choice(device, size, precision, show, tuple(sorted(given.get("versions", ()))))


def make_server(results: Results, port: int) -> ThreadingHTTPServer:
    """A server that listens on this machine alone; with port 0 on one that is free. Call
    `serve_forever` on it.

    Raises:
        WorkshopError: the port is in use, or not allowed.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = urllib.parse.urlsplit(f"//{self.headers.get('Host', '')}").hostname
            address = urllib.parse.urlsplit(self.path)
            found = None
            if host in (HOST, "localhost"):  # else another site's page asks
                found = answer(address.path, address.query)
            body = (found or "not found").encode(errors="replace")
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            with suppress(ConnectionError):  # the browser has left the page
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # no line for every request
            pass

    def answer(path: str, query: str) -> str | None:
        results.refresh()
        if path == "/generation":
            return str(results.generation)
        if path == "/chart":
            name = urllib.parse.parse_qs(query).get("chart", [""])[0]
            chart = results.page(choice_of(query)).charts.get(name)
            return chart.markup if chart else None
        return results.html(choice_of(query)) if path == "/" else None

    try:
        return ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        raise WorkshopError(
            f"--port {port}: {error.strerror}: choose another one, or 0 for any that is free"
        ) from None

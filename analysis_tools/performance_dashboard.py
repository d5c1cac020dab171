"""Shows all results on a page in the browser: throughput, memory, losses, roofline, kernels,
labs.

It is the page that report_generator.py writes, with a choice of device, size, precision and
versions. It is served on this machine only (127.0.0.1), needs no network, and shows new results as
they are written. On a node without a browser, forward the port: ssh -L 8050:127.0.0.1:8050 NODE
"""

import os
import sys
import threading
import webbrowser
from dataclasses import dataclass
from pathlib import Path

from workshop import errors

if __name__ == "__main__":
    errors.begin()

from workshop.arguments import option, run
from workshop.errors import WorkshopError


@dataclass
class Options:
    results: list[Path] | None = option(
        "with results; may be repeated (default: results/)", action="append", metavar="DIR"
    )
    port: int = option("0 for any that is free", 8050)
    no_browser: bool = option("open no browser, only print the address")


def main(argv: list[str] | None = None) -> int:
    return run(
        Options, _show, argv, interrupted="\nended", description=__doc__,
        epilog="Exit status: 0 done (Ctrl-C ends the server), 2 wrong usage, 77 a package is "
        "missing.",
    )  # fmt: skip


def _show(options: Options) -> int:
    errors.require("jinja2", "matplotlib")
    if not 0 <= options.port < 1 << 16:
        raise WorkshopError(f"--port {options.port}: it must lie between 0 and 65535")
    # These import torch, which --help does not need.
    import torch

    from workshop import results
    from workshop.collection import Collection
    from workshop.show import server

    torch.set_num_threads(1)  # its medians are small: threads would only wait for each other
    collection = Collection(options.results or [results.DEFAULT_FOLDER])
    with server.make_server(server.Results(collection), options.port) as running:
        address = f"http://{server.HOST}:{running.server_port}/"
        print(f"{address}  (Ctrl-C ends it)", flush=True)
        screen = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
        if not options.no_browser and (sys.platform != "linux" or screen):
            # Without a screen a browser would take this terminal.
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        running.serve_forever()  # until Ctrl-C
    return errors.DONE


if __name__ == "__main__":
    sys.exit(main())

"""Shows how close a training step or its kernels come to a chip's limits, and which limit it is.

PATH is found out from its content: a result file or a folder of results (whole steps and their
parts), what ncu, rocprof-compute or rocprofv3 counted (each kernel), or a result of V3's benchmark.
No GPU is needed for it.
"""

import argparse
import functools
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

if __name__ == "__main__":  # PyTorch is not everywhere, and takes seconds to import
    from workshop.needed import import_torch

    import_torch()

from workshop import errors, results  # noqa: E402
from workshop.arguments import parse  # noqa: E402
from workshop.errors import WorkshopError  # noqa: E402
from workshop.profilers.names import printable  # noqa: E402
from workshop.roofline import ceilings, inputs  # noqa: E402
from workshop.roofline.model import Roofline, as_csv, as_json, ceiling_text, flags, sentences  # noqa: E402
from workshop.run import hardware  # noqa: E402
from workshop.show import roofline_chart  # noqa: E402
from workshop.tables import print_tables, terminal  # noqa: E402

if TYPE_CHECKING:
    from rich.console import Console

MOST_SHOWN = 50


def build_parser() -> argparse.ArgumentParser:
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  roofline_analysis.py results/reference/nvidia_h200 --config medium --precision bf16\n"
        "  roofline_analysis.py version1_pytorch_baseline/profiles/ncu\n"
        "  roofline_analysis.py --measure\n\n"
        "Exit status: 0 done, 2 wrong usage or nothing that has a place on a roofline, 77 a\n"
        "package is missing, 130 interrupted.",
    )
    add = parser.add_argument
    add("paths", nargs="*", type=Path, metavar="PATH", help="of one device, for one roofline")
    limits = parser.add_argument_group("ceilings, added to those known of the device").add_argument
    limits("--peak-compute", type=float, metavar="X", help="TFLOP/s at --precision")
    limits("--peak-bw", type=float, metavar="X", help="GB/s of the memory")
    limits("--chip", metavar="NAME", help='data sheet of a listed chip, as "L4"')
    limits("--measure", action="store_true", help="measure them here, in seconds, and keep them")
    limits("--device", default="auto", help="to measure (default auto: GPU if any)")
    add("--precision", choices=("fp32", "tf32", "bf16", "fp16"),
        help="of result files, only those of it; of kernels, that of their products where none "
        "is recorded (default bf16)")  # fmt: skip
    add("--config", metavar="PRESET", help="of result files, only those of it (default: all)")
    add("--top", type=int, default=12, metavar="N", help="points to describe (default %(default)s)")
    folder = functools.partial(add, type=Path, metavar="DIR")
    folder("--results", help="where measured ceilings are kept (default: results/)")
    folder("--output-dir", help="for roofline.png, .csv, .json (default: DIR/roofline/)")
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = parse(build_parser(), argv)
    return errors.exit_status(
        lambda: _analyse(arguments), interrupted="interrupted: what is written is whole"
    )


def _analyse(arguments: argparse.Namespace) -> int:
    if not (arguments.paths or arguments.measure):
        raise WorkshopError("nothing to show: give a PATH, or --measure (see --help)")
    if not 1 <= arguments.top <= MOST_SHOWN:
        raise WorkshopError(f"--top {arguments.top}: it must lie between 1 and {MOST_SHOWN}")
    errors.require("rich")
    arguments.results = arguments.results or results.DEFAULT_FOLDER
    console = terminal()
    if arguments.measure:
        _measure(arguments, console)
    if not arguments.paths:
        return errors.DONE
    roofline = inputs.load(arguments.paths, precision=arguments.precision, config=arguments.config)
    # --peak-compute is the peak at the given precision, else at that of the products.
    of_products = (point.precision for point in roofline.points if point.precision != "fp32")
    precision = arguments.precision or next(of_products, "fp32")
    given = inputs.given_ceilings(arguments.peak_compute, arguments.peak_bw, precision)
    ceilings.attach(roofline, given=given, chip=arguments.chip, folder=arguments.results)
    folder = results.prepare_folder(arguments.output_dir or arguments.results / "roofline")
    written = _write(roofline, arguments.top, folder)
    _show(roofline, arguments.top, console)
    print("\n".join(written))
    return errors.DONE


def _measure(arguments: argparse.Namespace, console: "Console") -> None:
    from rich.console import Console

    device = hardware.get_device(arguments.device)
    with Console(stderr=True).status("measuring") as status:
        measurement = ceilings.measure(device, lambda what: status.update(f"measuring: {what}"))
    name = printable(str(measurement.device.get("name")))
    found = ", ".join(ceiling_text(ceiling) for ceiling in measurement.ceilings())
    console.print(f"{name}: {found}; measured in {measurement.seconds:.1f} s")
    print(f"Written: {ceilings.save(measurement, arguments.results)}")


# --- showing -------------------------------------------------------------------------------------


def _show(roofline: Roofline, top: int, console: "Console") -> None:
    from rich.text import Text

    print_tables([roofline_chart.table(roofline, top)])
    for rank, sentence in enumerate(sentences(roofline, top), 1):
        console.print(Text(f"{rank}. {sentence}"))
    for flag in flags(roofline):
        console.print(Text(flag, style="bold red"))
    by_source: dict[str, list[str]] = {}
    for ceiling in roofline.ceilings:
        source = f"{ceiling.origin}: {ceiling.source}"
        by_source.setdefault(source, []).append(ceiling_text(ceiling))
    notes = [f"{', '.join(texts)} ({source})" for source, texts in by_source.items()]
    for line in (*notes, *(f"note: {note}" for note in roofline.notes)):
        console.print(Text(line, style="dim"))


# --- files ---------------------------------------------------------------------------------------


def _write(roofline: Roofline, top: int, folder: Path) -> list[str]:
    """Writes all forms that this machine can, in the place of an earlier roofline's; a line on each
    of them."""
    contents: dict[Path, results.Content] = {
        folder / "roofline.json": results.json_text(as_json(roofline)),
        folder / "roofline.csv": as_csv(roofline),
    }
    picture, lines = folder / "roofline.png", []
    if importlib.util.find_spec("matplotlib") is None:
        lines.append(
            f"{picture.name}: skipped: matplotlib is missing: run `make setup`, or pip install it"
        )
    else:
        contents[picture] = lambda path: roofline_chart.draw(roofline, path, labels=top)
    results.write_together(contents, gone=[picture])
    return [*lines, f"Written: {', '.join(map(str, contents))}"]


if __name__ == "__main__":
    sys.exit(main())

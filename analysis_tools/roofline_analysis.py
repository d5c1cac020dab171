"""Shows how close a training step or its kernels come to a chip's limits, and which limit it is.

PATH is found out from its content: a result file or a folder of results (whole steps and their
parts), what ncu, rocprof-compute or rocprofv3 counted (each kernel), or a result of V3's benchmark.
No GPU is needed for it.
"""

import argparse
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":  # PyTorch is not everywhere, and takes seconds to import
    from workshop.needed import import_torch

    import_torch()

from workshop import errors, results
from workshop.arguments import argument, option, run
from workshop.errors import WorkshopError
from workshop.profilers.names import printable
from workshop.roofline import ceilings, inputs
from workshop.roofline.model import Roofline, as_json, ceiling_text, flags, sentences
from workshop.run import hardware
from workshop.show import roofline_chart
from workshop.tables import print_tables, terminal

if TYPE_CHECKING:
    from rich.console import Console

MOST_SHOWN = 50


@dataclass
class Options:
    """The command line."""

    paths: list[Path] = argument("of one device, for one roofline", nargs="*", metavar="PATH")
    peak_compute: float | None = option("a ceiling, added to those known: TFLOP/s at --precision")
    peak_bw: float | None = option("a ceiling, added to those known: GB/s of the memory")
    chip: str | None = option('ceilings of a listed chip\'s data sheet, as "L4"', metavar="NAME")
    measure: bool = option("measure the ceilings here, in seconds, and keep them")
    device: str = option("to measure (default auto: GPU if any)", "auto")
    precision: str | None = option(
        "of result files, only those of it; of kernels, that of their products where none "
        "is recorded (default bf16)",
        choices=("fp32", "tf32", "bf16", "fp16"),
    )
    config: str | None = option(
        "of result files, only those of it (default: all)", metavar="PRESET"
    )
    top: int = option("points to describe", 12)
    results: Path = option(
        "where measured ceilings are kept (default: results/)",
        results.DEFAULT_FOLDER,
        metavar="DIR",
    )
    output_dir: Path | None = option(
        "for roofline.png and .json (default: DIR/roofline/)", metavar="DIR"
    )


def main(argv: list[str] | None = None) -> int:
    return run(
        Options,
        _analyse,
        argv,
        interrupted="interrupted: what is written is whole",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  roofline_analysis.py results/reference/nvidia_h200 --config medium --precision bf16\n"
        "  roofline_analysis.py version1_pytorch_baseline/profiles/ncu\n"
        "  roofline_analysis.py --measure\n\n"
        "Exit status: 0 done, 2 wrong usage or nothing that has a place on a roofline, 77 a\n"
        "package is missing, 130 interrupted.",
    )


def _analyse(options: Options) -> int:
    if not (options.paths or options.measure):
        raise WorkshopError("nothing to show: give a PATH, or --measure (see --help)")
    if not 1 <= options.top <= MOST_SHOWN:
        raise WorkshopError(f"--top {options.top}: it must lie between 1 and {MOST_SHOWN}")
    errors.require("rich")
    console = terminal()
    if options.measure:
        _measure(options, console)
    if not options.paths:
        return errors.DONE
    roofline = inputs.load(options.paths, precision=options.precision, config=options.config)
    # --peak-compute is the peak at the given precision, else at that of the products.
    of_products = (point.precision for point in roofline.points if point.precision != "fp32")
    precision = options.precision or next(of_products, "fp32")
    given = inputs.given_ceilings(options.peak_compute, options.peak_bw, precision)
    ceilings.attach(roofline, given=given, chip=options.chip, folder=options.results)
    folder = results.prepare_folder(options.output_dir or options.results / "roofline")
    written = _write(roofline, options.top, folder)
    _show(roofline, options.top, console)
    print("\n".join(written))
    return errors.DONE


def _measure(options: Options, console: "Console") -> None:
    from rich.console import Console

    device = hardware.get_device(options.device)
    with Console(stderr=True).status("measuring") as status:
        measurement = ceilings.measure(device, lambda what: status.update(f"measuring: {what}"))
    name = printable(str(measurement.device.get("name")))
    found = ", ".join(ceiling_text(ceiling) for ceiling in measurement.ceilings())
    console.print(f"{name}: {found}; measured in {measurement.seconds:.1f} s")
    print(f"Written: {ceilings.save(measurement, options.results)}")


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

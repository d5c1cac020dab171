"""Known limits of a machine: from data sheets, and measured with a large copy and
large matrix products.

Measurements are kept by device, so that a roofline of a chip that no table lists has ceilings too,
and one of a listed chip shows what can be reached of them in practice.
"""

import dataclasses
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from workshop import records, results
from workshop.errors import WorkshopError
from workshop.labs import KERNELS, LabRun
from workshop.profilers.names import printable
from workshop.roofline import model
from workshop.roofline.model import DATA_SHEET, MEASURED, Ceiling, Roofline
from workshop.run import chips, hardware
from workshop.run.precision import PRECISIONS, kept_matmul_mode, supported

SCHEMA_VERSION = 1
FOLDER = "ceilings"


@dataclass
class Measurement:
    """The rates of one device, on one day, with one version of its libraries."""

    device: dict[str, str | int | float | None]
    software: dict[str, str | None]
    created: str
    copy_gbs: float
    """Read and written, of its memory."""
    tflops: dict[str, float]
    """The rate of a large matrix product, by precision."""
    session: str = ""
    git_commit: str | None = None
    seconds: float = 0.0
    """The time that measuring took."""

    def ceilings(self) -> list[Ceiling]:
        """As lines of a roofline."""
        torch_version = printable(str(self.software.get("torch")))
        source = f"a large copy and product, {printable(self.created[:10])}, torch {torch_version}"
        return _ceilings(self.copy_gbs, self.tflops, MEASURED, source)

    def is_of(self, device_name: str, threads: object) -> bool:
        of_threads = threads is None or self.device.get("threads") in (None, threads)
        return of_threads and self.device.get("name") == device_name


def _ceilings(
    bandwidth_gbs: float, tflops: Mapping[str, float], origin: str, source: str
) -> list[Ceiling]:
    return [
        Ceiling(model.MEMORY, model.MAIN_MEMORY, bandwidth_gbs * 1e9, origin, source),
        *(
            Ceiling(model.COMPUTE, printable(precision), rate * 1e12, origin, source)
            for precision, rate in tflops.items()
        ),
    ]


def from_data_sheet(device_name: str, used: Collection[str] = ()) -> list[Ceiling]:
    """The listed limits of a chip; none for one that is not listed.

    Args:
        used: precisions of what is drawn. fp8's limits are far above what the others reach, and
            shown where they hold.
    """
    peaks = chips.find_peaks(device_name)
    if peaks is None:
        return []
    rates = {n: rate for n, rate in peaks.tflops.items() if n in PRECISIONS or n in used}
    return _ceilings(peaks.bandwidth_gbs, rates, DATA_SHEET, peaks.source)


# --- measuring -----------------------------------------------------------------------------------


def measure(device: torch.device, report: Callable[[str], object]) -> Measurement:
    """Measures the copy bandwidth and a product at each precision that the device has: seconds, on
    a CPU as well.

    Args:
        report: called before each measurement, with its name.
    """
    start = time.perf_counter()
    report("copy")
    copy_gbs = hardware.measure_copy_gbs(device)
    tflops = {}
    with kept_matmul_mode():
        for name in supported(device):
            report(f"{name} product")
            PRECISIONS[name].set_matmul_mode()
            tflops[name] = hardware.measure_matmul_tflops(device, PRECISIONS[name].autocast_dtype)
    return Measurement(
        device=hardware.describe(device),
        software=results.describe_software(),
        created=results.now(),
        copy_gbs=copy_gbs,
        tflops=tflops,
        session=results.new_session(),
        git_commit=results.git_commit(),
        seconds=time.perf_counter() - start,
    )


def save(measurement: Measurement, folder: Path) -> Path:
    """Writes `folder/ceilings/DEVICE.json`, in the place of what was measured of that device
    before; its path."""
    target = results.prepare_folder(folder / FOLDER)
    name = re.sub(r"[^a-z0-9]+", "_", str(measurement.device.get("name")).lower()).strip("_")
    threads = measurement.device.get("threads")
    path = target / f"{name or 'device'}{f'_{threads}_threads' if threads else ''}.json"
    content = {"schema_version": SCHEMA_VERSION, "ceilings": "measured"}
    results.write_json(path, content | dataclasses.asdict(measurement))
    return path


# --- finding -------------------------------------------------------------------------------------


def load(path: Path) -> Measurement:
    """Reads what `save` wrote.

    Raises:
        WorkshopError: it is something else, or broken; the message names the file and the field.
    """
    content = results.read_json(path)
    if content.pop("schema_version", None) != SCHEMA_VERSION or not content.pop("ceilings", None):
        raise WorkshopError(
            f"{path}: no measured ceilings; measure them again (roofline_analysis.py --measure)"
        )
    measurement = results.convert(Measurement, content, str(path))
    for where, rate in (("copy_gbs", measurement.copy_gbs), *measurement.tflops.items()):
        if not results.LEAST <= rate <= results.MOST:
            raise WorkshopError(f"{path}: field {where} is {rate!r:.40}, no rate of a machine")
    return measurement


def find(device_name: str, threads: object, folder: Path | None, notes: list[str]) -> list[Ceiling]:
    """Measured ceilings of a device, the newest of each kind; none if nothing was measured.

    Args:
        threads: of a CPU, where they are known: its rates depend on them.
        folder: of results (default: the checkout's), whose measurements and benchmark of kernels
            are read, as are those of the checkout's reference results.
        notes: get a sentence for each file that is broken, and left out.
    """
    found = []
    for path in _files(folder or results.DEFAULT_FOLDER):
        try:
            is_benchmark = path.suffix == records.SUFFIX
            measurement = _of_benchmark(path) if is_benchmark else load(path)
        except WorkshopError as error:
            notes.append(f"left out: {error}")
            continue
        if measurement is not None and measurement.is_of(device_name, threads):
            found.append(measurement)
    newest: dict[tuple[str, str], Ceiling] = {}
    for measurement in sorted(found, key=lambda m: m.created):
        newest |= {(c.kind, c.name): c for c in measurement.ceilings()}
    return list(newest.values())


def attach(
    roofline: Roofline,
    *,
    given: Sequence[Ceiling] = (),
    chip: str | None = None,
    folder: Path | None = None,
) -> None:
    """Adds all ceilings that are known of a roofline's device: typed ones, its data sheet's, and
    what was measured of it; with a note where its chip is not listed, and on a broken file with
    measurements.

    Args:
        chip: the name of a listed chip, in the place of the device's own.
        folder: of results, as for `find`.

    Raises:
        WorkshopError: `chip` is not listed.
    """
    used = {point.precision for point in roofline.points}
    listed = from_data_sheet(chip or roofline.device or "", used)
    if chip and not listed:
        raise WorkshopError(f"--chip {chip}: not listed; known are {', '.join(chips.names())}")
    measured: list[Ceiling] = []
    if roofline.device:
        measured = find(roofline.device, roofline.threads, folder, roofline.notes)
    roofline.ceilings = [*given, *listed, *roofline.ceilings, *measured]
    name = roofline.device or "an unknown chip"
    if not roofline.ceilings:
        roofline.notes.append(
            f"no ceiling of {name} is known: only what was achieved is shown. "
            "roofline_analysis.py --measure, on that machine, measures them; --chip names "
            "a listed chip"
        )
    elif not listed and not given:
        roofline.notes.append(
            f"no data sheet of {name} is listed: its ceilings are measured ones, which something "
            "faster may exceed"
        )


def _files(folder: Path) -> Iterator[Path]:
    for place in (folder, *sorted(results.DEFAULT_FOLDER.glob("reference/*"))):
        yield from sorted((place / FOLDER).glob("[!.]*.json"))
        yield from records.files_in(place / KERNELS)


def _of_benchmark(path: Path) -> Measurement | None:
    """Ceilings of a kernels' benchmark; None if Triton's interpreter ran it, which measures
    none."""
    timed = (run for run in records.load_runs(path, LabRun) if run.ceiling_gbs)
    return next(map(of_run, timed), None)


def of_run(run: LabRun) -> Measurement:
    """The ceilings that a timed run of a benchmark has measured."""
    rates = run.ceiling_gbs or 0.0, {str(run.options.get("precision")): run.ceiling_tflops or 0.0}
    return Measurement(run.device, run.software, run.created, *rates)

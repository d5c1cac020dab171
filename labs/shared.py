"""Parts that the labs' programs share: flags, torchvision's networks, a study's repeats and end."""

import argparse
import copy
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.flop_counter import FlopCounterMode

from workshop import errors, records, results, tables
from workshop.arguments import count
from workshop.errors import NotOnThisMachine, WorkshopError
from workshop.judge import studies
from workshop.judge.studies import Plan
from workshop.labs import LabRow, LabRun
from workshop.run import timing
from workshop.run.torchvision import make_importable
from workshop.show import lab_table
from workshop.tables import Table

Add = Callable[..., Any]
T = TypeVar("T")


# --- flags ---------------------------------------------------------------------------------------


def new_parser(doc: str | None, one: str, more: str = "") -> argparse.ArgumentParser:
    """The parser of a program, with its docstring.

    Args:
        one: when its exit status is 1.
        more: begins the end of its --help.
    """
    return argparse.ArgumentParser(
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"{more}Exit status: 0 done, 1 {one}, 2 wrong usage,\n77 something is missing on "
        "this machine, 130 interrupted.",
    )


def add_output_dir(add: Add, lab: str) -> None:
    add(
        "--output-dir",
        type=Path,
        default=results.DEFAULT_FOLDER / lab,
        metavar="FOLDER",
        help=f"for result files (default: results/{lab} of this checkout)",
    )


def add_repeats(add: Add) -> None:
    """--repeats and --jobs."""
    add("--repeats", type=count, default=3, metavar="N", help="processes of each (default 3)")
    add(
        "--jobs",
        type=count,
        default=1,
        metavar="N",
        help="processes that prepare in parallel; each is timed alone (default 1)",
    )


def refuse(rules: Mapping[str, object]) -> None:
    """Raises WorkshopError with the first sentence whose value is true: a rule that is broken."""
    for sentence, broken in rules.items():
        if broken:
            raise WorkshopError(sentence)


def compare_settings(flag: str, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Prints in which settings a training differs from the checkpoint that it continues.

    Args:
        flag: `--resume` and the checkpoint.

    Raises:
        WorkshopError: its model or its images, the settings with "model" or "dataset" in their
            names, are others.
    """
    for name, value in here.items():
        there = saved.get(name)
        if there != value and re.match("model|dataset", name):
            raise WorkshopError(f"{flag}: another {name}: {there} there, {value} here")
        if there != value:
            print(
                f"note: {name} is {value}, in the checkpoint {there}: the losses will differ from "
                "those of an uninterrupted training",
                file=sys.stderr,
            )


def record_trace(
    device: torch.device,
    steps: Iterable[object],
    target: Path | None,
    *,
    skipped: int,
    recorded: int,
    shapes: bool = False,
) -> None:
    """Runs steps under torch.profiler, and writes a trace of those after the first `skipped`, the
    last of which warms the profiler up.

    Args:
        steps: each runs when the next one is asked for.
        target: the trace's path; None writes nothing.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it reports each start on stderr
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")

    def save(profiler: profile) -> None:
        if target:
            with results.atomic_path(target) as path:
                profiler.export_chrome_trace(str(path))

    plan = schedule(wait=skipped - 1, warmup=1, active=recorded, repeat=1)
    with profile(
        activities=activities, schedule=plan, on_trace_ready=save, record_shapes=shapes
    ) as profiler:
        for _ in steps:
            profiler.step()


# --- networks ------------------------------------------------------------------------------------


def import_torchvision() -> ModuleType:
    """Raises NotOnThisMachine where torchvision is not installed."""
    if not make_importable():
        raise NotOnThisMachine(
            "torchvision is missing: run `make setup`, or pip install the torchvision that "
            f"belongs to PyTorch {torch.__version__}"
        )
    import torchvision.models

    found: ModuleType = torchvision
    return found


def flops_per_image(model: nn.Module, size: int, *, training: bool = True) -> float:
    """Operations of convolutions and matrix products of a square image, a multiplication and an
    addition as two: forward, or also backward, which has no gradient of the image."""
    shadow = copy.deepcopy(model).to("meta")  # shapes are enough
    counter = FlopCounterMode(display=False)
    with counter:
        output: Tensor = shadow(torch.empty(1, 3, size, size, device="meta"))
        if training:
            output.sum().backward()
    return float(counter.get_total_flops())


def draw_curves(
    title: str,
    history: Sequence[Mapping[str, float]],
    curves: Mapping[str, Sequence[str]],
    target: Path,
) -> None:
    """Writes a PNG with a chart for each entry of `curves`, over the epochs.

    Args:
        history: a line for each epoch, with its number, `epoch`.
        curves: by what an axis shows, the values of a line that are drawn there.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(curves), 4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    epochs = [int(line["epoch"]) for line in history]
    for axes, (label, names) in zip(figure.subplots(1, len(curves)), curves.items(), strict=True):
        for name in names:
            axes.plot(epochs, [line[name] for line in history], marker="o", label=name)
        axes.set(xlabel="epoch", ylabel=label)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        if len(names) > 1:
            axes.legend()
    with results.atomic_path(target) as path:
        figure.savefig(path, format="png")


# --- the repeats ---------------------------------------------------------------------------------


def alternating(
    cases: Iterable[T],
    repeats: int,
    plan: Callable[[T, int], Plan],
    jobs: int,
    alone: Callable[[T, int], bool] = lambda case, repeat: False,
) -> Iterator[LabRun]:
    """The runs of all cases, each as it ends: in every other repeat the last one comes first. A
    case that did not complete is not tried again. Those that are `alone` prepare one at a time."""
    left = list(cases)
    for repeat in range(repeats):
        ordered = left[:: 1 - 2 * (repeat % 2)]
        apart = [case for case in ordered if alone(case, repeat)]
        for chosen, at_once in (([c for c in ordered if c not in apart], jobs), (apart, 1)):
            plans = [plan(case, repeat) for case in chosen]
            for case, run in zip(chosen, studies.in_turns(plans, at_once), strict=True):
                if run.status != "complete":
                    left.remove(case)
                yield run


def epoch_means(times: Sequence[float], epochs: int) -> list[float]:
    """Each epoch's time divided by its steps, of the times of all. The median step would mislead:
    workers deliver in bursts, so that most steps wait for nothing and one waits for all."""
    steps = len(times) // epochs
    return [sum(times[i : i + steps]) / steps for i in range(0, len(times), steps)]


def told(runs: Iterable[LabRun], outcome: Callable[[LabRun], str]) -> tuple[list[LabRun], bool]:
    """All runs, each told in a line when it ends; and whether Ctrl-C has ended them. Raises
    KeyboardInterrupt: no run has ended yet."""
    found: list[LabRun] = []
    try:
        for run in runs:
            found.append(run)
            print(f"{run.subject}, {run.variant}: {said(run, outcome)}", flush=True)
    except KeyboardInterrupt:
        if not found:
            raise
        return found, True
    return found, False


def said(run: LabRun, outcome: Callable[[LabRun], str]) -> str:
    """The outcome of a run, or its failure."""
    return outcome(run) if run.status == "complete" else run.failure


def images_and_gate(run: LabRun) -> str:
    rate = run.units_per_step / timing.median(run.step_ms) * 1e3
    return f"{rate:,.0f} images/s; gate {run.gate.status}"


def ms_and_gate(run: LabRun, step: str) -> str:
    return f"{timing.median(run.step_ms):.3f} ms {step}; gate {run.gate.status}"


def status_of(rows: Iterable[LabRow], interrupted: bool = False) -> int:
    """A study's exit status."""
    if interrupted:
        print("interrupted: the tables hold what was completed", file=sys.stderr)
        return errors.INTERRUPTED
    return errors.ANSWER_IS_NO if any(row.failed for row in rows) else errors.DONE


def show(shown: Sequence[Table], rows: Sequence[LabRow], target: Path) -> None:
    """Prints and writes a study's tables, and says where its results are."""
    tables.print_tables(shown)
    results.write_text(target, tables.markdown(shown) + "\n")
    stored = records.path_in(target.parent, rows[0].first.session)
    print(f"Written: {target}\nResult file: {stored}")
    for alarm in lab_table.alarms(rows):
        print(alarm, file=sys.stderr)

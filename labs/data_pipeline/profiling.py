"""A short profile of a rung, after its timed epochs: where the time of its steps goes."""

import os
from collections.abc import Sequence
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, schedule

from labs.data_pipeline.loop import Loop
from workshop import records, results
from workshop.labs import LabRow, LabRun
from workshop.profilers import advisor, kernel_file, step_pictures, step_time
from workshop.profilers.load import load
from workshop.profilers.runner_files import RUN_FILE
from workshop.profilers.step_time import StepTime

TRACE, PICTURE = "trace.json.gz", "steps.png"
LEAST_STEPS, MOST_STEPS = 6, 48


def profile_rung(loop: Loop, epoch: int, record: LabRun, folder: Path) -> None:
    """Trains a part of an epoch. The folder gets a trace of its later steps, the hot list and a
    picture; the record gets the share of a step of each of step_time.CATEGORIES.

    The first steps get what the workers prepared ahead. Several times as many steps as workers are
    recorded, since batches come in bursts. An epoch of one step has no profile.
    """
    workers = loop.settings.workers
    wanted = min(max(LEAST_STEPS, 3 * workers), MOST_STEPS)
    ahead = 2 + workers * loop.settings.prefetch
    steps = min(len(loop.images) // loop.order.batch_size, ahead + wanted)
    if steps < 2:  # one warms the profiler up
        return
    results.prepare_folder(folder)
    timed_steps, loop.order.steps = loop.order.steps, steps
    _record_trace(loop, epoch, max(1, steps - wanted), folder / TRACE)
    loop.order.steps = timed_steps
    table = load(folder / TRACE)
    kernel_file.write(table, folder)
    mean = step_time.mean(table.step_times)
    shares = {f"{name.lower()}_share": ns / mean.ns for name, ns in mean.parts_ns.items()}
    record.metrics |= {**shares, "tensor_share": mean.tensor_share, "profiled_ms": mean.ns / 1e6}
    step_pictures.draw_steps(folder / TRACE, folder / PICTURE, record.variant)


def _record_trace(loop: Loop, epoch: int, skipped: int, target: Path) -> None:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it reports each start on stderr
    activities = [ProfilerActivity.CPU]
    if loop.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    active = loop.order.steps - skipped
    with (
        results.atomic_path(target) as path,
        profile(
            activities=activities,
            schedule=schedule(wait=skipped - 1, warmup=1, active=active, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        ) as profiler,
    ):
        for _ in loop.epoch(epoch):
            profiler.step()


def advice(folder: Path) -> str:
    """The limit of a rung, in a sentence: its wait for data, if there is one."""
    table = kernel_file.read(folder / kernel_file.JSON_FILE)
    record = records.load_run(folder / RUN_FILE)
    found = advisor.advise(table, record)
    first = next((one for one in found if one.finding == "data"), advisor.headline(found))
    return first.sentence if first else ""


def draw_ladder(rows: Sequence[LabRow], target: Path) -> None:
    """A picture of the mean step of each rung that was profiled. All are of one device."""
    found = ((row.first.variant, mean_step(run)) for row in rows for run in row.runs)
    means = [(name, step) for name, step in found if step]
    title = f"Where a step's time goes: {rows[0].device}"
    step_pictures.compare_pictures(means, target, title)


def mean_step(run: LabRun) -> StepTime | None:
    """As `profile_rung` recorded it."""
    length = run.metrics.get("profiled_ms")
    if run.status != "complete" or not isinstance(length, float):
        return None

    def part(name: str) -> float:
        share = run.metrics[f"{name}_share"]
        assert isinstance(share, (int, float))
        return float(share)

    parts_ns = {name: part(name.lower()) * length * 1e6 for name in step_time.CATEGORIES}
    return StepTime(parts_ns, part("tensor") * parts_ns[step_time.KERNEL])

"""A training from the command line: gate, steps, audit, checkpoints, result file."""

import dataclasses
import fcntl
import functools
import gc
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from labs import group as groups
from labs import shared
from labs.group import Group, of_all
from labs.scale_out import audit, checkpoints, gate
from labs.scale_out import request as requests
from labs.scale_out.checkpoints import Checkpoint
from labs.scale_out.request import Job
from labs.scale_out.strategies import Strategy
from workshop import errors, labs, records, request, results
from workshop.gate import canonical
from workshop.gate.audit import summary
from workshop.judge import lab_record
from workshop.labs import LabRun
from workshop.profilers import kineto
from workshop.profilers.step_time import Communication
from workshop.results import FAIL, NOT_AUDITED, PASS
from workshop.run import flops, markers, presets, startup, trainer
from workshop.run.timing import StepClock, median, spread

HIDDEN = ("--output-dir", "--checkpoints", "--text-file", "--local_rank", "--trace")
VERDICTS = {"pass": PASS, "fail": FAIL, "not run": f"{NOT_AUDITED}: figures unverified"}


def run(job: Job) -> int:
    """Trains; returns the exit status."""
    asked = job.asked
    at_once = dataclasses.replace(asked, batch_size=asked.batch_size // job.parts)
    shards = job.group.size if job.arguments.strategy in ("fsdp", "zero3") else 1
    with groups.member(job.group, asked.device):
        return request.within_memory(at_once, lambda: _prove_and_train(job), shards=shards)


def _prove_and_train(job: Job) -> int:
    asked, arguments, group = job.asked, job.arguments, job.group
    batches, data = request.load_data(asked)
    settings = _settings(job, data)
    start = checkpoints.start(job, settings)
    results.prepare_folder(arguments.output_dir)
    if arguments.trace:
        results.prepare_file(arguments.trace, "--trace")
    record = new_record(job, data["name"], groups.of_first(results.new_session()))
    setting = audit.setting_of(job)
    whole = audit.Round(setting, batches[: asked.schedule.steps], arguments.learning_rate)
    job.turn.check = audit.Check(whole, gate.Gate.of(job))
    request.print_configuration(asked, data)
    request.print_lines({"processes": f"{group.size}, {arguments.strategy}, {_parts(job)}"})
    if start and start.steps >= asked.schedule.steps:
        record.losses, record.status = results.finite(start.losses), "interrupted"
        record.error = "trained by an attempt that ended before it wrote its result: no times"
        print(f"{start.folder.name} has all steps: nothing is left to train")
        return _finish(job, record)
    startup.watch_compilers(torch_compile=asked.compile_mode != "none")
    with alone(job):
        if not arguments.no_gate and not _prove(job, record):
            return _finish(job, record)
        strategy = job.make_strategy(asked)
        initial = canonical.canonical_state(asked.config, arguments.seed)
        strategy.prepare(initial, arguments.learning_rate)
        if start:
            checkpoints.load(start, strategy)
            print(f"resumed after step {start.steps} from {start.folder.name}")
        training = Training(job, strategy, batches, start, settings)
        training.get_ready()
    training.train()
    _record_training(record, training)
    record.audit.why = _why_not_audited(job, start, settings)
    record.error = record.audit.why or None
    trained = None if record.audit.why else audit.record(job, strategy)
    if arguments.trace and group.size > 1:
        record.metrics |= record_trace(training, group, arguments.trace)
    del strategy, training  # V1 needs their memory
    _release_memory()
    if trained:
        print("audit: comparing the steps with V1's in one process ...", flush=True)
        if group.is_first:
            with groups.threads_of_all(group):
                job.turn.answer(functools.partial(audit.show, setting, trained), record)
        record.audit = groups.of_first(record.audit)
    if not arguments.candidate:
        _add_audit(record)
    return _finish(job, record)


def _why_not_audited(job: Job, start: Checkpoint | None, settings: dict[str, Any]) -> str:
    """Why a training can't be compared with V1's; "" if it can."""
    steps, most = job.asked.schedule.steps, audit.MOST_STEPS
    reasons = {
        "--no-gate": job.arguments.no_gate,
        f"{steps:,} steps, and true trainings of more than {most} are far apart": steps > most,
        "resumed with other settings": start and start.settings != settings,
    }
    return next((f"{NOT_AUDITED}: {why}" for why, holds in reasons.items() if holds), "")


def _add_audit(record: LabRun) -> None:
    """Prints the audit's verdict, and takes the run's status from it."""
    found = record.audit
    print("\n  ".join([f"audit: {summary(found)}", *found.failures]))
    record.error = found.why if found.status == "not run" else None
    if found.status == "fail":
        record.status = "audit failed"


def _release_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


@contextmanager
def alone(job: Job) -> Iterator[None]:
    """In a study, one of its groups at a time; they share the folder of --trace.

    A gate fills most of the memory that it finds free: what a group before it needs must be
    allocated by then, and what that group's gate needed be released, in all of its processes.
    """
    if not job.arguments.candidate:
        yield
        return
    folder = os.open(job.arguments.trace.parent, os.O_RDONLY)
    try:
        if job.group.is_first:
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
        _release_memory()  # also after a failed gate, whose process ends only seconds later
        of_all(None)
    finally:
        os.close(folder)


def _prove(job: Job, record: LabRun) -> bool:
    print("gate: comparing with V1 in one process ...", flush=True)
    begin = time.perf_counter()
    passed = gate.passes(job, lambda show: job.turn.prove(show, record))
    record.setup_s["gate"] = time.perf_counter() - begin
    if not job.arguments.candidate:
        record.gate = groups.of_first(record.gate)
        print("\n  ".join([f"gate: {VERDICTS[record.gate.status]}", *record.gate.failures]))
    if not passed:
        record.status = "gate failed"
    return passed


def _settings(job: Job, data: dict[str, str | int]) -> dict[str, Any]:
    """The settings on which the training's losses depend, except for roundings."""
    asked = job.asked
    return {
        "model": asked.version.key,
        **{f"model: {name}": size for name, size in dataclasses.asdict(asked.config).items()},
        "batch_size": asked.batch_size,
        "seq_len": asked.seq_len,
        "learning_rate": job.arguments.learning_rate,
        "seed": job.arguments.seed,
        "precision": asked.precision.name,
        "data": data.get("sha256", data["name"]),
    }


def _parts(job: Job) -> str:
    """The batch of each process, in words."""
    share, parts = job.asked.batch_size // job.group.size, job.arguments.accumulate
    in_parts = f", in {parts} parts" if parts > 1 else ""
    return f"{share} sequence{'s' * (share > 1)} each{in_parts}"


# --- the steps -----------------------------------------------------------------------------------


class Training(trainer.Runner):
    """The steps that are left of a training: those of the warm-up, then the timed ones. It saves a
    checkpoint after every `--save-every` of them and after the last, outside of the steps' times.
    """

    def __init__(
        self,
        job: Job,
        strategy: Strategy,
        batches: Tensor,
        start: Checkpoint | None,
        settings: dict[str, Any],
    ) -> None:
        """`batches` are those of all processes and all steps, (n, 2, B, T) on the host."""
        self.job, self.strategy, self.settings = job, strategy, settings
        self.before = start.losses if start else []
        """Losses of the steps that the checkpoint has."""
        self.first, self.last = len(self.before), job.asked.schedule.steps
        own = job.group.part(batches[self.first : self.last], dim=2).contiguous()
        asked = job.asked
        super().__init__(
            strategy, strategy.optimizer, own, asked.precision, cuda_graph=asked.cuda_graph
        )
        self.warmup = min(asked.schedule.warmup, len(own) - 1)
        self.setup_s: dict[str, float] = {}
        self.step_ms: list[float] = []
        """Times of the timed steps, of the slowest process."""

    def get_ready(self) -> None:
        """Trains the steps of the warm-up."""
        self.precision.set_matmul_mode()
        clock = f"the clock starts after step {self.first + self.warmup}"
        print(f"training up to step {self.last}; {clock} ...", flush=True)
        self.setup_s = trainer.warm_up(self, self.warmup)

    def train(self) -> None:
        """Trains the timed steps, alone on the devices."""
        group, turn = self.job.group, self.job.turn
        if group.is_first:
            turn.wait()
        sent = groups.begin(group, turn)
        if "batches" in sent:
            self.replace_batches(self.warmup, group.part(sent["batches"].long(), dim=2))
        times: list[float] = []
        while self.done < len(self._batches):
            every = self.job.arguments.save_every or self.last
            to_save = every - (self.first + self.done) % every
            clock = StepClock(self.device)
            steps = min(to_save, len(self._batches) - self.done)
            trainer.timed_steps(self, clock, steps, self._show)
            times += clock.durations_ms()
            self._save_if_due()
        self.step_ms = max(of_all(times), key=median)
        turn.end(self.step_ms, {"losses": torch.tensor(self.all_losses())})

    def advance(self) -> None:
        """One step; in the warm-up with its checkpoint, if one is due."""
        super().advance()
        if self.done <= self.warmup:
            self._save_if_due()

    def _save_if_due(self) -> None:
        step, every = self.first + self.done, self.job.arguments.save_every
        if every and (step % every == 0 or step == self.last):
            checkpoints.save(
                self.job.arguments.checkpoints, self.strategy, self.job.group, step,
                self.all_losses(), self.settings,
            )  # fmt: skip

    def all_losses(self) -> list[float]:
        """Losses of all steps since the training's first, each the mean over all processes."""
        return self.before + groups.mean(self.losses()).tolist()

    def once_more(self, range_: markers.Range) -> None:
        """Trains the last batch again, as a timed step does, in a marker range."""
        self.done = len(self._batches) - 1
        self.marked_step(lambda _: self._step(), range_)

    def _show(self, number: int, loss: float, ms: float) -> None:
        """Prints a line for every tenth of the timed steps."""
        step, timed = number - self.warmup, len(self._batches) - self.warmup
        if step in (1, timed) or step % max(1, timed // 10) == 0:
            tokens = self.job.asked.batch_size * self.job.asked.seq_len / ms * 1e3
            print(
                f"step {self.first + number}: loss of rank 0 {loss:.4f}, time {ms:.2f}ms, "
                f"{tokens:,.0f} tokens/s",
                flush=True,
            )


# --- communication --------------------------------------------------------------------------------


WARM_UP, STEPS = 2, 5
"""Steps before the recorded ones, and recorded steps."""


def record_trace(training: Training, group: Group, target: Path) -> dict[str, float]:
    """Profiles some more steps of all processes, whose clock has stopped; writes rank 0's trace.

    Returns:
        `shares` of that trace. Profiling slows the host, which makes these times longer.
    """

    def steps() -> Iterator[int]:
        for done in range(1, WARM_UP + STEPS + 1):
            training.once_more(markers.for_torch_profiler)
            if done == WARM_UP:
                training.wait()  # or kernels of these steps would be recorded as well
            yield done

    own = target if group.is_first else None
    shared.record_trace(training.device, steps(), own, skipped=WARM_UP, recorded=STEPS)
    found = shares(kineto.read_communication(target)) if group.is_first else {}
    return groups.of_first(found)


def shares(steps: list[Communication]) -> dict[str, float]:
    """Over all steps: `communication_share`, `hidden_share` of that, `profiled_ms` a step."""
    whole, ns = (sum(getattr(step, name) for step in steps) for name in ("step_ns", "ns"))
    hidden = sum(step.hidden_ns for step in steps)
    return {
        "communication_share": ns / whole,
        "hidden_share": hidden / ns if ns else 0.0,
        "profiled_ms": whole / len(steps) / 1e6,
    }


# --- the result ----------------------------------------------------------------------------------


def new_record(
    job: Job, data: str | int, session: str, command: Sequence[str] = (), baseline: str = ""
) -> LabRun:
    """The record of a run before it is measured. Trainings of one model and sequence length are
    compared, in tokens per second."""
    asked, arguments, size = job.asked, job.arguments, job.group.size
    preset = arguments.config or presets.default_preset(asked.device.type)
    given = {name: getattr(arguments, name) for name in results.MODEL_SIZES}
    sizes = [f"{name} {size}" for name, size in given.items() if size]
    model = " with ".join([preset, *([" and ".join(sizes)] if sizes else [])])
    record = lab_record.begin(
        asked.device, asked.precision.name, session, HIDDEN, command,
        lab=requests.LAB,
        subject=f"{model}, {asked.seq_len} tokens a sequence, training",
        variant=variant_of(job),
        baseline=baseline,
        unit="tokens",
        units_per_step=asked.batch_size * asked.seq_len,
        options={
            "config": preset,
            "num_layers": asked.config.num_layers,
            "version": asked.version.key,
            "strategy": arguments.strategy,
            "accumulate": arguments.accumulate,
            "precision": asked.precision.name,
            "compile": asked.compile_mode,
            "cuda_graph": asked.cuda_graph,
            "reduce_dtype": arguments.reduce_dtype,
            "learning_rate": arguments.learning_rate,
            "seed": arguments.seed,
            "data": data,
            **asked.switches,
        },
    )  # fmt: skip
    record.flops_per_step = flops.step_flops(asked.config, asked.batch_size, asked.seq_len).total
    record.metrics |= {"processes": size, "sequences": asked.batch_size // size}
    return record


def variant_of(job: Job) -> str:
    """A variant's name: version, strategy, processes, the sequences of each, and how they train."""
    asked, arguments, size = job.asked, job.arguments, job.group.size
    words = [asked.version.key, arguments.strategy, f"{size} process{'es' * (size > 1)}"]
    share = asked.batch_size // size
    words += [f"{share} sequence{'s' * (share > 1)} each"]
    words += [f"{arguments.accumulate} parts"] * (arguments.accumulate > 1)
    words += [asked.precision.name] + ["compiled"] * (asked.compile_mode != "none")
    words += ["gradients in bf16"] * (arguments.reduce_dtype == "bf16")
    return ", ".join([*words, *["graph"] * asked.cuda_graph])


def _record_training(record: LabRun, training: Training) -> None:
    """Records the times of the slowest process and the memory of the one that needs most."""
    record.step_ms = training.step_ms
    record.losses = results.finite(training.all_losses())
    record.metrics["first_step"] = training.first + 1
    record.setup_s |= {"compile": startup.compile_seconds(), **training.setup_s}
    if training.device.type == "cuda":
        of_processes = of_all(training.memory_mb())
        record.memory_mb = max(of_processes, key=lambda parts: float(parts["peak"]))
    record.plausibility = labs.implausible(record, training.job.group.size)


def _finish(job: Job, record: LabRun) -> int:
    if job.group.is_first:
        job.turn.tell(record)
        if not job.turn.judged:
            path = records.add(record, job.arguments.output_dir)
            if record.step_ms:
                _print_summary(record)
            print(f"Result: {path}")
    return errors.ANSWER_IS_NO if record.refused else errors.DONE


def _print_summary(record: LabRun) -> None:
    ms, peak = median(record.step_ms), record.memory_mb.get("peak")
    check = record.audit if record.gate.status == "pass" else record.gate
    print("Summary")
    request.print_lines({
        "speed": f"{record.units_per_step / ms * 1e3:,.0f} tokens/s of all processes",
        "step": f"{ms:.2f} ms (median of {len(record.step_ms)} steps, interquartile range "
                f"{spread(record.step_ms):.1%})",
        "loss": f"{request.first_and_last(record.losses)}, of all processes",
        "memory": f"{peak:,.0f} MB peak a GPU" if peak else "",
        "verdict": VERDICTS[check.status],
    })  # fmt: skip
    for sentence in record.plausibility:
        print(f"  IMPLAUSIBLE: {sentence}")

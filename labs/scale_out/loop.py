"""A training from the command line: gate, steps, audit, checkpoints, result file."""

import argparse
import dataclasses
import fcntl
import functools
import gc
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from labs.scale_out import audit, checkpoints, proof, trace
from labs.scale_out import group as groups
from labs.scale_out import request as requests
from labs.scale_out.checkpoints import Checkpoint
from labs.scale_out.request import Job
from labs.scale_out.strategies import Strategy
from workshop import errors, labs, records, request, results
from workshop.errors import WorkshopError
from workshop.gate import canonical
from workshop.gate.audit import summary
from workshop.judge import lab_record
from workshop.labs import LabRun
from workshop.results import FAIL, NOT_AUDITED, PASS
from workshop.run import flops, markers, presets, startup, trainer
from workshop.run.timing import StepClock, median, spread

_PROGRESS_LINES = 10
HIDDEN = ("--output-dir", "--checkpoints", "--text-file", "--local_rank", "--trace")
VERDICTS = {"pass": PASS, "fail": FAIL, "not run": f"{NOT_AUDITED}: figures unverified"}


def run(arguments: argparse.Namespace) -> int:
    """Trains; returns the exit status."""
    job = requests.check(arguments)
    asked, parts = job.asked, job.group.size * job.accumulate
    at_once = dataclasses.replace(asked, batch_size=asked.batch_size // parts)
    shards = job.group.size if job.strategy in ("fsdp", "zero3") else 1
    with groups.member(job.group, asked.device):
        return request.within_memory(at_once, lambda: _prove_and_train(job), shards=shards)


def _prove_and_train(job: Job) -> int:
    asked, arguments = job.asked, job.arguments
    rate = arguments.learning_rate
    batches, data_record = request.load_data(asked)
    settings = _settings(job, data_record)
    start = _start(job, settings)
    results.prepare_folder(arguments.output_dir)
    if arguments.trace:
        results.prepare_file(arguments.trace, "--trace")
    record = _new_record(job, data_record)
    setting = audit.setting_of(job)
    gate = proof.Gate(setting, job.group.size * job.accumulate, asked.compile_mode != "none")
    whole = audit.Round(setting, batches[: asked.schedule.steps], rate)
    job.turn.check = audit.Check(whole, gate)
    request.print_configuration(asked, data_record)
    request.print_lines([("processes", _processes(job))])
    if start and start.steps >= job.asked.schedule.steps:
        record.losses, record.status = results.finite(start.losses), "interrupted"
        record.error = "trained by an attempt that ended before it wrote its result: no times"
        print(f"{start.folder.name} has all steps: nothing is left to train")
        return _finish(job, record)
    startup.watch_compilers(torch_compile=asked.compile_mode != "none")
    with alone(job):
        if not arguments.no_gate and not _prove(job, record):
            return _finish(job, record)
        strategy = job.make_strategy(asked)
        initial = canonical.canonical_state(asked.config, asked.arguments.seed)
        optimizer = strategy.prepare(initial, rate)
        if start:
            checkpoints.load(start, strategy)
            print(f"resumed after step {start.steps} from {start.folder.name}")
        training = Training(job, strategy, optimizer, batches, start, settings)
        training.get_ready()
    training.train()
    _record_training(job, record, training)
    why_not = _why_not_audited(job, record, start, settings)
    trained = None if why_not else audit.record(job, strategy)
    if arguments.trace and job.group.size > 1:
        record.metrics |= trace.record(training, job.group, arguments.trace)
    del strategy, optimizer, training  # V1 needs their memory
    _release_memory()
    record.audit.why = why_not
    if trained:
        print("audit: comparing the steps with V1's in one process ...", flush=True)
        show = functools.partial(audit.show, setting, trained)
        if job.group.is_first:
            with groups.threads_of_all(job.group):
                job.turn.answer(show, record)
        record.audit = groups.of_first(record.audit)
    if not arguments.candidate:
        _add_audit(record)
    return _finish(job, record)


def _why_not_audited(
    job: Job, record: LabRun, start: Checkpoint | None, settings: dict[str, Any]
) -> str:
    """Why a training can't be compared with V1's; "" if it can."""
    steps, reason = job.asked.schedule.steps, ""
    if job.arguments.no_gate:
        reason = "--no-gate"
    elif steps > audit.MOST_STEPS:
        reason = (
            f"{steps:,} steps, and true trainings of more than {audit.MOST_STEPS} are far apart"
        )
    elif start and start.settings != settings:
        reason = "resumed with other settings"
    return f"{NOT_AUDITED}: {reason}" if reason else ""


def _add_audit(record: LabRun) -> None:
    """Prints the audit's verdict, and takes the run's status from it."""
    found = record.audit
    print("\n  ".join([f"audit: {summary(found)}", *found.failures]))
    if found.status == "fail":
        record.status = "audit failed"
    elif found.status == "not run":
        record.error = found.why


def _release_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


@contextmanager
def alone(job: Job) -> Iterator[None]:
    """In a study: one of its groups at a time, which share the folder of --trace.
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
        groups.of_all(None)
    finally:
        os.close(folder)


def _prove(job: Job, record: LabRun) -> bool:
    print("gate: comparing with V1 in one process ...", flush=True)
    begin = time.perf_counter()
    passed = proof.prove(job, lambda show: job.turn.prove(show, record))
    record.setup_s["gate"] = time.perf_counter() - begin
    if not job.arguments.candidate:
        record.gate = groups.of_first(record.gate)
        print("\n  ".join([f"gate: {VERDICTS[record.gate.status]}", *record.gate.failures]))
    if not passed:
        record.status = "gate failed"
    return passed


def _settings(job: Job, data_record: dict[str, str | int]) -> dict[str, Any]:
    """The settings on which the training's losses depend, except for roundings."""
    asked = job.asked
    return {
        "version": asked.version.key,
        "config": dataclasses.asdict(asked.config),
        "batch_size": asked.batch_size,
        "seq_len": asked.seq_len,
        "learning_rate": job.arguments.learning_rate,
        "seed": job.arguments.seed,
        "precision": asked.precision.name,
        "data": data_record.get("sha256", data_record["name"]),
    }


def _start(job: Job, settings: dict[str, Any]) -> Checkpoint | None:
    """The checkpoint to continue from, the same for all processes; None to start at the first step.

    Raises:
        WorkshopError: there is none, it does not fit, or it has all steps and this is no restart;
            or the folder of a new training has checkpoints of another one.
    """
    arguments, folder = job.arguments, job.checkpoints
    if not (arguments.resume or arguments.save_every):
        return None
    if arguments.save_every:
        results.prepare_folder(folder, "--checkpoints")
    again = groups.of_first(checkpoints.is_again(folder, job.group))
    path = groups.of_first(next(reversed(checkpoints.complete_ones(folder)), None))
    if path is None and arguments.resume and not again:
        raise WorkshopError(f"--resume: there is no complete checkpoint in --checkpoints {folder}")
    if path is not None and not (arguments.resume or again):
        if job.group.is_first:
            checkpoints.refuse(folder)
        raise WorkshopError(
            f"--checkpoints {folder} has {path.name} of another training: go on from it with "
            "--resume, or give another folder"
        )
    start, steps = checkpoints.read(path) if path else None, job.asked.schedule.steps
    if start:
        for sentence in checkpoints.check(start, settings):
            print(sentence, file=sys.stderr)
        if start.steps >= steps and not again:
            raise WorkshopError(
                f"--resume: {start.folder} has {start.steps} steps, and --warmup-steps and "
                f"--num-steps make {steps}: nothing is left to train; raise --num-steps"
            )
    if job.group.is_first and arguments.save_every:
        checkpoints.begin(folder, job.group)
    return start


def _processes(job: Job) -> str:
    share = job.asked.batch_size // job.group.size
    parts = f", in {job.accumulate} parts" if job.accumulate > 1 else ""
    return f"{job.group.size}, {job.strategy}, {share} sequence{'s' * (share > 1)} each{parts}"


# --- the steps -----------------------------------------------------------------------------------


class Training(trainer.Runner):
    """The steps that are left of a training: those of the warm-up, then the timed ones. Saves a
    checkpoint after every `--save-every` of them and after the last, outside of the steps' times.
    """

    def __init__(
        self,
        job: Job,
        strategy: Strategy,
        optimizer: torch.optim.Optimizer,
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
        super().__init__(
            strategy, optimizer, own, job.asked.precision, cuda_graph=job.asked.cuda_graph
        )
        self._clock = StepClock(self.device)
        self._ends: list[int] = []
        """The mark at the end of each step; the mark before it is the step's start."""
        self._marks = self._shown = 0
        self.warmup = min(job.asked.schedule.warmup, self.last - self.first - 1)
        self.warmup_s = 0.0
        self.step_ms: list[float] = []
        """Times of the timed steps, of the slowest process."""

    def get_ready(self) -> None:
        """Trains the steps of the warm-up."""
        self.precision.set_matmul_mode()
        begin, compiled = time.perf_counter(), startup.compile_seconds()
        print(f"warming up for {self.warmup} steps ...", flush=True)
        self._mark()
        self.warm_up(self.warmup)
        self.wait()
        apart = self.capture_s + startup.compile_seconds() - compiled
        self.warmup_s = max(0.0, time.perf_counter() - begin - apart)
        self._shown = self.warmup

    def train(self) -> None:
        """Trains the timed steps, alone on the devices."""
        if self.job.group.is_first:
            self.job.turn.wait()
        sent = groups.begin(self.job.group, self.job.turn)
        if "batches" in sent:
            own = self.job.group.part(sent["batches"].long(), dim=2)
            self.replace_batches(self.warmup, own)
        self._mark()
        while self.done < len(self._batches):
            self.advance()
        self.wait()
        times = [self._clock.between_ms(end - 1, end) for end in self._ends[self.warmup :]]
        self.step_ms = max(groups.of_all(times), key=median)
        self.job.turn.end(self.step_ms, {"losses": torch.tensor(self.all_losses())})
        self._show()

    def advance(self) -> None:
        """One step; after it a checkpoint, if one is due."""
        super().advance()
        self._ends.append(self._mark())
        step, every = self.first + self.done, self.job.arguments.save_every
        if every and (step % every == 0 or step == self.last):
            checkpoints.save(self.job.checkpoints, self.strategy, self.job.group, step,
                             self.all_losses(), self.settings)  # fmt: skip
            self._mark()
        if self.done > self.warmup:
            self._show()

    def all_losses(self) -> list[float]:
        """Losses of all steps since the training's first, each the mean over all processes."""
        return self.before + groups.mean(self.losses()).tolist()

    def once_more(self, range_: markers.Range) -> None:
        """Trains the last batch again, as a timed step does, in a marker range."""
        self.done = len(self._batches) - 1
        self.marked_step(lambda _: self._step(), range_)

    def _mark(self) -> int:
        self._clock.mark()
        self._marks += 1
        return self._marks - 1

    def _show(self) -> None:
        """Prints a line every few steps, for steps that the device has finished; never waits."""
        total = len(self._batches) - self.warmup
        every = max(1, total // _PROGRESS_LINES)
        while self._shown < self.done and self._clock.reached(self._ends[self._shown]):
            end, loss = self._ends[self._shown], self.loss(self._shown)
            self._shown += 1
            step = self._shown - self.warmup
            if step == 1 or step % every == 0 or step == total:
                ms = self._clock.between_ms(end - 1, end)
                tokens = self.job.asked.batch_size * self.job.asked.seq_len / ms * 1e3
                print(
                    f"step {self.first + self._shown:>{len(str(self.last))}}/{self.last}  loss of "
                    f"rank 0 {loss:7.4f}  {tokens:11,.0f} tokens/s  {ms:8.2f} ms",
                    flush=True,
                )


# --- the result ----------------------------------------------------------------------------------


def _new_record(job: Job, data_record: dict[str, str | int]) -> LabRun:
    """The record of a run before it is measured. Trainings of one model and sequence length are
    compared, in tokens per second."""
    asked, arguments, size = job.asked, job.arguments, job.group.size
    share = asked.batch_size // size
    how = (asked.precision.name, asked.compile_mode, asked.cuda_graph)
    variant = variant_of(arguments, asked.version.key, job.strategy, size, share, *how)
    preset = arguments.config or presets.default_preset(asked.device.type)
    record = lab_record.begin(
        asked.device,
        asked.precision.name,
        groups.of_first(results.new_session()),
        HIDDEN,
        lab=requests.LAB,
        subject=subject_of(preset, asked.seq_len, arguments.num_layers),
        variant=variant,
        unit="tokens",
        units_per_step=asked.batch_size * asked.seq_len,
        options={
            "config": preset,
            "num_layers": asked.config.num_layers,
            "version": asked.version.key,
            "strategy": job.strategy,
            "accumulate": job.accumulate,
            "precision": asked.precision.name,
            "compile": asked.compile_mode,
            "cuda_graph": asked.cuda_graph,
            "reduce_dtype": arguments.reduce_dtype,
            "learning_rate": arguments.learning_rate,
            "seed": arguments.seed,
            "data": data_record["name"],
            **asked.switches,
        },
    )
    record.flops_per_step = flops.step_flops(asked.config, asked.batch_size, asked.seq_len).total
    record.metrics |= {"processes": size, "sequences": share}
    return record


def subject_of(preset: str, seq_len: int, layers: int | None) -> str:
    """The model and sequence length of runs that are compared; `layers` if not the preset's."""
    model = f"{preset} with {layers} layer{'s' * (layers > 1)}" if layers else preset
    return f"{model}, {seq_len} tokens a sequence, training"


def variant_of(
    arguments: argparse.Namespace,
    version: str,
    strategy: str,
    size: int,
    share: int,
    precision: str,
    compile_mode: str,
    cuda_graph: bool,
) -> str:
    """A variant's name: version, strategy, processes, the sequences of each, and how they train."""
    words = [version, strategy, f"{size} process{'es' * (size > 1)}"]
    words += [f"{share} sequence{'s' * (share > 1)} each"]
    words += [f"{arguments.accumulate} parts"] * (arguments.accumulate > 1)
    words += [precision] + ["compiled"] * (compile_mode != "none")
    words += ["gradients in bf16"] * (arguments.reduce_dtype == "bf16")
    return ", ".join([*words, *["graph"] * cuda_graph])


def _record_training(job: Job, record: LabRun, training: Training) -> None:
    """Records the times of the slowest process and the memory of the one that needs most."""
    record.step_ms = training.step_ms
    record.losses = results.finite(training.all_losses())
    record.metrics["first_step"] = training.first + 1
    record.setup_s |= {
        "compile": startup.compile_seconds(),
        "capture": training.capture_s,
        "warm_up": training.warmup_s,
    }
    if training.device.type == "cuda":
        of_processes = groups.of_all(training.memory_mb())
        record.memory_mb = max(of_processes, key=lambda parts: float(parts["peak"]))
    record.plausibility = labs.implausible(record, job.group.size)


def _finish(job: Job, record: LabRun) -> int:
    arguments = job.arguments
    if job.group.is_first:
        job.turn.tell(record)
        if not job.turn.judged:
            path = records.add(record, arguments.output_dir)
            if record.step_ms:
                _print_summary(record)
            print(f"Result: {path}")
    return errors.ANSWER_IS_NO if record.refused else errors.DONE


def _print_summary(record: LabRun) -> None:
    ms = median(record.step_ms)
    check = record.audit if record.gate.status == "pass" else record.gate
    rows = [
        ("speed", f"{record.units_per_step / ms * 1e3:,.0f} tokens/s of all processes"),
        ("step", f"{ms:.2f} ms (median of {len(record.step_ms)}, half within "
                 f"{spread(record.step_ms):.1%})"),
        ("loss", f"{request.first_and_last(record.losses)}, of all processes"),
        ("verdict", VERDICTS[check.status]),
    ]  # fmt: skip
    if record.memory_mb:
        rows.insert(3, ("memory", f"{record.memory_mb['peak']:,.0f} MB peak a GPU"))
    print("Summary")
    request.print_lines(rows)
    for sentence in record.plausibility:
        print(f"  {sentence}")

"""Runs of versions, a process each, timed one after the other in alternating order.

A machine that grows hot or busy does so for all of them. Each first run passes the gate before it
is timed. For a process that left no result, because it failed or was not started, a record is
written, so that the result files alone describe the whole session.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from workshop import records, results, versions
from workshop.errors import WorkshopError
from workshop.gate.outcome import Setting
from workshop.judge.judge import VersionProcess, gate_shape, is_v1
from workshop.judge.plans import (
    LEARNING_RATE,
    Asked,
    Options,
    VersionPlan,
    flag,
    record,
    timed_steps,
)
from workshop.judge.process import in_parallel, share_of_compilers
from workshop.judge.references import References, Round
from workshop.progress import about
from workshop.results import RunResult
from workshop.run import data, hardware, interpreter, presets, waiting
from workshop.run.precision import LADDER, get_precision

__all__ = ["Asked", "Options", "Planned", "VersionPlan", "alternate", "plan", "run_plans"]

UNDER_WAY = " ..."
"""Ends a line about a stage that may take long."""
SLOW = (
    "in Triton's interpreter on this machine, which takes about a minute: the gate checks it, and "
    "no time is compared"
)
MOST_AGAIN = 2
"""The number of runs of a comparison that are measured again because other programs disturbed
them. On a machine that is never quiet each would be."""
Say = Callable[[str], object]
Hear = Callable[[VersionPlan, str], object]
"""Takes a line that the process of a plan has printed."""


@dataclass(frozen=True)
class Planned:
    """The processes of a comparison, in the order in which they are timed."""

    plans: Iterable[VersionPlan]
    """A list; or a generator, which may read what earlier plans left in the session's folder."""
    keys: Sequence[str]
    """The versions of all plans."""
    total: int
    """The number of plans, at the most."""
    skipped: list[str] = field(default_factory=list)
    """In sentences, what can't run here."""

    @staticmethod
    def of(plans: Sequence[VersionPlan], skipped: Iterable[str] = ()) -> "Planned":
        return Planned(plans, [plan.version for plan in plans], len(plans), list(skipped))


def alternate(plans: Sequence[VersionPlan], repeats: int) -> list[VersionPlan]:
    """The plans once for each repeat, in alternating directions; interpreted ones only once."""
    return [
        dataclasses.replace(plan, repeat=repeat)
        for repeat in range(repeats)
        for plan in (plans if repeat % 2 == 0 else plans[::-1])
        if repeat == 0 or not plan.interpreted
    ]


def check(asked: Asked) -> tuple[torch.device, list[str], list[str]]:
    """The device, presets and precisions that are asked for. Raises WorkshopError: one of them or
    a count is invalid."""
    limits = (("num_steps", 10**6), ("warmup_steps", 10**6), ("repeats", 1000), ("jobs", 1000))
    for name, most in limits:
        value = getattr(asked, name)
        if value is not None and not 1 <= value <= most:
            bound = "at least 1" if value < 1 else f"at most {most:,}"
            raise WorkshopError(f"{flag(name)} {value}: it must be {bound}")
    device = hardware.get_device(asked.device)
    configs = list(dict.fromkeys(asked.config or [presets.default_preset(device.type)]))
    for config in configs:
        presets.get_preset(config)
    precisions = [get_precision(name, device, LADDER).name for name in asked.precision]
    return device, configs, list(dict.fromkeys(precisions))


def plan(asked: Asked) -> Planned:
    """All processes of a comparison of versions, alternating. Raises WorkshopError: an invalid
    version, preset, precision, device or count."""
    device, configs, precisions = check(asked)
    keys = versions.baseline_first(asked.versions or versions.available())
    slow = {key for key in keys if interpreter.serves(versions.get_version(key), device)}
    plans = []
    for config, name in itertools.product(configs, precisions):
        own = [VersionPlan(key, config, name, interpreted=key in slow) for key in keys]
        plans += alternate(own, asked.repeats)
    return Planned.of(plans)


def load_session(output_dir: Path, session: str) -> list[RunResult]:
    return records.load_runs(records.path_in(output_dir, session), RunResult)


def run_plans(planned: Planned, asked: Asked, session: str) -> tuple[list[RunResult], bool]:
    """Runs the processes and times one after the other; their results, and whether Ctrl-C ended
    them.

    A version that failed at a size is not run there again. A run that other programs disturbed is
    measured again once, up to MOST_AGAIN of them, and both are kept.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    say = functools.partial(console.print, highlight=False, markup=False, soft_wrap=True)
    for line in planned.skipped:
        say(line)
    missing = _announce(planned.keys, asked, say)
    where = TextColumn("{task.fields[where]}")
    what = TextColumn("{task.description}", markup=False)  # lines as the child printed them
    columns = (BarColumn(20), where, TimeElapsedColumn(), what)
    interrupted, pace = False, _Pace(planned)
    several = (
        isinstance(planned.plans, Sequence) and hardware.get_device(asked.device).type == "cpu"
    )
    jobs = asked.jobs or (2 if several else 1)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=planned.total, where=pace.where())

        def hear(plan: VersionPlan, line: str) -> None:
            progress.update(task, description=f"{plan.label}: {line[:70]}")
            if line.endswith(UNDER_WAY) and not console.is_terminal:
                say(f"{pace.where()}: {plan.label}: {line}")

        try:
            with contextlib.closing(_Comparison(session, asked, missing, say, hear)) as under_way:
                for batch in _batches(planned.plans, jobs):
                    pace.begin(batch)
                    pace.add(batch, *under_way.run(batch))
                    progress.update(task, advance=len(batch), where=pace.where())
        except KeyboardInterrupt:
            interrupted = True
    return load_session(asked.output_dir, session), interrupted


class _Pace:
    """Says which run is under way, and how long the rest takes if each is like those before it."""

    def __init__(self, planned: Planned) -> None:
        known = isinstance(planned.plans, Sequence)
        self._labels = [plan.label for plan in planned.plans] if known else []
        self._total, self._done, self._seconds = planned.total, 0, 0.0
        self._at_once = 1
        self._again: dict[str, float] = {}
        """Seconds of another run, by label."""

    def begin(self, batch: Sequence[VersionPlan]) -> None:
        self._at_once = len(batch)

    def add(self, batch: Sequence[VersionPlan], seconds: float, once: float) -> None:
        """Takes the time of runs, and the part that later ones of the same label do not need."""
        self._done += len(batch)
        self._seconds += seconds
        self._again |= dict.fromkeys((p.label for p in batch), (seconds - once) / len(batch))

    def where(self) -> str:
        first = min(self._done + 1, self._total)
        last = min(self._done + self._at_once, self._total)
        number = f"run {first}" if first >= last else f"runs {first} to {last}"
        number += f" of {self._total}"
        if not self._done or self._done == self._total:
            return number
        left = self._labels[self._done :] or [""] * (self._total - self._done)
        mean = self._seconds / self._done
        return f"{number}, about {about(sum(self._again.get(label, mean) for label in left))} left"


def _batches(plans: Iterable[VersionPlan], jobs: int) -> Iterator[list[VersionPlan]]:
    """Batches of up to `jobs` plans; a batch never holds the same version and size twice, as one
    that fails is not run again. With one job each plan is run before the next is asked for."""
    batch: list[VersionPlan] = []
    for plan in plans:
        if plan.label in [other.label for other in batch]:
            yield batch
            batch = []
        batch.append(plan)
        if len(batch) == jobs:
            yield batch
            batch = []
    if batch:
        yield batch


def _announce(keys: Iterable[str], asked: Asked, say: Say) -> dict[str, str]:
    """Why each version can't run here. Prints it, and which versions will be interpreted."""
    device, found = hardware.get_device(asked.device), {}
    for key in dict.fromkeys(keys):
        version = versions.get_version(key)
        if missing := versions.missing(version):
            found[key] = missing
            say(f"{key}: skipped: {missing}")
        elif interpreter.serves(version, device):
            say(f"{key}: {SLOW}")
    return found


def environment(device: torch.device, interpreted: bool = False, beside: int = 0) -> dict[str, str]:
    """The environment of a version's process; `beside` is the number of others that prepare at the
    same time."""
    made = dict(os.environ)
    made.pop(interpreter.VARIABLE, None)  # torch.compile's kernels obey it too
    if device.type == "cpu":
        made |= waiting.short_spin()
    if beside:
        made = share_of_compilers(beside + 1) | made
    if interpreted:
        # Set for the CPU of a machine with a GPU, too. Its products are so small that threads
        # take longer to meet than to multiply.
        made |= {interpreter.VARIABLE: "1", "OMP_NUM_THREADS": "1"}
    return made


class _Comparison:
    """A session under way, and what has failed in it."""

    def __init__(
        self, name: str, asked: Asked, missing: Mapping[str, str], say: Say, hear: Hear
    ) -> None:
        self.name, self.asked, self.missing = name, asked, missing
        self.say, self.hear = say, hear
        self.device = hardware.get_device(asked.device)
        self.failed: set[str] = set()
        self._source = data.Source(asked.data)
        self._references: dict[str, References] = {}
        """By size and precision; no more than one has a process."""
        self._waiting: list[VersionProcess] = []
        """Those whose reference, V1's own run, comes later in their repeat."""
        self._measured_again = 0
        self._once_s = 0.0
        """Seconds that references and gates took, which later runs do not need."""
        self._gates: dict[str, results.Parity] = {}
        """Verdicts of runs that are measured again in the place of the first time."""
        self._path = records.path_in(asked.output_dir, name)
        self._stored: records.Comparison | None = None

    def close(self) -> None:
        for references in self._references.values():
            references.stop()

    def run(self, batch: list[VersionPlan]) -> tuple[float, float]:
        """Runs plans that prepare at the same time; once more those that were disturbed.

        Returns:
            The seconds it took, and those of them that went into references and gates.
        """
        start, self._once_s = time.monotonic(), 0.0
        for plan in batch:
            reason = plan.skipped or self.missing.get(plan.version)
            if reason and plan.label not in self.failed:
                result = record(plan, self.asked, self.name)
                result.status, result.error = "skipped", reason
                self._save(plan, result)
                if plan.skipped:
                    self.say(f"{plan.label}: {reason}")
        again = self._time([plan for plan in batch if plan.label not in self.failed])
        self._time([dataclasses.replace(plan, again=True) for plan in again])
        return time.monotonic() - start, self._once_s

    def _time(self, batch: list[VersionPlan]) -> list[VersionPlan]:
        """Runs and times the plans; those to measure again."""
        started = (one for plan in batch if (one := self._start(plan, len(batch) - 1)))
        with in_parallel(started) as candidates:
            for one in candidates:
                one.measure()
                self._finish(one)
            self._once_s += max((one.gate_s for one in candidates), default=0.0)
        doubted = [one.plan for one in candidates if self._doubts(one)]
        disturbed = [
            plan
            for one in candidates
            if one.result.disturbed and not (plan := one.plan).again and plan not in doubted
        ][: MOST_AGAIN - self._measured_again]
        self._measured_again += len(disturbed)
        return [plan for plan in doubted + disturbed if plan.label not in self.failed]

    @staticmethod
    def _doubts(one: VersionProcess) -> bool:
        """Whether a run's times contradict the judge's for the first time: that may be luck."""
        return bool(one.wrong_times) and not one.plan.again

    def _start(self, plan: VersionPlan, beside: int) -> VersionProcess | None:
        """Starts a plan's process when V1 has answered what it needs; None, recorded and told, if
        V1 could not."""
        result = record(plan, self.asked, self.name, beside)
        result.data = self._source.record
        if plan.again:
            result.gate = self._gates.pop(plan.label, result.gate)
        start_s = time.monotonic()
        try:
            references = self._references_of(plan, result)
            steps = plan.schedule(self.asked).timed
            made = Round(torch.empty(0))
            if steps:
                made = references.round(plan.repeat, plan.again, steps)
        except WorkshopError as error:
            result.status, result.error = "failed", str(error)
            self._save(plan, result)
            self._tell(plan, result.error)
            return None
        finally:
            self._once_s += time.monotonic() - start_s
        if self.device.type == "cuda":  # its memory is the candidate's
            references.release()
        hear = functools.partial(self.hear, plan)
        where = environment(self.device, plan.interpreted, beside)
        return VersionProcess(plan, references, made, self.asked, result, where, hear)

    def _references_of(self, plan: VersionPlan, result: RunResult) -> References:
        """The references of a plan's size and precision, up to those of its gate."""
        config, batch_size, seq_len = plan.model_config()
        precision = get_precision(plan.precision, self.device, LADDER)
        setting = Setting(config, precision, self.device, self.asked.seed, batch_size, seq_len)
        key = repr(setting)
        for other, references in self._references.items():
            if other != key:
                references.release()
        if key not in self._references:
            self.hear(plan, f"V1 answers what the others are compared with{UNDER_WAY}")
            self._references[key] = References(
                setting,
                self._source,
                warmup=timed_steps(self.asked).warmup,
                learning_rate=LEARNING_RATE,
                environment=environment(self.device),
                v1_is_timed=is_v1(plan, result),
            )
        references = self._references[key]
        if plan.repeat == 0 and not plan.again:
            references.prepare_gate(gate_shape(plan, references))
        return references

    def _finish(self, one: VersionProcess) -> None:
        """Judges a candidate, and those that have waited for it; saves and tells."""
        if one.is_reference:
            one.references.lead(one.round, one.course)
        one.judge()
        if self._doubts(one):
            self._gates[one.plan.label] = one.result.gate
            self._tell(one.plan, f"{one.wrong_times[0]}; it is measured again")
        else:
            self._save(one.plan, one.result, one.stderr)
            self._tell(one.plan, one.line())
            if one.awaits_reference:
                self._waiting.append(one)
        if one.is_reference:
            for other in [other for other in self._waiting if other.round is one.round]:
                self._waiting.remove(other)
                other.judge()
                self._save(other.plan, other.result)
                self._tell(other.plan, other.verdict())

    def _save(self, plan: VersionPlan, result: RunResult, stderr: Iterable[str] = ()) -> None:
        if self._stored is None:
            self._stored = records.Comparison.of(result)
        self._stored.add(result, self._path)
        if result.status != "complete":
            self.failed.add(plan.label)
        if result.status == "failed":
            name = re.sub(r"\W+", "_", plan.label)
            log = self._path.with_suffix("") / f"{name}_{plan.repeat + 1}.log"
            results.prepare_folder(log.parent)
            results.write_text(log, "\n".join(stderr) + "\n")

    def _tell(self, plan: VersionPlan, what: str) -> None:
        repeats = 1 if plan.interpreted else self.asked.repeats
        again = " again" if plan.again else ""
        self.say(f"{plan.label}, run {plan.repeat + 1} of {repeats}{again}: {what}")

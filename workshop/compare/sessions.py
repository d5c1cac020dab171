"""Runs of versions, each in a process of its own, timed one after the other in alternating order.

A machine that grows hot or busy does so for all of them. Each first run passes the gate before it
is timed. For a process that left no result, because it failed or was not started, a record is
written, so that the result files alone describe the whole session.
"""

import argparse
import contextlib
import dataclasses
import functools
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from workshop import errors, records, results, versions
from workshop.errors import WorkshopError
from workshop.results import RunResult
from workshop.run import hardware, interpreter, presets, processes, timing, turns, waiting
from workshop.run.precision import LADDER, get_precision

SECONDS_TO_STOP = 120
UNDER_WAY = " ..."
"""Ends a line of a version's process about a stage that may take long."""
SLOW = (
    "in Triton's interpreter on this machine, which takes one to three minutes: one run of a step "
    "or two, to check it; its time is not compared"
)
Options = Mapping[str, str | bool]
Say = Callable[[str], object]
Hear = Callable[["Plan", str], object]
"""Takes a line that the process of a plan has printed."""


@dataclass(frozen=True)
class Plan:
    """One process to run."""

    version: str
    config: str
    precision: str
    repeat: int = 0
    kind: results.Kind = "run"
    interpreted: bool = False
    """Triton's interpreter runs it: one process, which times a single step."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Differences from the preset: `batch_size`, `seq_len` or fields of TinyLlamaConfig."""
    options: Options = field(default_factory=dict)
    """Differences from the version's defaults: `compile`, `cuda_graph` or its switches, as a
    result file records them."""
    name: str = ""
    """Distinguishes it from others of its version, size and precision."""
    left_out: str = ""
    """Why it is not run, but recorded as skipped."""
    prediction: Mapping[str, float] = field(default_factory=dict)
    """The numbers behind `left_out`, for the record's options."""
    again: bool = False
    """Whether it repeats a run that other programs disturbed."""

    @property
    def label(self) -> str:
        name = f", {self.name}" if self.name else ""
        return f"{self.version} {self.config} {self.precision}{name}"

    def shape(self) -> tuple[str, dict[str, int]]:
        """The config's name, "custom" unless it is the preset's, and all sizes."""
        preset = presets.get_preset(self.config)
        own = preset.model() | {"batch_size": preset.batch_size, "seq_len": preset.seq_len}
        sizes = {**own, **self.sizes}
        return (self.config if sizes == own else "custom"), sizes

    def flags(self) -> list[str]:
        """The flags of the version's command line for its size, precision and options."""
        words = ["--config", self.config, "--precision", self.precision]
        for name, size in self.sizes.items():
            words += [_flag(name), str(size)]
        for name, value in self.options.items():
            if isinstance(value, str):
                words += [_flag(name), value]
            elif not value:
                words.append(_flag(f"no_{name}"))
            elif not name.startswith("fuse_"):  # a switch is on unless it is switched off
                words.append(_flag(name))
        return words


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def alternate(plans: list[Plan], repeats: int) -> list[Plan]:
    """The plans once for each repeat, in alternating directions; interpreted ones only once."""
    runs = []
    for repeat in range(repeats):
        order = plans if repeat % 2 == 0 else plans[::-1]
        runs += [
            dataclasses.replace(plan, repeat=repeat)
            for plan in order
            if repeat == 0 or not plan.interpreted
        ]
    return runs


def check(arguments: argparse.Namespace) -> tuple[torch.device, list[str], list[str]]:
    """The device, presets and precisions of compare_versions.py's arguments.

    Raises:
        WorkshopError: one of them, a count or the seed is invalid.
    """
    limits = (("num_steps", 10**6), ("warmup_steps", 10**6), ("repeats", 1000), ("jobs", 1000))
    for name, most in limits:
        value = getattr(arguments, name)
        if not 1 <= value <= most:
            bound = "at least 1" if value < 1 else f"at most {most:,}"
            raise WorkshopError(f"{_flag(name)} {value}: it must be {bound}")
    if not 0 <= arguments.seed < 2**63:
        raise WorkshopError(f"--seed {arguments.seed}: it must lie between 0 and 2^63")
    device = hardware.get_device(arguments.device)
    configs = list(dict.fromkeys(arguments.config or [presets.default_preset(device.type)]))
    for config in configs:
        presets.get_preset(config)
    precisions = [get_precision(name, device, LADDER).name for name in arguments.precision]
    return device, configs, list(dict.fromkeys(precisions))


def run_plans(
    plans: Iterable[Plan],
    arguments: argparse.Namespace,
    session: str,
    *,
    keys: Iterable[str] = (),
    total: int | None = None,
) -> tuple[list[RunResult], bool]:
    """Runs the processes and times one after the other; their results, and whether Ctrl-C ended
    them.

    A version that failed at a size is not run there again. A run that other programs disturbed is
    measured again once, and both are kept.

    Args:
        plans: a list; or a generator, which may read what earlier plans left in the session's
            folder, with its versions as `keys` and its greatest length as `total`.
        arguments: num_steps, warmup_steps, repeats, jobs, device, data, seed, output_dir.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    if isinstance(plans, list):
        keys, total = [plan.version for plan in plans], len(plans)
    console = Console(stderr=True)
    say = functools.partial(console.print, highlight=False, markup=False, soft_wrap=True)
    missing = _announce(keys, arguments, say)
    count = TextColumn("{task.completed}/{task.total}")
    what = TextColumn("{task.description}", markup=False)  # lines as the child printed them
    columns = (BarColumn(20), count, TimeElapsedColumn(), what)
    interrupted = False
    with (
        tempfile.TemporaryDirectory() as audit,
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
    ):
        task = progress.add_task("", total=total)

        def hear(plan: Plan, line: str) -> None:
            progress.update(task, description=f"{plan.label}: {line[:70]}")
            if line.endswith(UNDER_WAY) and not console.is_terminal:
                say(f"{plan.label}: {line}")

        under_way = _Session(session, arguments, Path(audit), missing, say, hear)
        try:
            for batch in _batches(plans, arguments.jobs):
                under_way.run(batch)
                progress.advance(task, len(batch))
        except KeyboardInterrupt:
            interrupted = True
    return load_session(arguments.output_dir, session), interrupted


def _batches(plans: Iterable[Plan], jobs: int) -> Iterator[list[Plan]]:
    """So many plans as `jobs` at a time, but never two of one version and size: what fails is not
    run again. With one job no plan is asked for before the one before it was run."""
    batch: list[Plan] = []
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


def load_session(output_dir: Path, session: str) -> list[RunResult]:
    """The results of a session so far."""
    return records.load_runs(records.path_in(output_dir, session), RunResult)


def _announce(keys: Iterable[str], arguments: argparse.Namespace, say: Say) -> dict[str, str]:
    """What each version needs that is missing here. Prints it, and which will be interpreted."""
    device, found = hardware.get_device(arguments.device), {}
    for key in dict.fromkeys(keys):
        version = versions.get_version(key)
        if missing := versions.missing(version):
            found[key] = missing
            say(f"{key}: skipped: {missing}")
        elif interpreter.serves(version, device):
            say(f"{key}: {SLOW}")
    return found


@contextlib.contextmanager
def _held_back_interrupt() -> Iterator[None]:
    """Delays Ctrl-C and SIGTERM to the end of the block, so that the process that it starts can be
    ended."""
    came: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])


@dataclass
class _Session:
    """A session under way, and what has failed in it."""

    name: str
    arguments: argparse.Namespace
    audit: Path
    """A folder in which its first V1 leaves the audit's reference."""
    missing: Mapping[str, str]
    say: Say
    hear: Hear
    failed: set[str] = field(default_factory=set)

    def run(self, batch: list[Plan]) -> None:
        """Runs plans that prepare at the same time; once more those that were disturbed."""
        for plan in batch:
            self._leave_out(plan)
        disturbed = self._time([plan for plan in batch if plan.label not in self.failed])
        self._time([dataclasses.replace(plan, again=True) for plan in disturbed])

    def _leave_out(self, plan: Plan) -> None:
        reason = plan.left_out or self.missing.get(plan.version)
        if reason and plan.label not in self.failed:
            save_record(plan, self.arguments, self.name, "skipped", reason)
            self.failed.add(plan.label)
            if plan.left_out:
                self.say(f"{plan.label}: {reason}")

    def _time(self, batch: list[Plan]) -> list[Plan]:
        """Those that other programs disturbed."""
        children: list[_Child] = []
        with contextlib.ExitStack() as stack:
            for plan in batch:
                with _held_back_interrupt():
                    children.append(_Child(plan, self, beside=len(batch) - 1))
                    stack.callback(children[-1].interrupt)
            for child in children:
                child.prepare()
            for child in children:
                outcome = child.outcome()
                repeats = 1 if child.plan.interpreted else self.arguments.repeats
                again = " again" if child.plan.again else ""
                which = f"run {child.plan.repeat + 1} of {repeats}{again}"
                self.say(f"{child.plan.label}, {which}: {outcome}")
                if child.failed:
                    self.failed.add(child.plan.label)
        return [child.plan for child in children if child.disturbed]


class _Child:
    """One version's process: its output line by line, and its result."""

    def __init__(self, plan: Plan, session: _Session, beside: int) -> None:
        """`beside` counts the other processes that prepare at the same time."""
        self.plan, self.session, self.beside = plan, session, beside
        self.arguments = session.arguments
        self.failed = self.disturbed = False
        self.result_file = session.audit / f"{results.new_session()}.jsonl"
        self._verdict = ""
        """The last line about the gate or the audit."""
        self._stderr: list[str] = []
        # A session of its own: a Ctrl-C at the terminal reaches us alone, and we pass it on once.
        self._process = subprocess.Popen(
            self._command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            env=self._environment(),
            start_new_session=True,
        )
        self._watch = contextlib.ExitStack()
        self._watch.enter_context(processes.ended_with_us(self._process))
        self._reader = threading.Thread(target=self._read_stderr, daemon=True)
        self._reader.start()

    def _command(self) -> list[str]:
        plan, arguments = self.plan, self.arguments
        # The gate has shown what an interpreted run can show.
        steps = (1, 1) if plan.interpreted else (arguments.num_steps, arguments.warmup_steps)
        values: dict[str, object] = {"num_steps": steps[0], "warmup_steps": steps[1]}
        values |= {n: getattr(arguments, n) for n in ("device", "data", "seed", "output_dir")}
        values |= {"session": self.session.name, "kind": plan.kind, "result_file": self.result_file}
        if not plan.interpreted:  # of which nothing is timed
            values["audit"] = self.session.audit
        command = [sys.executable, str(versions.get_version(plan.version).path), *plan.flags()]
        for name, value in values.items():
            command += [_flag(name), str(value)]
        if self.beside:
            command += ["--wait-turn", str(self.beside)]
        # The first run has passed the gate, with the same code and sizes.
        return [*command, "--no-gate"] if plan.repeat > 0 or plan.again else command

    def _environment(self) -> dict[str, str]:
        # What it prints is read here as UTF-8, in any locale.
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}
        environment.pop(interpreter.VARIABLE, None)  # torch.compile's kernels obey it too
        if hardware.get_device(self.arguments.device).type == "cpu":
            environment |= waiting.short_spin()
        if self.beside:
            environment = turns.share_of_compilers(self.beside + 1) | environment
        if self.plan.interpreted:
            # Set for a CPU that has a GPU beside it, too. Its products are so small that threads
            # take longer to meet than to multiply.
            environment |= {interpreter.VARIABLE: "1", "OMP_NUM_THREADS": "1"}
        return environment

    def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        self._stderr.extend(line.rstrip() for line in self._process.stderr if line.strip())

    def prepare(self) -> None:
        """Waits until the process is ready to be timed, if it is not the only one, or has ended."""
        if self.beside:
            self._hear(until=turns.READY)

    def _hear(self, until: str | None = None) -> None:
        """Passes on what the process prints, up to this line or its end. Other processes are not
        read meanwhile: what each prints is less than a pipe holds."""
        assert self._process.stdout is not None
        for line in filter(None, map(str.strip, self._process.stdout)):
            if line == until:
                return
            if line.startswith(("gate:", "audit:")):
                self._verdict = line
            self.session.hear(self.plan, line)

    def interrupt(self) -> None:
        """Lets the process save what it has and end. By SIGTERM, of which it obeys the first only:
        a batch system may have sent it one, too."""
        processes.stop(self._process, SECONDS_TO_STOP)
        self._watch.close()
        self._take()

    def _take(self) -> RunResult | None:
        """Moves the result that the process left to the comparison's file; None without one."""
        for result in records.load_runs(self.result_file, RunResult):
            result.parent_command = results.own_command()
            records.add(result, self.arguments.output_dir)
            self.result_file.unlink()
            return result
        return None

    def outcome(self) -> str:
        """Gives the process its turn and waits for its end; a line about it. One that left no
        result gets a record of its failure, so that its row can be rebuilt."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.close()
        self._hear()
        self._process.wait()
        self._watch.close()
        self._reader.join(timeout=SECONDS_TO_STOP)
        status = self._process.returncode
        self.failed = status != errors.DONE
        result = self._take()
        if result and status == errors.DONE:
            if result.interpreted:
                return f"{interpreter.NOT_COMPARABLE}; {self._verdict}"
            self.disturbed = result.disturbed
            line = f"{timing.median(result.step_ms):.2f} ms a step; {self._verdict}"
            return f"{line}; {results.DISTURBED}" if result.disturbed else line
        if result and status == errors.ANSWER_IS_NO:
            return self._verdict
        reason = self._reason(status)
        skipped = status == errors.NOT_ON_THIS_MACHINE
        if not skipped:
            name = re.sub(r"\W+", "_", self.plan.label)
            folder = results.prepare_folder(self.arguments.output_dir / "runs" / self.session.name)
            log = folder / f"{name}_{self.plan.repeat + 1}.log"
            results.write_text(log, "\n".join(self._stderr) + "\n")
        ended: results.Status = "skipped" if skipped else "failed"
        save_record(self.plan, self.arguments, self.session.name, ended, reason)
        return f"skipped: {reason}" if skipped else reason

    def _reason(self, status: int) -> str:
        if status == -signal.SIGKILL:
            return "killed from outside (SIGKILL): most likely the machine ran out of memory"
        if status < 0:
            return f"crashed with {signal.Signals(-status).name}"
        last = self._stderr[-1] if self._stderr else "no message"
        own = (errors.ANSWER_IS_NO, errors.WRONG_USAGE, errors.NOT_ON_THIS_MACHINE)
        return last.removeprefix("error: ") if status in own else f"exit {status}: {last}"


def save_record(
    plan: Plan, arguments: argparse.Namespace, session: str, status: results.Status, reason: str
) -> None:
    """Writes a result without numbers, for a process that left none or was not started."""
    name, sizes = plan.shape()
    batch_size, seq_len = sizes.pop("batch_size"), sizes.pop("seq_len")
    config = versions.load(versions.BASELINE).TinyLlamaConfig(**sizes)
    record = RunResult(
        version=plan.version,
        session=session,
        config_name=name,
        config=dataclasses.asdict(config),
        batch_size=batch_size,
        seq_len=seq_len,
        precision=plan.precision,
        warmup_steps=arguments.warmup_steps,
        device=hardware.describe(hardware.get_device(arguments.device)),
        software=results.describe_software(),
        git_commit=results.git_commit(),
        created=results.now(),
        parent_command=results.own_command(),
        kind=plan.kind,
        status=status,
        error=reason,
        options={**plan.options, **plan.prediction},
    )
    records.add(record, arguments.output_dir)

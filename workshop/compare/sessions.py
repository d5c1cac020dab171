"""Runs of versions, each in a process of its own, one after the other in an order that alternates.

A machine that grows hot or busy does so for all of them. Each first run passes the gate before it
is timed. What a process could not write itself, because it failed or was not started, is recorded
for it, so that result files alone tell the whole session.
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

from workshop import errors, results, versions
from workshop.errors import WorkshopError
from workshop.results import RunResult
from workshop.run import hardware, interpreter, presets, processes, timing, waiting

SECONDS_TO_STOP = 120
UNDER_WAY = " ..."
"""How a version's process ends a line about something that has begun and may take long."""
SLOW = (
    "in Triton's interpreter on this machine, which takes one to three minutes: one run of a step "
    "or two, to check it; its time is not compared"
)
Options = Mapping[str, str | bool]
Tell = Callable[[str], object]


@dataclass(frozen=True)
class Plan:
    """One process to run."""

    version: str
    config: str
    precision: str
    repeat: int
    interpreted: bool = False
    """Whether Triton's interpreter runs it: then it is one process that times a single step."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """What differs from the preset: `batch_size`, `seq_len` or fields of TinyLlamaConfig."""
    options: Options = field(default_factory=dict)
    """What differs from the version's defaults: `compile`, `cuda_graph` or its switches, as a
    result file records them."""
    name: str = ""
    """Tells it from others of its version, size and precision."""
    left_out: str = ""
    """Why it is not to be run, but recorded as skipped."""
    told: Mapping[str, float] = field(default_factory=dict)
    """What its record says of that, among its options."""
    again: bool = False
    """Whether it takes the place of a run that other programs disturbed."""

    @property
    def label(self) -> str:
        name = f", {self.name}" if self.name else ""
        return f"{self.version} {self.config} {self.precision}{name}"

    def flags(self) -> list[str]:
        """Of the version's command line, for all that is not the harness's to say."""
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
    """The plans once for each repeat, each time in the other direction; what is interpreted only
    once."""
    runs = []
    for repeat in range(repeats):
        order = plans if repeat % 2 == 0 else plans[::-1]
        runs += [
            dataclasses.replace(plan, repeat=repeat)
            for plan in order
            if repeat == 0 or not plan.interpreted
        ]
    return runs


def check_counts(arguments: argparse.Namespace) -> None:
    """Raises WorkshopError for counts or a seed that can't be."""
    for name, most in (("num_steps", 10**6), ("warmup_steps", 10**6), ("repeats", 1000)):
        value = getattr(arguments, name)
        if value < 1:
            raise WorkshopError(f"{_flag(name)} {value}: it must be at least 1")
        if value > most:
            raise WorkshopError(f"{_flag(name)} {value}: it must be at most {most:,}")
    if not 0 <= arguments.seed < 2**63:
        raise WorkshopError(f"--seed {arguments.seed}: it must lie between 0 and 2^63")


def run_plans(
    plans: Iterable[Plan],
    arguments: argparse.Namespace,
    session: str,
    *,
    keys: Iterable[str] = (),
    total: int | None = None,
) -> tuple[list[RunResult], bool]:
    """Runs the processes one after the other; what they left, and whether Ctrl-C ended them.

    A version that failed at a size is not run there again: it has its record. A run that was
    disturbed is measured again once, and both are kept.

    Args:
        plans: a list; or a generator, which may look at what the plans before left in the
            session's folder. Then `keys`, its versions, and `total`, at most how many it gives,
            are told apart.
        arguments: num_steps, warmup_steps, repeats, device, data, seed, output_dir.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    if isinstance(plans, list):
        keys, total = [plan.version for plan in plans], len(plans)
    console = Console(stderr=True)
    tell = functools.partial(console.print, highlight=False, markup=False, soft_wrap=True)
    lacks = _announce(keys, arguments, tell)
    count = TextColumn("{task.completed}/{task.total}")
    what = TextColumn("{task.description}", markup=False)  # lines as the child printed them
    columns = (BarColumn(20), count, TimeElapsedColumn(), what)
    failed: set[str] = set()
    disturbed: list[Plan] = []
    interrupted = False
    with (
        tempfile.TemporaryDirectory() as audit,
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
    ):
        task = progress.add_task("", total=total)
        for plan in _with_second_tries(plans, disturbed):
            lack = plan.left_out or lacks.get(plan.version)
            if lack and plan.label not in failed:
                save_record(plan, arguments, session, "skipped", lack)
                failed.add(plan.label)
                if plan.left_out:
                    tell(f"{plan.label}: {lack}")
            if plan.label not in failed:
                run: _Child | None = None
                try:
                    with _held_back_interrupt():
                        run = _Child(plan, arguments, session, Path(audit))
                    for line in run.lines():
                        progress.update(task, description=f"{plan.label}: {line[:70]}")
                        if line.endswith(UNDER_WAY) and not console.is_terminal:
                            tell(f"{plan.label}: {line}")
                    outcome = run.outcome()
                except KeyboardInterrupt:
                    if run is not None:
                        run.interrupt()
                    interrupted = True
                    break
                repeats = 1 if plan.interpreted else arguments.repeats
                again = " again" if plan.again else ""
                tell(f"{plan.label}, run {plan.repeat + 1} of {repeats}{again}: {outcome}")
                if run.disturbed:
                    disturbed.append(plan)
                if run.failed:
                    failed.add(plan.label)
            progress.advance(task, 0 if plan.again else 1)
    return load_session(arguments.output_dir, session), interrupted


def _with_second_tries(plans: Iterable[Plan], disturbed: list[Plan]) -> Iterator[Plan]:
    """The plans; each that is in `disturbed` once it has run comes a second time."""
    for plan in plans:
        yield plan
        if plan in disturbed:
            yield dataclasses.replace(plan, again=True)


def load_session(output_dir: Path, session: str) -> list[RunResult]:
    """What a session has left so far."""
    return [results.load(path) for path in sorted(_folder(output_dir, session).glob("*.json"))]


def _folder(output_dir: Path, session: str) -> Path:
    return output_dir / "runs" / session


def _announce(keys: Iterable[str], arguments: argparse.Namespace, tell: Tell) -> dict[str, str]:
    """What each version needs that this machine lacks. Says so, and which will be interpreted."""
    device = hardware.get_device(arguments.device)
    lacks = {}
    for key in dict.fromkeys(keys):
        version = versions.get_version(key)
        lack = versions.missing(version)
        if lack:
            lacks[key] = lack
            tell(f"{key}: skipped: {lack}")
        elif interpreter.serves(version, device):
            tell(f"{key}: {SLOW}")
    return lacks


@contextlib.contextmanager
def _held_back_interrupt() -> Iterator[None]:
    """Lets Ctrl-C and SIGTERM wait until the block is done: what it starts is known by then, and
    can be ended."""
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


class _Child:
    """One version's process: its output line by line, and what it left behind."""

    def __init__(
        self, plan: Plan, arguments: argparse.Namespace, session: str, audit: Path
    ) -> None:
        """`audit` is a folder in which the session's first V1 leaves what others are held to."""
        self.plan, self.arguments, self.session, self.audit = plan, arguments, session, audit
        self.failed = self.disturbed = False
        self._gate = self._audit = self._result = ""
        self._stderr: list[str] = []
        # A session of its own: a Ctrl-C at the terminal reaches us alone, and we pass it on once.
        self._process = subprocess.Popen(
            self._command(),
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
        command = [sys.executable, str(versions.get_version(plan.version).path), *plan.flags()]
        # The gate has shown what an interpreted run can show.
        steps = (1, 1) if plan.interpreted else (arguments.num_steps, arguments.warmup_steps)
        command += ["--num-steps", str(steps[0]), "--warmup-steps", str(steps[1])]
        for name in ("device", "data", "seed", "output_dir"):
            command += [_flag(name), str(getattr(arguments, name))]
        command += ["--session", self.session]
        if not plan.interpreted:  # of which nothing is timed
            command += ["--audit", str(self.audit)]
        # The first run has passed the gate, with the same code and sizes.
        if plan.repeat > 0 or plan.again:
            command.append("--no-gate")
        return command

    def _environment(self) -> dict[str, str]:
        # What it prints is read here: the path of its result may have any letter.
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}
        if hardware.get_device(self.arguments.device).type == "cpu":
            environment |= waiting.short_spin()
        if self.plan.interpreted:
            environment[interpreter.VARIABLE] = "1"  # for a CPU that has a GPU beside it
            # Its products are so small that threads take longer to meet than to multiply.
            environment["OMP_NUM_THREADS"] = "1"
        else:
            environment.pop(interpreter.VARIABLE, None)  # torch.compile's kernels obey it too
        return environment

    def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        self._stderr.extend(line.rstrip() for line in self._process.stderr if line.strip())

    def lines(self) -> Iterator[str]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip():
                self._gate = line.strip() if line.startswith("gate:") else self._gate
                self._audit = line.strip() if line.startswith("audit:") else self._audit
                self._result = line.strip() if line.startswith("Result: ") else self._result
                yield line.strip()
        self._process.wait()
        self._watch.close()

    def interrupt(self) -> None:
        """Asks the process to save what it has and to end; then insists. By SIGTERM, of which it
        takes the first alone: a batch system may have sent it one, too."""
        self._process.terminate()
        try:
            self._process.wait(timeout=SECONDS_TO_STOP)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            self._process.kill()
            self._process.wait()
        self._watch.close()

    def outcome(self) -> str:
        """What to say of the finished process. One that left no result gets a record of its
        failure, so that its row can be rebuilt."""
        self._reader.join(timeout=SECONDS_TO_STOP)
        status = self._process.returncode
        if status == errors.DONE:
            # By its name alone: what was printed of the folder depends on the locale.
            folder = _folder(self.arguments.output_dir, self.session)
            result = results.load(folder / Path(self._result).name)
            if result.interpreted:
                return f"{interpreter.NOT_COMPARABLE}; {self._gate}"
            self.disturbed = result.disturbed
            told = f"{timing.median(result.step_ms):.2f} ms a step; {self._audit}"
            return f"{told}; {results.DISTURBED}" if result.disturbed else told
        self.failed = True
        if status == errors.ANSWER_IS_NO and self._result:
            return self._audit or self._gate
        reason = self._reason(status)
        if status == errors.NOT_ON_THIS_MACHINE:
            save_record(self.plan, self.arguments, self.session, "skipped", reason)
            return f"skipped: {reason}"
        self._keep_log()
        save_record(self.plan, self.arguments, self.session, "failed", reason)
        return reason

    def _keep_log(self) -> None:
        folder = results.prepare_folder(_folder(self.arguments.output_dir, self.session))
        name = re.sub(r"\W+", "_", self.plan.label)
        text = "\n".join(self._stderr) + "\n"
        results.write_text(folder / f"{name}_{self.plan.repeat + 1}.log", text)

    def _reason(self, status: int) -> str:
        if status == -signal.SIGKILL:
            return "killed from outside (SIGKILL): most likely the machine ran out of memory"
        if status < 0:
            return f"crashed with {signal.Signals(-status).name}"
        last = self._stderr[-1] if self._stderr else "no message"
        told = (errors.ANSWER_IS_NO, errors.WRONG_USAGE, errors.NOT_ON_THIS_MACHINE)
        return last.removeprefix("error: ") if status in told else f"exit {status}: {last}"


def save_record(
    plan: Plan,
    arguments: argparse.Namespace,
    session: str,
    status: str,
    reason: str,
) -> None:
    """Writes a result without figures, for a process that could not write its own or that was
    not started."""
    preset = presets.get_preset(plan.config)
    shape = {"batch_size": preset.batch_size, "seq_len": preset.seq_len}
    named = {**preset.model(), **shape}
    sizes = {**named, **plan.sizes}
    model = {name: size for name, size in sizes.items() if name not in shape}
    config = versions.load(versions.BASELINE).TinyLlamaConfig(**model)
    record = RunResult(
        version=plan.version,
        session=session,
        config_name=plan.config if sizes == named else "custom",
        config=dataclasses.asdict(config),
        batch_size=sizes["batch_size"],
        seq_len=sizes["seq_len"],
        precision=plan.precision,
        warmup_steps=arguments.warmup_steps,
        device=hardware.describe(hardware.get_device(arguments.device)),
        software=results.describe_software(),
        git_commit=results.git_commit(),
        created=results.now(),
        status=status,
        error=reason,
        options={**plan.options, **plan.told},
    )
    results.save(record, arguments.output_dir)

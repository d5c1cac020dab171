"""Measures trainings in one and in several processes of this machine: weak and strong scaling.

    python measure.py
    python measure.py --config large --trainings v4:ddp v4:fsdp hf:accelerate-fsdp --jobs 2

Weak scaling: each process has the batch that one has alone. Strong: they share that batch. Each run
is a separate group of processes, through train.py, its gate and its audit; their order
alternates. The bandwidth of the collectives is measured as well.
"""

import argparse
import functools
import os
import re
import secrets
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

if __name__ == "__main__":
    from workshop.needed import import_torch

    import_torch()

import torch

from labs import shared
from labs.group import Group, launcher
from labs.scale_out import audit, collectives, documents, gate, loop, request, strategies
from labs.scale_out.request import Job
from workshop import errors, labs, records, results, versions
from workshop.arguments import argument, count, option, parse, parser_of
from workshop.errors import NotOnThisMachine, WorkshopError
from workshop.judge import studies
from workshop.labs import LabRun
from workshop.run import hardware, interpreter, presets
from workshop.run.data import Source

PROGRAM = Path(__file__).with_name("train.py")
TRAININGS = {
    "cuda": ("v1:ddp", "v2:ddp", "v3:ddp", "v3:ddp:graph", "v4:ddp", "v4:fsdp",
             "v4:fsdp:graph", "v4:zero1", "v4:zero2", "v2:zero3",
             "hf:accelerate-ddp", "hf:accelerate-fsdp"),
    "cpu": ("v2:ddp", "v2:fsdp", "hf:accelerate-ddp"),
}  # fmt: skip
SCALINGS = ("weak", "strong")
SET_HERE = (
    *("--version", "--strategy", "--config", "--batch-size", "--device", "--trace", "--resume"),
    *("--save-every", "--checkpoints"),
)
"""Flags of train.py that each run gets from this program."""


class Training(NamedTuple):
    version: str
    strategy: str
    graph: bool = False
    """Whether several processes capture their step, and with `fsdp` one process, too; with the
    others one process does what the version does."""

    def alone(self) -> "Training":
        """The training in one process, which with `ddp` is the version itself."""
        return self._replace(graph=self.graph and self.strategy == "fsdp")


class Case(NamedTuple):
    """The training of a group of processes; `share` is the batch size of each process."""

    config: str
    training: Training
    size: int
    share: int

    def alone(self) -> tuple[str, Training]:
        """The facts that it shares with the one process that it is compared with."""
        return self.config, self.training.alone()


@dataclass(frozen=True)
class Study:
    device: torch.device
    session: str
    folder: Path
    scratch: Path
    flags: list[str]
    """For train.py."""
    rounds: dict[str, dict[int, audit.Round]] = field(default_factory=dict)
    """By setting and steps, then by repeat."""

    def command(self, case: Case) -> list[str]:
        (version, strategy, graph), batch_size = case.training, case.size * case.share
        words = ["--cuda-graph"] * graph + ["--version", version, "--strategy", strategy]
        words += ["--config", case.config, "--batch-size", str(batch_size)]
        return [str(PROGRAM), *self.flags, *words, "--device", self.device.type]

    def job(self, case: Case) -> Job:
        """A group's job as the judge knows it, without the version's code. Raises NotOnThisMachine:
        it can't run here."""
        version, strategy, _ = case.training
        errors.require(*strategies.packages(strategy))
        if problem := versions.missing(versions.get_version(version)):
            raise NotOnThisMachine(problem)
        arguments = parse(request.build_parser(), self.command(case)[1:])
        group = Group(size=case.size, local_size=case.size)
        return request.check(arguments, group, versions.load(versions.BASELINE))


@dataclass
class Flags:
    """The flags that choose the runs."""

    flags: list[str] = argument("of train.py", nargs="*", metavar="FLAG")
    config: list[str] | None = option(
        f"{', '.join(presets.PRESETS)} (default: medium large, CPU tiny)",
        choices=presets.PRESETS,
        metavar="PRESET",
    )
    trainings: list[str] | None = option(
        "as train.py has them; v4:ddp:graph captures the step of several processes, too, "
        "v4:fsdp:graph that of one and of several "
        f"(default: {' '.join(TRAININGS['cuda'])}, CPU {' '.join(TRAININGS['cpu'])})",
        metavar="VERSION:STRATEGY[:graph]",
    )
    processes: list[int] | None = option(
        "numbers of processes; 1 is always measured (default: 1 2 4 ... up to the GPUs of this "
        "machine, CPU 1 2)",
        type=count,
        metavar="N",
    )
    scaling: list[str] = option("default: both", [*SCALINGS], choices=SCALINGS)
    batch_size: int | None = option(
        "sequences of one process alone (default: the preset's)", type=count, metavar="N"
    )
    collectives: bool = option(
        "measure their bandwidth", True, action=argparse.BooleanOptionalAction
    )
    device: str = option("auto, cpu or cuda (default auto: GPU if any)", "auto")
    session: str | None = option(
        "add to this study, a file below runs/ of --output-dir; its runs are compared with each "
        "other, so stay on one machine (default: a new one)",
        metavar="NAME",
    )


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of(
        Flags,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Flags after -- go to train.py, for all trainings. Exit status: 0 done, 1 a gate "
        "or a training failed,\n2 wrong usage, 77 something is missing on this machine, 130 "
        "interrupted.",
    )
    shared.add_repeats(parser.add_argument)
    shared.add_output_dir(parser.add_argument, request.LAB)
    return parser


def training(word: str) -> Training:
    """Reads VERSION:STRATEGY, and :graph after a strategy that can be captured. Raises
    WorkshopError: the word has another form, or names something unknown."""
    found = re.fullmatch(r"(\w+):([\w-]+)(:graph)?", word)
    version, strategy, graph = found.groups() if found else ("", "", None)
    possible = strategies.CAPTURED if graph else strategies.NAMES
    if version not in versions.ALL or strategy not in possible:
        raise WorkshopError(
            f"--trainings: {word!r} is not VERSION:STRATEGY, such as v2:ddp or v4:ddp:graph"
        )
    return Training(version, strategy, bool(graph))


def main(argv: Sequence[str] | None = None) -> int:
    """Measures from the command line; returns the exit status."""
    arguments = parse(build_parser(), argv)
    return errors.exit_status(lambda: measure(arguments), interrupted="interrupted")


def measure(arguments: argparse.Namespace) -> int:
    errors.require("rich")
    device = hardware.get_device(arguments.device)
    sizes = _sizes(arguments.processes, device)
    todo = cases(arguments, device, sizes)
    for word in arguments.flags:
        if (flag := word.partition("=")[0]) in SET_HERE:
            raise WorkshopError(
                f"{flag} after --: measure.py sets it for each run; measure.py --help has the "
                "flags that choose the runs"
            )
    if device.type == "cpu":  # V3 is interpreted there, which its module would ask for
        os.environ.setdefault(interpreter.VARIABLE, "1")
    folder = results.prepare_folder(arguments.output_dir)
    session = arguments.session or results.new_session()
    stored = records.path_in(folder, session)
    if arguments.session and not stored.exists():
        raise WorkshopError(f"--session {session}: there is no {stored}")
    with tempfile.TemporaryDirectory() as scratch:
        study = Study(device, session, folder, Path(scratch), arguments.flags)
        measured = _runs(arguments, study, todo, sizes)
        _, interrupted = shared.told(measured, lambda run: shared.ms_and_gate(run, "a step"))
    runs = records.load_runs(stored, LabRun)  # with those of earlier commands
    rows = [row for group in labs.newest(runs) for row in group]
    shared.show(documents.tables_of(rows), rows, folder / "scaling.md")
    return shared.status_of(rows, interrupted)


def _sizes(asked: list[int] | None, device: torch.device) -> list[int]:
    there = torch.cuda.device_count() if device.type == "cuda" else 2
    if asked and device.type == "cuda" and max(asked) > there:
        raise NotOnThisMachine(f"--processes {max(asked)}: GPUs of this machine: {there}")
    return sorted({1, *(asked or (2**i for i in range(there.bit_length())))})


def cases(arguments: argparse.Namespace, device: torch.device, sizes: Sequence[int]) -> list[Case]:
    """All cases; one process comes before those that are compared with it. Strong scaling is left
    out, with a note, where the processes can't share a preset's batch. Raises WorkshopError: a
    training is unknown, or the processes can't share --batch-size."""
    configs = arguments.config or (["tiny"] if device.type == "cpu" else ["medium", "large"])
    found, notes = dict[Case, None](), dict[str, None]()
    for config in configs:
        alone = arguments.batch_size or presets.get_preset(config).batch_size
        for one in map(training, arguments.trainings or TRAININGS[device.type]):
            for size in sizes:
                shares = {"weak": alone, "strong": alone // size}
                names = [*arguments.scaling] if size > 1 else ["weak"]
                if "strong" in names and alone % size:
                    problem = f"{size} processes can't share {alone} sequences"
                    if arguments.batch_size or names == ["strong"]:
                        raise WorkshopError(
                            f"--batch-size: {problem}; give another, or --scaling weak"
                        )
                    notes[f"note: {config}: {problem}; strong scaling is left out"] = None
                    names.remove("strong")
                own = one if size > 1 else one.alone()
                found |= {Case(config, own, size, shares[name]): None for name in names}
    if notes:
        print("\n".join(notes))
    return list(found)


def possible(study: Study, todo: Sequence[Case]) -> dict[Case, Job]:
    """The cases that this machine can run; a note for each training that it can't."""
    found, notes = dict[Case, Job](), dict[str, None]()
    for case in todo:
        try:
            found[case] = study.job(case)
        except NotOnThisMachine as error:
            version, strategy, graph = case.training
            name = f"{version}:{strategy}{':graph' * graph}"
            notes[f"note: {name} is skipped: {error}"] = None
    if notes:
        print("\n".join(notes))
    return found


def _runs(
    arguments: argparse.Namespace, study: Study, todo: Sequence[Case], sizes: Sequence[int]
) -> Iterator[LabRun]:
    """Yields each run when it ends; a case that did not complete is not repeated."""
    jobs = possible(study, todo)
    if not jobs:
        raise NotOnThisMachine("none of --trainings can run on this machine")
    print(f"cases: {len(jobs)}, runs of each: {arguments.repeats}", flush=True)
    alone = {case.alone(): loop.variant_of(job) for case, job in jobs.items() if case.size == 1}
    if arguments.collectives:
        plans = [_plan_collectives(study, n) for n in sizes if n > 1]
        yield from studies.in_turns(plans * arguments.repeats, 1)
    asked = next(iter(jobs.values())).arguments
    source = Source(asked.data, asked.text_file)

    def plan(case: Case, repeat: int) -> studies.Plan:
        return _plan(study, case, jobs[case], source, repeat, alone[case.alone()])

    yield from shared.alternating(jobs, arguments.repeats, plan, arguments.jobs)


def _plan(
    study: Study, case: Case, job: Job, source: Source, repeat: int, baseline: str
) -> studies.Plan:
    trace = study.scratch / f"{results.new_session()}.json.gz"
    command = [*study.command(case), "--trace", str(trace)]
    planned = loop.new_record(job, source.record["name"], study.session, command, baseline)
    # accelerate shards nothing in a process without a launcher.
    launched = case.size > 1 or case.training.strategy == "accelerate-fsdp"
    check = _check(study, job, source, repeat)
    words = [*launcher(case.size if launched else 0), *command]
    return studies.Plan(words, [planned], study.folder, check=check)


def _check(study: Study, job: Job, source: Source, repeat: int) -> audit.Check:
    """Trainings of a repeat with the same model and batch are compared with one of V1."""
    setting, steps = audit.setting_of(job), job.asked.schedule
    rounds = study.rounds.setdefault(repr((setting, steps)), {})
    if repeat not in rounds:
        draw = functools.partial(
            source.draw, steps=steps.batches, batch_size=setting.batch_size,
            seq_len=setting.seq_len, vocab_size=setting.config.vocab_size,
        )  # fmt: skip
        known, timed = draw(seed=setting.seed), draw(seed=secrets.randbits(62))
        batches = torch.cat((known[: steps.warmup], timed[: steps.timed]))
        rate = job.arguments.learning_rate
        rounds[repeat] = audit.Round(setting, batches, rate, rounds.get(0))
    before = None if job.arguments.no_gate else gate.Gate.of(job)
    return audit.Check(rounds[repeat], before, steps.warmup)


def _plan_collectives(study: Study, size: int) -> studies.Plan:
    command = [collectives.__file__, "--device", study.device.type]
    planned = collectives.new_records(study.device, study.session, size, command)
    return studies.Plan([*launcher(size), *command], planned, study.folder)


if __name__ == "__main__":
    sys.exit(main())

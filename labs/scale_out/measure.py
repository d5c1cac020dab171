"""Measures trainings in one and in several processes of this machine: weak and strong scaling.

    python measure.py
    python measure.py --config large --trainings v4:ddp v4:fsdp hf:accelerate-fsdp --jobs 2

Weak scaling: each process has the batch that one has alone. Strong: they share that batch. Each run
is a group of processes of its own, through train.py, its gate and its audit; their order
alternates. The bandwidth of the collectives is measured as well.
"""

import argparse
import dataclasses
import functools
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
from labs.scale_out import audit, collectives, loop, proof, request, scaling, strategies
from workshop import errors, labs, records, results, versions
from workshop.arguments import count, parse
from workshop.errors import NotOnThisMachine, WorkshopError
from workshop.gate.parity import Setting
from workshop.judge import lab_record, studies
from workshop.labs import LabRun
from workshop.request import execution, schedule
from workshop.run import hardware, interpreter, presets
from workshop.run.data import Source
from workshop.run.precision import get_precision

PROGRAM = Path(__file__).with_name("train.py")
TRAININGS = {
    "cuda": ("v1:ddp", "v2:ddp", "v3:ddp", "v3:ddp:graph", "v4:ddp", "v4:fsdp",
             "v4:fsdp:graph", "v4:zero1", "v4:zero2", "v2:zero3",
             "hf:accelerate-ddp", "hf:accelerate-fsdp"),
    "cpu": ("v2:ddp", "v2:fsdp", "hf:accelerate-ddp"),
}  # fmt: skip
SCALINGS = ("weak", "strong")
SET_HERE = (
    *("version", "strategy", "config", "batch_size", "device", "trace", "save_every", "resume"),
    "checkpoints",
)
"""Flags of train.py that each run gets from this program."""


class Training(NamedTuple):
    version: str
    strategy: str
    graph: bool = False
    """Whether several processes capture their step, and with `fsdp` one process, too; with the
    others one process does what the version does."""


class Case(NamedTuple):
    """The training of a group of processes; `share` is the batch size of each process."""

    config: str
    training: Training
    size: int
    share: int


@dataclass(frozen=True)
class Study:
    device: torch.device
    session: str
    folder: Path
    scratch: Path
    flags: list[str]
    asked: argparse.Namespace
    """`flags`, parsed."""
    source: Source
    """The text that batches are cut from."""
    rounds: dict[str, dict[int, audit.Round]] = field(default_factory=dict)
    """By setting and steps, then by repeat."""


def build_parser() -> argparse.ArgumentParser:
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Flags after -- go to train.py, for all trainings. Exit status: 0 done, 1 a gate "
        "or a training failed,\n2 wrong usage, 77 something is missing on this machine, 130 "
        "interrupted.",
    )
    add = parser.add_argument
    number = functools.partial(add, type=count, metavar="N")
    add(
        "--config",
        nargs="+",
        choices=presets.PRESETS,
        metavar="PRESET",
        help=f"{', '.join(presets.PRESETS)} (default: medium large, CPU tiny)",
    )
    add(
        "--trainings",
        nargs="+",
        metavar="VERSION:STRATEGY[:graph]",
        help="as train.py has them; v4:ddp:graph captures the step of several processes, too, "
        "v4:fsdp:graph that of one and of several "
        f"(default: {' '.join(TRAININGS['cuda'])}, CPU {' '.join(TRAININGS['cpu'])})",
    )
    number(
        "--processes",
        nargs="+",
        help="numbers of processes; 1 is always measured (default: 1 2 4 ... up to the GPUs of "
        "this machine, CPU 1 2)",
    )
    add("--scaling", nargs="+", choices=SCALINGS, default=SCALINGS, help="default: both")
    number("--batch-size", help="sequences of one process alone (default: the preset's)")
    shared.add_repeats(add)
    add(
        "--collectives",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure their bandwidth (default: yes)",
    )
    add("--device", default="auto", help="auto, cpu or cuda (default auto: GPU if any)")
    shared.add_output_dir(add, request.LAB)
    add(
        "--session",
        metavar="NAME",
        help="add to this study, a folder below runs/ of --output-dir; its runs are compared with "
        "each other, so stay on one machine (default: a new one)",
    )
    add("flags", nargs="*", metavar="FLAG", help="of train.py")
    return parser


def training(word: str) -> Training:
    """Reads VERSION:STRATEGY, and :graph after a strategy that can be captured.

    Raises:
        WorkshopError: the word has another form, or names something unknown.
    """
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
    asked = _parse_flags(arguments.flags)
    folder = results.prepare_folder(arguments.output_dir)
    session = arguments.session or results.new_session()
    stored = records.path_in(folder, session)
    if arguments.session and not stored.exists():
        raise WorkshopError(f"--session {session}: there is no {stored}")
    with tempfile.TemporaryDirectory() as scratch:
        source = Source(asked.data, asked.text_file)
        study = Study(device, session, folder, Path(scratch), arguments.flags, asked, source)
        print(f"cases: {len(todo)}, runs of each: {arguments.repeats}", flush=True)
        measured = _runs(arguments, study, todo)
        _, interrupted = shared.told(measured, lambda run: shared.ms_and_gate(run, "a step"))
    runs = records.load_runs(stored, LabRun)  # with those of earlier commands
    rows = [row for group in labs.newest(runs) for row in group]
    shared.show(scaling.tables_of(rows), rows, folder / "scaling.md")
    return shared.status_of(rows, interrupted)


def _parse_flags(flags: Sequence[str]) -> argparse.Namespace:
    """Reads train.py's flags.

    Raises:
        WorkshopError: one of them is in SET_HERE, and would have no effect.
    """
    parser = request.build_parser()
    parser.set_defaults(**dict.fromkeys(SET_HERE))
    asked = parse(parser, flags)
    for name in SET_HERE:
        if getattr(asked, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise WorkshopError(
                f"{flag} after --: measure.py sets it for each run; measure.py --help has the "
                "flags that choose the runs"
            )
    return asked


def _sizes(asked: list[int] | None, device: torch.device) -> list[int]:
    there = torch.cuda.device_count() if device.type == "cuda" else 2
    if asked and device.type == "cuda" and max(asked) > there:
        raise NotOnThisMachine(f"--processes {max(asked)}: GPUs of this machine: {there}")
    return sorted({1, *(asked or (2**i for i in range(there.bit_length())))})


def cases(arguments: argparse.Namespace, device: torch.device, sizes: Sequence[int]) -> list[Case]:
    """All cases; one process comes before those that are compared with it. Strong scaling is left
    out, with a note, where the processes can't share a preset's batch.

    Raises:
        WorkshopError: a training is unknown, or the processes can't share --batch-size.
    """
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
                own = one if size > 1 else _alone(one)
                found |= {Case(config, own, size, shares[name]): None for name in names}
    if notes:
        print("\n".join(notes))
    return list(found)


def _alone(training: Training) -> Training:
    """The training in one process, which with `ddp` is the version itself."""
    return training._replace(graph=training.graph and training.strategy == "fsdp")


def _runs(arguments: argparse.Namespace, study: Study, left: list[Case]) -> Iterator[LabRun]:
    """Yields each run when it ends; a case that did not complete is not repeated."""
    sizes = sorted({case.size for case in left} - {1})
    alone = {_of(case): _variant(study, case) for case in left if case.size == 1}
    for case in [*left]:
        if reason := missing(case.training, study.device):
            left.remove(case)
            yield _plan(study, case, 0).skipped(reason)
    if arguments.collectives:
        plans = [_plan_collectives(study, n) for _ in range(arguments.repeats) for n in sizes]
        yield from studies.in_turns(plans, 1)

    def plan(case: Case, repeat: int) -> studies.Plan:
        return _plan(study, case, repeat, alone[_of(case)])

    yield from shared.alternating(left, arguments.repeats, plan, arguments.jobs)


def _of(case: Case) -> tuple[str, Training]:
    """The facts that a case shares with the one process that it is compared with."""
    return case.config, _alone(case.training)


def missing(training: Training, device: torch.device) -> str:
    """Why a training can't run here; "" if no reason is known."""
    if training.graph and device.type != "cuda":
        return "a graph needs a GPU"
    try:
        errors.require(*strategies.packages(training.strategy))
    except NotOnThisMachine as error:
        return str(error)
    version = versions.missing(versions.get_version(training.version))
    return version or strategies.missing(training.strategy, device, training.graph) or ""


def _variant(study: Study, case: Case) -> str:
    asked = study.asked
    return loop.variant_of(
        asked, case.training.version, case.training.strategy, case.size, case.share,
        get_precision(asked.precision, study.device).name, *_execution(study, case),
    )  # fmt: skip


def _execution(study: Study, case: Case) -> tuple[str, bool]:
    """The mode of torch.compile, and whether the step is captured."""
    version, strategy, graph = case.training
    alone = strategy == "ddp" and case.size == 1
    compile_mode = study.asked.compile or ("none" if strategy == "zero3" else None)
    return execution(
        versions.get_version(version), compile_mode, graph or (None if alone else False),
        study.device, False, notify=lambda note: None,
    )  # fmt: skip


def _plan(study: Study, case: Case, repeat: int, baseline: str = "") -> studies.Plan:
    (version, strategy, graph), size = case.training, case.size
    seq_len = study.asked.seq_len or presets.get_preset(case.config).seq_len
    flags = {
        "--version": version, "--strategy": strategy, "--config": case.config,
        "--batch-size": size * case.share, "--device": study.device.type,
        "--trace": study.scratch / f"{results.new_session()}.json.gz",
    }  # fmt: skip
    if strategy == "zero3" and not study.asked.compile:
        flags["--compile"] = "none"
    words = [*study.flags, *["--cuda-graph"] * graph, *(str(x) for y in flags.items() for x in y)]
    command = [str(PROGRAM), *words]
    precision = get_precision(study.asked.precision, study.device).name
    _, captured = _execution(study, case)
    planned = lab_record.begin(
        study.device, precision, study.session, loop.HIDDEN, command,
        lab=request.LAB,
        subject=loop.subject_of(case.config, seq_len, study.asked.num_layers),
        variant=_variant(study, case),
        baseline=baseline,
        unit="tokens",
        units_per_step=size * case.share * seq_len,
        options={"config": case.config, "version": version, "strategy": strategy,
                 "precision": precision, "cuda_graph": captured},
        metrics={"processes": size, "sequences": case.share},
    )  # fmt: skip
    # accelerate shards nothing in a process without a launcher.
    launched = size > 1 or strategy == "accelerate-fsdp"
    return studies.Plan(
        [*launcher(size if launched else 0), *command], [planned], study.folder,
        check=_check(study, case, repeat),
    )  # fmt: skip


def _check(study: Study, case: Case, repeat: int) -> audit.Check:
    """Trainings of a repeat with the same model and batch are compared with one of V1."""
    asked, preset = study.asked, presets.get_preset(case.config)
    version = versions.get_version(case.training.version)
    config = versions.load(versions.BASELINE).TinyLlamaConfig(**preset.model())
    if asked.num_layers:
        config = dataclasses.replace(config, num_layers=asked.num_layers)
    setting = Setting(
        config, get_precision(asked.precision, study.device), study.device, asked.seed,
        case.size * case.share, asked.seq_len or preset.seq_len,
    )  # fmt: skip
    interpreted = interpreter.serves(version, study.device)
    steps = schedule(asked.warmup_steps, asked.num_steps, interpreted)
    rounds = study.rounds.setdefault(repr((setting, steps)), {})
    if repeat not in rounds:
        draw = functools.partial(
            study.source.draw, steps=steps.batches, batch_size=setting.batch_size,
            seq_len=setting.seq_len, vocab_size=config.vocab_size,
        )  # fmt: skip
        known, timed = draw(seed=setting.seed), draw(seed=secrets.randbits(62))
        batches = torch.cat((known[: steps.warmup], timed[: steps.timed]))
        rounds[repeat] = audit.Round(setting, batches, asked.learning_rate, rounds.get(0))
    compile_mode, _ = _execution(study, case)
    gate = proof.Gate(setting, case.size * asked.accumulate, compile_mode != "none")
    return audit.Check(rounds[repeat], None if asked.no_gate else gate, steps.warmup)


def launcher(size: int) -> list[str]:
    """The command that starts `size` processes; 0 is one process without a launcher."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    return [sys.executable, *(torchrun if size else ())]


def _plan_collectives(study: Study, size: int) -> studies.Plan:
    command = [collectives.__file__, "--device", study.device.type]
    planned = collectives.new_records(study.device, study.session, size, command)
    return studies.Plan([*launcher(size), *command], planned, study.folder)


if __name__ == "__main__":
    sys.exit(main())

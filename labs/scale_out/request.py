"""The command line of a training in several processes, and its checks."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from labs import shared
from labs.group import Group, device_name, find_group
from labs.scale_out import strategies
from workshop import errors, request, results, versions
from workshop.arguments import add_options, count, option, parse
from workshop.errors import NotOnThisMachine
from workshop.judge.turn import Turn

LAB = "scale_out"
FOLDER = results.DEFAULT_FOLDER / LAB
PEER = "hf"
"""The version that the peers' strategies train."""
DESCRIPTION = """\
Trains a version of Tiny-LLaMA in several processes, after showing that they train the model
that V1 trains in one. --batch-size counts the sequences of all processes together.

    torchrun --nproc-per-node 2 train.py --version v2 --strategy ddp
    torchrun --nproc-per-node 2 train.py --version v4 --strategy fsdp --save-every 10
    deepspeed --num_gpus 2 train.py --version v2 --strategy zero2
"""
EXIT_STATUS = """\
Exit status of each process: 0 done, 1 gate or audit failed, memory ran out or another process
ended, 2 wrong usage, 77 something is missing on this machine, 130 interrupted."""


@dataclass(frozen=True)
class Job:
    """A training whose flags have been checked, as one of its processes sees it."""

    asked: request.Request
    """The version's own request; the batch size is that of all processes together."""
    group: Group
    turn: Turn

    @property
    def arguments(self) -> argparse.Namespace:
        return self.asked.arguments

    @property
    def parts(self) -> int:
        """The parts of a batch, each of which passes through the model at once."""
        return self.group.size * int(self.arguments.accumulate)

    def make_strategy(self, asked: request.Request) -> strategies.Strategy:
        """The job's strategy for a request, its own or another one."""
        reduce_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[self.arguments.reduce_dtype]
        name, accumulate = self.arguments.strategy, self.arguments.accumulate
        return strategies.make(name, asked, accumulate, self.group.size, reduce_dtype)


@dataclass
class Flags:
    """The flags that a version's own program does not have."""

    version: str = option(
        f"of the ladder; {PEER} is Hugging Face's Llama, for the strategies of accelerate",
        "v2",
        choices=[*versions.available(), PEER],
    )
    strategy: str = option(
        "what is split over the processes besides the batch (default ddp: nothing)",
        "ddp",
        choices=strategies.NAMES,
    )
    accumulate: int = option(
        "parts of a process's batch that run one after the other", 1, type=count
    )
    reduce_dtype: str = option(
        "dtype in which ddp and fsdp send gradients; bf16 needs --precision bf16",
        "fp32",
        choices=("fp32", "bf16"),
    )
    save_every: int | None = option(
        "save a checkpoint every N steps, and after the last", type=count, metavar="N"
    )
    checkpoints: Path | None = option(
        "folder of the checkpoints, on storage that all machines see (default: "
        "results/scale_out/checkpoints of this checkout)",
        metavar="FOLDER",
    )
    resume: bool = option(
        "continue from the newest complete checkpoint there, with any number of processes and any "
        "strategy; after a restart by torchrun or Slurm this happens without the flag"
    )
    trace: Path | None = option(
        "with several processes, when the clock has stopped: write a torch.profiler trace of rank "
        "0 (.json.gz), and the share of communication into the result",
        metavar="FILE",
    )


def build_parser() -> argparse.ArgumentParser:
    """The flags that all versions have, and those of several processes."""
    parser = request.build_parser(
        versions.get_version(versions.BASELINE), versions.load(versions.BASELINE)
    )
    parser.description, parser.epilog = DESCRIPTION, EXIT_STATUS
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(output_dir=FOLDER)
    add_options(parser.add_argument_group("processes"), Flags)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # deepspeed's launcher's
    return parser


def read(words: Sequence[str] | None) -> Job:
    """The job of a command line, in a process that a launcher has started. Raises WorkshopError: as
    `check`, or the launcher has not set what it should."""
    arguments = parse(build_parser(), words)
    group = find_group()
    errors.require(*strategies.packages(arguments.strategy))
    return check(arguments, group, versions.load(arguments.version))


def check(arguments: argparse.Namespace, group: Group, module: ModuleType) -> Job:
    """Turns arguments into a job.

    Args:
        module: the version's; the judge, which builds no version's model, gives V1's.

    Raises:
        WorkshopError: something is wrong with them.
        NotOnThisMachine: the strategy can't run here.
    """
    strategy, alone = arguments.strategy, arguments.strategy == "ddp" and group.size == 1
    compiled, version = arguments.compile, versions.get_version(arguments.version)
    arguments.device = device_name(group, arguments.device)
    if arguments.cuda_graph is None and not alone:
        arguments.cuda_graph = False
    if compiled is None and strategy == "zero3":
        arguments.compile = "none"
    for name in versions.switches(version):
        setattr(arguments, name, True)
    if version.key == "v3" and strategy != "ddp":
        arguments.fuse_optimizer = False  # its kernel reads whole weights at fixed addresses
    asked = request.check_arguments(version, module, arguments)
    precision, parts = asked.precision.name, group.size * arguments.accumulate
    in_bf16 = arguments.reduce_dtype == "bf16"
    fits = max(1, asked.batch_size // parts) * parts
    rules = {
        f"--strategy {' and '.join(strategies.PEERS)} need --version {PEER}, which needs one of "
        "them": (strategy in strategies.PEERS) != (version.key == PEER),
        f"--precision {precision}: several processes train in fp32, tf32 or bf16": (
            precision not in ("fp32", "tf32", "bf16")
        ),
        f"--reduce-dtype: --strategy {strategy} chooses it itself; use ddp or fsdp": (
            in_bf16 and strategy not in strategies.CAPTURED
        ),
        f"--reduce-dtype bf16: at {precision} the gate would fail; use --precision bf16": (
            in_bf16 and precision != "bf16"
        ),
        f"--cuda-graph: --strategy {strategy} is not captured; use ddp or fsdp": (
            asked.cuda_graph and strategy not in strategies.CAPTURED
        ),
        f"--compile {compiled} captures graphs of its own, which only one process of ddp can; "
        "use --compile default": compiled in ("reduce-overhead", "max-autotune") and not alone,
        "--strategy zero3 fetches weights from hooks around each module, which a compiled model "
        "does not call: use --compile none": strategy == "zero3" and asked.compile_mode != "none",
        "--checkpoints needs --save-every N or --resume": (
            arguments.checkpoints and not (arguments.save_every or arguments.resume)
        ),
        "--profile-steps: use --trace FILE": arguments.profile_steps,
        f"--batch-size {asked.batch_size}: not a multiple of {parts} (processes: {group.size}, "
        f"--accumulate: {arguments.accumulate}); use {fits}, for example": asked.batch_size % parts,
    }
    shared.refuse(rules)
    if problem := strategies.missing(strategy, asked.device, asked.cuda_graph):
        raise NotOnThisMachine(problem)
    arguments.checkpoints = arguments.checkpoints or FOLDER / "checkpoints"
    return Job(asked, group, Turn(arguments.candidate and group.is_first))

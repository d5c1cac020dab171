"""The command line of a training in several processes, and its checks."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from labs import shared
from labs.scale_out import group as groups
from labs.scale_out import strategies
from labs.scale_out.group import Group
from workshop import errors, request, results, versions
from workshop.arguments import count
from workshop.errors import NotOnThisMachine, WorkshopError
from workshop.judge.turn import Turn
from workshop.run import presets
from workshop.run.trainer import COMPILE_MODES

LAB = "scale_out"
CHECKPOINTS = results.DEFAULT_FOLDER / LAB / "checkpoints"
_SHARED = (
    *("config", "num_layers", "batch_size", "seq_len", "num_steps", "warmup_steps"),
    *("learning_rate", "seed", "precision", "data", "text_file", "compile"),
)
"""Flags that are passed on to the version."""
PEER = "hf"
"""The version that the peers' strategies train."""
_CAPTURING = ("reduce-overhead", "max-autotune")
"""Modes of torch.compile that capture graphs."""
Add = Callable[..., Any]
DESCRIPTION = """\
Trains a version of Tiny-LLaMA in several processes, after showing that they train the model
that V1 trains in one.

    torchrun --nproc-per-node 2 train.py --version v2 --strategy ddp
    torchrun --nproc-per-node 2 train.py --version v4 --strategy fsdp --save-every 10
    deepspeed --num_gpus 2 train.py --version v2 --strategy zero2
"""


@dataclass(frozen=True)
class Job:
    """A training whose flags have been checked, as one of its processes sees it."""

    asked: request.Request
    """The version's own request; the batch size is that of all processes together."""
    group: Group
    strategy: str
    accumulate: int
    reduce_dtype: torch.dtype
    """Type of the gradients that ddp and fsdp send."""
    checkpoints: Path
    arguments: argparse.Namespace
    turn: Turn

    def make_strategy(self, asked: request.Request) -> strategies.Strategy:
        """The job's strategy for a request, its own or another one."""
        return strategies.make(
            self.strategy, asked, self.accumulate, self.group.size, self.reduce_dtype
        )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status of each process: 0 done, 1 gate or audit failed, memory ran out or "
        "another process\nended, 2 wrong usage, 77 something is missing on this machine, "
        "130 interrupted.",
    )
    _add_training(parser.add_argument)
    _add_processes(parser.add_argument_group("processes").add_argument)
    _add_files(parser.add_argument_group("files").add_argument)
    return parser


def _add_training(add: Add) -> None:
    number = partial(add, type=count, metavar="N")
    usual = request.USUAL
    add(
        "--version",
        choices=[*versions.available(), PEER],
        default="v2",
        help=f"of the ladder (default v2); {PEER} is Hugging Face's Llama, for the strategies of "
        "accelerate",
    )
    add(
        "--config",
        metavar="PRESET",
        help=f"{', '.join(presets.PRESETS)}: model, batch size and sequence length (default: tiny "
        "without a GPU, else small)",
    )
    number(
        "--num-layers",
        help="of the model (default: the preset's); the gate needs more memory than the training",
    )
    number(
        "--batch-size", help="sequences a step, of all processes together (default: the preset's)"
    )
    number("--seq-len", help="tokens of a sequence (default: the preset's)")
    number("--num-steps", help=f"timed steps (default {usual.timed})")
    number("--warmup-steps", help=f"trained before the clock starts (default {usual.warmup})")
    add("--learning-rate", type=float, default=3e-4, metavar="X", help="AdamW's (default 0.0003)")
    add("--seed", type=int, default=42, help="of weights and batches (default 42)")
    add("--precision", default="auto", help="fp32, tf32, bf16 or auto (default auto: bf16 on a "
        "GPU that has it, else fp32)")  # fmt: skip
    add("--data", choices=("text", "synthetic"), default="text", help="default text")
    add(
        "--text-file",
        type=Path,
        metavar="FILE",
        help="the text, byte by byte (default: the Python standard library's sources)",
    )
    add(
        "--compile",
        nargs="?",
        const="default",
        choices=COMPILE_MODES,
        help="torch.compile's mode (default: the version's)",
    )
    add(
        "--cuda-graph",
        action=argparse.BooleanOptionalAction,
        help="capture the whole step, with ddp and fsdp also in several processes (default: the "
        "version's in one process with ddp, else no)",
    )
    add("--no-gate", action="store_true", help="skip gate and audit: the result says so")


def _add_processes(add: Add) -> None:
    add(
        "--strategy",
        choices=strategies.NAMES,
        default="ddp",
        help="what is split over the processes besides the batch (default ddp: nothing)",
    )
    add(
        "--accumulate",
        type=count,
        default=1,
        metavar="N",
        help="parts of a process's batch that run one after the other (default 1)",
    )
    add(
        "--reduce-dtype",
        choices=("fp32", "bf16"),
        default="fp32",
        help="dtype in which ddp and fsdp send gradients; bf16 needs --precision bf16 (default "
        "fp32)",
    )
    add(
        "--device",
        default="auto",
        help="auto, cpu or cuda: each process takes one GPU (default auto: GPU if any)",
    )
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher's


def _add_files(add: Add) -> None:
    folder = partial(add, type=Path, metavar="FOLDER")
    add(
        "--save-every",
        type=count,
        metavar="N",
        help="save a checkpoint every N steps, and after the last (default: none)",
    )
    folder(
        "--checkpoints",
        help="of the checkpoints, on storage that all machines see (default: "
        "results/scale_out/checkpoints of this checkout)",
    )
    add(
        "--resume",
        action="store_true",
        help="continue from the newest complete checkpoint there, with any number of processes "
        "and any strategy; after a restart by torchrun or Slurm this happens without the flag",
    )
    shared.add_output_dir(add, LAB)
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="with several processes, when the clock has stopped: write a torch.profiler trace of "
        "rank 0 (.json.gz), and the share of communication into the result",
    )
    add("--candidate", action="store_true", help=argparse.SUPPRESS)  # of measure.py


def check(arguments: argparse.Namespace) -> Job:
    """Turns arguments into a job.

    Raises:
        WorkshopError: something is wrong with them, or with how the processes were started.
        NotOnThisMachine: the version or the strategy needs a package that is missing.
    """
    group = groups.find()
    errors.require(*strategies.packages(arguments.strategy))
    if (arguments.strategy in strategies.PEERS) != (arguments.version == PEER):
        raise WorkshopError(
            f"--strategy {' and '.join(strategies.PEERS)} need --version {PEER}, which needs one "
            "of them"
        )
    version = versions.get_version(arguments.version)
    module = versions.load(version.key)
    if arguments.checkpoints and not (arguments.save_every or arguments.resume):
        raise WorkshopError("--checkpoints needs --save-every N or --resume")
    _check_strategy_flags(arguments, group)
    alone = arguments.strategy == "ddp" and group.size == 1
    words = [f"--device={groups.device_name(group, arguments.device)}"]
    for name in _SHARED:
        if (value := getattr(arguments, name)) is not None:
            words.append(f"--{name.replace('_', '-')}={value}")
    if arguments.cuda_graph is not None or not alone:
        words.append("--cuda-graph" if arguments.cuda_graph else "--no-cuda-graph")
    if version.key == "v3" and arguments.strategy != "ddp":
        words.append("--no-fuse-optimizer")  # its kernels read whole weights at fixed addresses
    parser = request.build_parser(version, module)
    asked = request.check_arguments(version, module, parser.parse_args(words))
    if problem := strategies.missing(arguments.strategy, asked.device, asked.cuda_graph):
        raise NotOnThisMachine(problem)
    if asked.precision.loss_scaling:
        raise WorkshopError(
            "--precision fp16: its loss scale is not shared by processes here; use bf16"
        )
    if asked.precision.float8_recipe:
        raise WorkshopError(
            f"--precision {asked.precision.name}: the strategies here share bf16's layers; use bf16"
        )
    if arguments.reduce_dtype == "bf16" and asked.precision.name != "bf16":
        raise WorkshopError(
            f"--reduce-dtype bf16: at {asked.precision.name} the gate would fail; use "
            "--precision bf16"
        )
    if arguments.strategy == "zero3" and asked.compile_mode != "none":
        raise WorkshopError(
            "--strategy zero3 fetches weights from hooks around each module, which a compiled "
            "model does not call: use --compile none"
        )
    parts = group.size * arguments.accumulate
    if asked.batch_size % parts:
        raise WorkshopError(
            f"--batch-size {asked.batch_size}: not a multiple of {parts} (processes: "
            f"{group.size}, --accumulate: {arguments.accumulate}); use "
            f"{max(1, asked.batch_size // parts) * parts}, for example"
        )
    folder = arguments.checkpoints or CHECKPOINTS
    reduce_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[arguments.reduce_dtype]
    turn = Turn(arguments.candidate and group.is_first)
    return Job(
        asked,
        group,
        arguments.strategy,
        arguments.accumulate,
        reduce_dtype,
        folder,
        arguments,
        turn,
    )


def _check_strategy_flags(arguments: argparse.Namespace, group: Group) -> None:
    """Raises WorkshopError for a flag that the strategy does not support."""
    strategy = arguments.strategy
    if arguments.reduce_dtype != "fp32" and strategy not in ("ddp", "fsdp"):
        raise WorkshopError(
            f"--reduce-dtype: --strategy {strategy} chooses it itself; use ddp or fsdp"
        )
    if arguments.cuda_graph and strategy not in strategies.CAPTURED:
        raise WorkshopError(f"--cuda-graph: --strategy {strategy} is not captured; use ddp or fsdp")
    if arguments.compile in _CAPTURING and (strategy != "ddp" or group.size > 1):
        where = f"--strategy {strategy} in {group.size} process{'es' * (group.size > 1)}"
        raise WorkshopError(
            f"--compile {arguments.compile} captures graphs of its own, and {where} can't; use "
            "--compile default"
        )

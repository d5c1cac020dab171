"""The benchmark's command line: its flags, and which of them go together."""

import argparse
import ast
import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from labs import shared
from labs.group import VARIABLES, Group, device_name, find_group
from labs.inference_benchmark import modes, networks
from labs.inference_benchmark.modes import Variant
from workshop import errors, results
from workshop.arguments import count
from workshop.errors import WorkshopError
from workshop.run import deterministic, hardware

LAB = "inference_benchmark"
OUTPUT_DIR = results.DEFAULT_FOLDER / LAB
ALL = "all"
"""As a name: each of the benchmark's networks."""
COMPARISONS = ("precision", "compile", "memory-format", "batch-size", "peers")
PEERS = ("torch", "timm")
MEANT = {"static-memory": "triton.cudagraphs", "matmul-padding": "shape_padding"}
"""Names of options in early texts on torch.compile, and what they are called."""
DESCRIPTION = """\
Benchmarks vision networks: throughput, latency and memory, of inference or training.

Every number is of a run whose results were compared with the fp32 network's: an optimised run that
computes something else gets no throughput. Inference is the default: evaluation mode, no
gradients. Training is forward, loss, backward and SGD, with fp32 weights at every precision.

    python micro_benchmarking_pytorch.py --network resnet50 --batch-size 32 --iterations 20
    python micro_benchmarking_pytorch.py --network resnet50 --fp16 1 --channels-last --compile
    python micro_benchmarking_pytorch.py --network resnet50 --compare precision
    torchrun --nproc-per-node 2 micro_benchmarking_pytorch.py --network resnet50 --batch-size 128
"""
STUDIES = ("--network all", "--compare", "--ladder", "--find-max-batch")
ONE_RUN = ("--autograd-profiler", "--autograd_profiler", "--kineto", "--flops-prof-step",
           "--dataparallel", "--peer", "several processes")  # fmt: skip
"""Those that do not go with a study or a profile."""
NO_PEER = ("--mode training", "--fold-norms", "--cuda-graph", "--export", "--flops-prof-step",
           "--dataparallel", "several processes")  # fmt: skip
VARIANTS = ("--precision", "--compile", "--channels-last", "--fold-norms", "--fuse-relus",
            "--cuda-graph", "--export")  # fmt: skip
Add = Callable[..., Any]


def build_parser() -> argparse.ArgumentParser:
    more = f"networks: {' '.join(networks.NAMES)}; and any other of torchvision.\n\n"
    parser = shared.new_parser(DESCRIPTION, "the gate failed or memory ran out", more)
    add = parser.add_argument
    number = partial(add, type=count, metavar="N")
    add("--network", required=True, metavar="NAME", help="see below; all: a table of all of them; "
        "with --compare several, as in resnet18,resnet50")  # fmt: skip
    number("--batch-size", default=64, help="images of all GPUs together (default 64)")
    number("--iterations", default=20, help="timed ones (default 20)")
    number("--warmup-iterations", default=5, help="not timed, before them (default 5)")
    add("--mode", choices=("inference", "training"), default="inference", help="default inference")
    add("--seed", type=int, default=42, help="of weights and images (default 42)")
    add(deterministic.FLAG, action="store_true", help=deterministic.HELP)
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default auto: GPU if any)")
    shared.add_output_dir(add, LAB)
    _add_speed(parser.add_argument_group("what makes it fast").add_argument)
    _add_profilers(parser.add_argument_group("profilers").add_argument)
    _add_studies(parser.add_argument_group("several runs").add_argument)
    _add_processes(parser.add_argument_group("several GPUs (torchrun sets these)").add_argument)
    return parser


def _add_speed(add: Add) -> None:
    switch = partial(add, action="store_true")
    precisions = ("fp32", "tf32", "bf16", "fp16")
    add("--precision", choices=precisions,
        help="of weights and images; in training of the operations (default fp32)")  # fmt: skip
    add("--fp16", type=int, choices=(0, 1), default=0, help="1: as --precision fp16 (default 0)")
    switch("--compile", help="compile with torch.compile")
    add("--compileContext", dest="compile_context", metavar="DICT", help="torch.compile's "
        "arguments, as in \"{'mode': 'max-autotune', 'fullgraph': 'True'}\"")  # fmt: skip
    switch("--channels-last", help="images and weights as NHWC")
    switch("--fold-norms", help="batch norms become part of the convolutions")
    switch("--fuse-relus", help="a convolution, a residual sum and a ReLU become one kernel, with "
           "--fold-norms")  # fmt: skip
    add("--cuda-graph", action=argparse.BooleanOptionalAction, default=False,
        help="capture the whole network in a graph")  # fmt: skip
    add("--export", choices=("aoti",), help="compile ahead of time, by AOTInductor")
    add("--peer", choices=PEERS, default="", help="a peer's way of running it, for comparison: "
        "torch.compile as it is, timm's network and loop")  # fmt: skip


def _add_profilers(add: Add) -> None:
    switch = partial(add, action="store_true")
    switch("--autograd-profiler", help="tables of operations by CPU time, GPU time and memory")
    switch("--autograd_profiler", dest="ranges", help="with _: a ROCTX or NVTX range around each "
           "timed iteration, for rocprofv3 or nsys; no profiler of PyTorch is started")  # fmt: skip
    switch("--kineto", help="write a trace of torch.profiler, one a rank")
    add("--flops-prof-step", type=int, default=0, metavar="N",
        help="operations and times of each layer, at iteration N (default 0: not)")  # fmt: skip
    add("--profile-steps", type=count, metavar="N", help="for the run_* scripts' profilers: after "
        "the warm-up run N iterations in marker ranges, with no gate and no clock; what was "
        "profiled goes to OUTPUT_DIR/run.jsonl (default there: "
        f"results/profiles/{LAB}/steps)")  # fmt: skip


def _add_studies(add: Add) -> None:
    switch = partial(add, action="store_true")
    add("--compare", choices=COMPARISONS, help="run its variants in alternating processes; "
        "compile with --compile: eager mode and that alone")  # fmt: skip
    switch("--ladder", help="from fp32 in eager mode to the fastest, one change at a time")
    switch("--find-max-batch", help="the largest batch that fits in memory")
    shared.add_repeats(add)
    switch("--resume", help="go on with the newest session of the same batch, precision, mode, "
           "software and device in --output-dir, and keep the networks that are complete; of "
           "--network all")  # fmt: skip
    switch("--candidate", help=argparse.SUPPRESS)  # of a study


def _add_processes(add: Add) -> None:
    switch, url = partial(add, action="store_true"), "tcp://127.0.0.1:29500"
    switch("--distributed_dataparallel",
           help="join a group of processes by --rank, --world-size and --dist-url")  # fmt: skip
    switch("--dataparallel", help="one process drives all GPUs of --device_ids")
    add("--device_ids", metavar="0,1", help="GPUs, by number")
    add("--rank", type=int, default=0, metavar="N", help="this process's number (default 0)")
    add("--world-size", type=count, default=1, metavar="N", help="all processes (default 1)")
    add("--dist-url", default=url, metavar="URL", help=f"where rank 0 listens (default {url})")


# --- what was asked for --------------------------------------------------------------------------


def is_study(arguments: argparse.Namespace) -> bool:
    several = arguments.compare or arguments.ladder or arguments.find_max_batch
    return bool(several or arguments.network == ALL)


def names_of(arguments: argparse.Namespace) -> list[str]:
    """The networks: several only with --compare."""
    return arguments.network.split(",") if arguments.compare else [arguments.network]


def variant_of(arguments: argparse.Namespace) -> Variant:
    """Raises WorkshopError for flags that contradict each other."""
    if arguments.fp16 and arguments.precision not in (None, "fp16"):
        raise WorkshopError(f"--fp16 1 and --precision {arguments.precision}: give one of them")
    precision = "fp16" if arguments.fp16 else arguments.precision or "fp32"
    if arguments.compile_context is not None and not arguments.compile:
        raise WorkshopError("--compileContext goes with --compile")
    compiled = arguments.compile
    return Variant(
        precision=precision,
        # Training keeps fp32 weights at every precision.
        autocast=arguments.mode == "training" and precision in ("bf16", "fp16"),
        channels_last=arguments.channels_last,
        fold=arguments.fold_norms,
        fuse=arguments.fuse_relus,
        compile=parse_context(arguments.compile_context or "{}") if compiled else None,
        cuda_graph=arguments.cuda_graph,
        export=arguments.export == "aoti",
        peer=arguments.peer,
    )


def parse_context(text: str) -> dict[str, Any]:
    """torch.compile's arguments from `--compileContext`, a Python literal. 'True' and 'False' may
    be texts, and options may have the names of MEANT. Raises WorkshopError: no dict, or an
    argument, mode or option that torch.compile does not know."""

    def truth(value: Any) -> Any:
        return {"True": True, "False": False}.get(value, value) if isinstance(value, str) else value

    try:
        context = {str(name): truth(value) for name, value in ast.literal_eval(text).items()}
    except (ValueError, SyntaxError, MemoryError, RecursionError, AttributeError):
        example = "give a dict, as in \"{'mode': 'max-autotune'}\""
        raise WorkshopError(f"--compileContext {text!r:.60}: {example}") from None
    if isinstance(options := context.get("options"), dict):
        context["options"] = {
            MEANT.get(name, str(name).replace("-", "_")): truth(value)
            for name, value in options.items()
        }
    try:
        torch.compile(lambda: None, **context)  # compiles nothing yet
    except (RuntimeError, TypeError, AttributeError) as error:
        raise WorkshopError(f"--compileContext: {error!s:.160}") from None
    return context


def check(arguments: argparse.Namespace) -> torch.device:
    """The device of a single run, a study or a profile.

    Raises:
        WorkshopError: flags that do not go together, or that can't run on this device.
        NotOnThisMachine: a peer's package is missing.
    """
    group, variant, step = group_of(arguments), variant_of(arguments), arguments.flops_prof_step
    if arguments.network != ALL:
        for name in names_of(arguments):
            networks.get_network(name)
    eager = variant.compile is None and not variant.cuda_graph and not variant.export
    training, asked = arguments.mode == "training", _asked(arguments, group)
    studies, no_peer, variants = (
        [name for name in names if name in asked] for names in (STUDIES, NO_PEER, VARIANTS)
    )
    own = {"--network all", "--ladder"} & asked
    refused: list[str] = []
    if studies or arguments.profile_steps:
        refused = [name for name in ONE_RUN if name in asked]
        refused += studies if arguments.profile_steps else []
    what = "a profiler" if arguments.profile_steps else "a study"
    rules: dict[str, object] = {
        "--dataparallel runs in eager mode: use torchrun, a process a GPU": (
            arguments.dataparallel and not eager
        ),
        f"--flops-prof-step {step}: it must be smaller than --iterations {arguments.iterations}, "
        "which counts from 0": step < 0 or (step and arguments.iterations <= step),
        "--jobs is for --network all, --compare and --ladder of inference": (
            arguments.jobs > 1 and (training or not {"--compare", *own} & asked)
        ),
        "--resume is for --network all": arguments.resume and arguments.network != ALL,
        f"--seed {arguments.seed}: it must lie between 0 and 2^62": (
            not 0 <= arguments.seed < 2**62
        ),
        f"{', '.join(refused)} does not go with {what}: leave it out": refused,
        f"{' and '.join(studies)}: one at a time": len(studies) > 1,
        "--network all, --ladder and --compare peers are for --mode inference": (
            training and (own or arguments.compare == "peers")
        ),
        f"{', '.join(variants)}: leave it out, --ladder and --network all have variants of their "
        "own": own and variants,
        f"--peer {variant.peer} is plain inference in one process: leave out "
        f"{', '.join(no_peer)}": variant.peer and no_peer,
    }
    shared.refuse(rules)
    if variant.peer:
        errors.require(variant.peer)
    device = device_of(group, arguments.device)
    modes.check(variant, device, training=training)
    return device


def _asked(arguments: argparse.Namespace, group: Group) -> set[str]:
    """The flags that were given a value, and what follows from several, in words."""
    found = {f"--{name.replace('_', '-')}" for name, value in vars(arguments).items() if value}
    words = {
        "--autograd_profiler": arguments.ranges,
        "--network all": arguments.network == ALL,
        "--mode training": arguments.mode == "training",
        "several processes": group.size > 1 or arguments.distributed_dataparallel,
    }
    return found | {name for name, holds in words.items() if holds}


# --- several processes ----------------------------------------------------------------------------


def group_of(arguments: argparse.Namespace) -> Group:
    """The group that torchrun has made, or that --rank and --world-size describe. Raises
    WorkshopError: the rank is outside the group, the batch smaller than it, or there is another
    number of GPUs."""
    ids = _device_ids(arguments.device_ids)
    rank, world_size = arguments.rank, arguments.world_size
    # A cluster may set some of the variables; the flags count then.
    group = find_group() if all(name in os.environ for name in VARIABLES[:3]) else Group()
    if group.launched:
        group = replace(group, gpus=_own(ids, group.local_rank, group.local_size))
    elif arguments.distributed_dataparallel:
        # A single number is this process's own: a list can't tell which machine it is of.
        gpus = ids if len(ids) == 1 else _own(ids, rank, world_size)
        # How many of them are on this machine is not known.
        group = Group(rank, rank, world_size, 1, True, arguments.dist_url, gpus)
    elif arguments.dataparallel:
        group = Group(gpus=ids or tuple(range(torch.cuda.device_count())))
    else:
        group = Group(gpus=_own(ids, 0, 1))
    rules = {
        f"--rank {group.rank}: it must lie between 0 and --world-size": (
            not 0 <= group.rank < group.size
        ),
        f"--rank {rank} --world-size {world_size}: they go with --distributed_dataparallel; "
        "torchrun has its own": (rank, world_size) not in (
            (0, 1), (group.rank, group.size)
        ),
        "--dataparallel is for one process and needs two GPUs or more: those of --device_ids, or "
        "all": arguments.dataparallel and (group.size > 1 or len(group.gpus) < 2),
        f"--batch-size {arguments.batch_size}: it is the batch of all {group.size} processes "
        "together, so that each needs an image of its own": (
            arguments.batch_size < group.size
        ),
    }  # fmt: skip
    shared.refuse(rules)
    return group


def _device_ids(text: str | None) -> tuple[int, ...]:
    """The GPUs of `--device_ids 0,1`; raises WorkshopError for other text, a GPU that is there
    twice, and one that this machine does not have."""
    words = [word.strip() for word in (text or "").split(",") if word.strip()]
    ids = tuple(int(word) if word.isdecimal() else -1 for word in words)
    count = torch.cuda.device_count() if ids else 0
    shared.refuse({
        f"--device_ids {text!r:.40}: give numbers of GPUs, as in 0,1": -1 in ids,
        f"--device_ids {text}: it has a GPU twice": len(set(ids)) < len(ids),
        f"--device_ids {text}: PyTorch sees {count} GPUs on this machine, numbered from 0": (
            ids and max(ids) >= count
        ),
    })  # fmt: skip
    return ids


def _own(ids: tuple[int, ...], place: int, processes: int) -> tuple[int, ...]:
    """The GPU of one of the processes that share a list; empty without a list."""
    if ids and len(ids) != processes:
        raise WorkshopError(
            f"--device_ids {','.join(map(str, ids))}: give a GPU for each process, of which there "
            f"are {processes} here; --dataparallel drives several GPUs from one process"
        )
    return ids[place : place + 1]


def device_of(group: Group, name: str) -> torch.device:
    """The process's own device: that of --device_ids, with `auto` the GPU of its local rank."""
    shared.refuse({
        f"--device {name}: --device_ids and --dataparallel have GPUs of their own; leave it out": (
            group.gpus and name not in ("auto", "cuda")
        ),
        f"--device {name}: it is one GPU for {group.size} processes; give --device_ids": (
            group.size > 1 and re.fullmatch(r"cuda:\d+", name)
        ),
    })  # fmt: skip
    if group.gpus:
        name = f"cuda:{group.gpus[0]}"
    return hardware.get_device(device_name(group, name))

"""The benchmark's command line."""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

from labs import shared
from labs.inference_benchmark import networks
from workshop import results
from workshop.arguments import count

LAB = "inference_benchmark"
OUTPUT_DIR = results.DEFAULT_FOLDER / LAB
COMPARISONS = ("precision", "compile", "memory-format", "batch-size", "peers")
PEERS = ("torch", "timm")
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
Add = Callable[..., Any]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"networks: {' '.join(networks.NAMES)}; and any other classification or "
        "segmentation network of torchvision.\n\nExit status: 0 done, 1 the gate failed or memory "
        "ran out, 2 wrong usage, 77 something is\nmissing on this machine, 130 interrupted.",
    )
    add = parser.add_argument
    number = partial(add, type=count, metavar="N")
    add("--network", required=True, metavar="NAME", help="see below; all: a table of all of them")
    number(
        "--batch-size", default=64, help="images an iteration, of all GPUs together (default 64)"
    )
    number("--iterations", default=20, help="timed ones (default 20)")
    number("--warmup-iterations", default=5, help="not timed, before them (default 5)")
    add("--mode", choices=("inference", "training"), default="inference", help="default inference")
    add("--seed", type=int, default=42, help="of weights and images (default 42)")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default auto: GPU if any)")
    shared.add_output_dir(add, LAB)
    _add_speed(parser.add_argument_group("what makes it fast").add_argument)
    _add_profilers(parser.add_argument_group("profilers").add_argument)
    _add_studies(parser.add_argument_group("several runs").add_argument)
    _add_processes(parser.add_argument_group("several GPUs (torchrun sets these)").add_argument)
    return parser


def of_single_run(arguments: argparse.Namespace) -> list[str]:
    """The given flags that neither a study nor a profiler's script takes."""
    flags = {
        "--autograd-profiler": arguments.autograd_profiler,
        "--autograd_profiler": arguments.ranges,
        "--kineto": arguments.kineto,
        "--flops-prof-step": arguments.flops_prof_step,
        "--distributed_dataparallel": arguments.distributed_dataparallel,
        "--dataparallel": arguments.dataparallel,
        "--peer": arguments.peer,
    }
    return [flag for flag, value in flags.items() if value]


def _add_speed(add: Add) -> None:
    switch = partial(add, action="store_true")
    add(
        "--precision",
        choices=("fp32", "tf32", "bf16", "fp16"),
        help="of weights and images; in training of the operations (default fp32)",
    )
    add("--fp16", type=int, choices=(0, 1), default=0, help="1: as --precision fp16 (default 0)")
    switch("--compile", help="compile with torch.compile")
    add(
        "--compileContext",
        dest="compile_context",
        metavar="DICT",
        help="torch.compile's arguments, as in \"{'mode': 'max-autotune', 'fullgraph': 'True'}\"",
    )
    switch("--channels-last", help="images and weights as NHWC")
    switch("--fold-norms", help="batch norms become part of the convolutions")
    switch(
        "--fuse-relus",
        help="a convolution, a residual sum and a ReLU become one kernel, with --fold-norms",
    )
    add(
        "--cuda-graph",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="capture the whole network in a graph",
    )
    add("--export", choices=("aoti",), help="compile ahead of time, by AOTInductor")
    add(
        "--peer",
        choices=PEERS,
        default="",
        help="a peer's way of running it, for comparison: torch.compile as it is, timm's network "
        "and loop",
    )


def _add_profilers(add: Add) -> None:
    switch = partial(add, action="store_true")
    switch(
        "--autograd-profiler",
        help="tables of operations by CPU time, GPU time and memory, from torch.profiler",
    )
    switch(
        "--autograd_profiler",
        dest="ranges",
        help="with _: a ROCTX or NVTX range around each timed iteration, for rocprofv3 or nsys; no "
        "profiler of PyTorch is started",
    )
    switch("--kineto", help="write a trace of torch.profiler, one a rank")
    add(
        "--flops-prof-step",
        type=int,
        default=0,
        metavar="N",
        help="operations and times of each layer, at iteration N (default 0: not)",
    )
    add(
        "--profile-steps",
        type=count,
        metavar="N",
        help="for the run_* scripts' profilers: after the warm-up run N iterations in marker "
        "ranges, with no proof and no clock; what was profiled goes to OUTPUT_DIR/run.json "
        f"(default there: results/profiles/{LAB}/steps)",
    )


def _add_studies(add: Add) -> None:
    switch = partial(add, action="store_true")
    add(
        "--compare",
        choices=COMPARISONS,
        help="run its variants in alternating processes; compile with --compile: eager mode and "
        "that alone",
    )
    switch("--ladder", help="from fp32 in eager mode to the fastest, one change at a time")
    switch("--find-max-batch", help="the largest batch that fits in memory")
    shared.add_repeats(add)
    switch(
        "--resume",
        help="go on with the newest session of the same batch, precision, mode, software and "
        "device in --output-dir, and keep the networks that are complete; of --network all",
    )
    add("--candidate", action="store_true", help=argparse.SUPPRESS)  # of a study


def _add_processes(add: Add) -> None:
    switch = partial(add, action="store_true")
    switch(
        "--distributed_dataparallel",
        help="join a group of processes by --rank, --world-size and --dist-url",
    )
    switch("--dataparallel", help="one process drives all GPUs of --device_ids")
    add("--device_ids", metavar="0,1", help="GPUs, by number")
    add("--rank", type=int, default=0, metavar="N", help="this process's number (default 0)")
    add("--world-size", type=count, default=1, metavar="N", help="all processes (default 1)")
    add("--dist-backend", choices=("nccl", "gloo"), help="default: nccl on GPUs, else gloo")
    add(
        "--dist-url",
        default="tcp://127.0.0.1:29500",
        metavar="URL",
        help="where rank 0 listens (default tcp://127.0.0.1:29500)",
    )

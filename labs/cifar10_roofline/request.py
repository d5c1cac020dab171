"""The command line of the training."""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from labs import shared
from workshop.arguments import MOST, count
from workshop.errors import WorkshopError
from workshop.run.precision import PRECISIONS, Precision, get_precision
from workshop.run.trainer import missing_for_compile

LAB = "cifar10_roofline"
FOLDER = Path(__file__).resolve().parent
MODELS = ("resnet18", "resnet34")
DATASETS = ("cifar10", "digits")
_BOUNDS = {
    "lr": (1e-9, 1e3),
    "label_smoothing": (0, 0.99),
    "warmup": (0, MOST),
    "seed": (0, MOST),
    "workers": (0, 64),
    "save_every": (0, MOST),
    "warmup_iters": (0, MOST),
}
Add = Callable[..., Any]
DESCRIPTION = """\
Trains ResNet-18 or ResNet-34 on CIFAR-10, with the first convolution for images of 32 x 32.

Four steps, the last two among them, are compared with a plain step in fp32 on the same images: a
fast path that trains something else gets no throughput.

    python train.py --model resnet18 --epochs 5 --batch-size 128
    python train.py --model resnet18 --epochs 20 --batch-size 256 --amp --workers 4
    python train.py --dataset digits --epochs 4 --batch-size 32 --lr 0.02 --channels-last
    python train.py --epochs 1 --batch-size 128 --profile-one-step --warmup-iters 20
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status: 0 done, 1 the gate failed or memory ran out, 2 wrong usage, 77 "
        "something is missing\non this machine, 130 interrupted.",
    )
    add = parser.add_argument
    number = partial(add, type=count, metavar="N")
    add("--model", choices=MODELS, default="resnet18", help="default resnet18")
    number("--epochs", default=20, help="passes over the images (default 20)")
    number("--batch-size", default=128, help="images a step (default 128)")
    add("--lr", type=float, default=0.1, metavar="X", help="highest learning rate (default 0.1)")
    add("--warmup", type=int, metavar="N", help="steps in which the learning rate rises to --lr; a "
        "cosine to 0 follows (default: one epoch, at most half of all steps)")  # fmt: skip
    add("--label-smoothing", type=float, default=0.1, metavar="X",
        help="of the cross-entropy (default 0.1)")  # fmt: skip
    add("--seed", type=int, default=42, help="of weights, order and augmentation (default 42)")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default auto: GPU if any)")
    _add_data(parser.add_argument_group("data").add_argument)
    _add_files(parser.add_argument_group("files").add_argument)
    _add_speed(parser.add_argument_group("what makes it fast").add_argument)
    add = parser.add_argument_group("profilers").add_argument
    add("--profile-one-step", action="store_true",
        help="warm up, mark one training step for the profiler, and end")  # fmt: skip
    add("--warmup-iters", type=int, default=20, metavar="N", help="before it (default 20)")
    add("--profile-iter", type=count, default=1, metavar="N",
        help="which iteration after those is marked (default 1, the first)")  # fmt: skip
    return parser


def _add_data(add: Add) -> None:
    add("--dataset", choices=DATASETS, default="cifar10", help="default cifar10")
    add("--data", type=Path, default=FOLDER / "data", metavar="FOLDER", help="of CIFAR-10, which "
        "is downloaded there if it is missing (default: data/ beside train.py)")  # fmt: skip
    add("--epoch-images", type=count, metavar="N", help="images of an epoch: part of them, or some "
        "more than once (default: each once)")  # fmt: skip
    add("--workers", type=int, default=0, metavar="N",
        help="processes that prepare batches (default 0: the training process does)")  # fmt: skip
    add("--data-on-gpu", action="store_true",
        help="all images are on the device, which also crops and flips them")  # fmt: skip


def _add_files(add: Add) -> None:
    add("--out-dir", type=Path, metavar="FOLDER", default=FOLDER / "artifacts",
        help="for checkpoints, weights, curves (default: artifacts/ beside train.py)")  # fmt: skip
    shared.add_output_dir(add, LAB)
    add("--save-every", type=int, default=0, metavar="N", help="epochs (default 0: never)")
    add("--resume", type=Path, metavar="FILE", help="go on from a checkpoint of this program")
    add("--candidate", action="store_true", help=argparse.SUPPRESS)  # of measure_table.py


def _add_speed(add: Add) -> None:
    add("--amp", action="store_true", help="--precision fp16 on a GPU; without effect on the CPU")
    add("--precision", choices=tuple(PRECISIONS), help="of the operations (default fp32)")
    add("--channels-last", action="store_true", help="images and weights as NHWC")
    add("--compile", action="store_true", help="compile the network with torch.compile")
    add("--cuda-graph", action="store_true", help="capture the whole training step in a graph")


def precision_of(arguments: argparse.Namespace, device: torch.device) -> Precision:
    """Raises WorkshopError for --amp beside another precision, or one that the device does not
    have."""
    name = arguments.precision
    if arguments.amp and name not in (None, "fp16"):
        raise WorkshopError(f"--amp is --precision fp16, not {name}: give one of them")
    if arguments.amp and device.type == "cuda":
        name = "fp16"
    return get_precision(name or "fp32", device)


def check(arguments: argparse.Namespace, device: torch.device) -> None:
    """Raises WorkshopError for numbers out of bounds, and flags that do not go together or can't
    run on this device."""
    rules: dict[str, object] = {}
    for name, (low, high) in _BOUNDS.items():
        value, flag = getattr(arguments, name), name.replace("_", "-")
        sentence = f"--{flag} {value}: it must lie between {low:g} and {high:,}"
        rules[sentence] = value is not None and not low <= value <= high
    missing = missing_for_compile(device) if arguments.compile else None
    shared.refuse(
        rules
        | {
            "--cuda-graph needs a GPU": arguments.cuda_graph and device.type != "cuda",
            "--workers and --data-on-gpu: the device prepares the batches itself": (
                arguments.workers and arguments.data_on_gpu
            ),
            f"--compile needs {missing}; install it": missing,
        }
    )

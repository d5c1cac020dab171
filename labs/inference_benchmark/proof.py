"""What shows that the timed iterations did the network's work.

Inference: the logits that the timed iterations left are compared with the fp32 network's in fp64,
and may be no further from them than a small multiple of what plain eager mode loses at the same
precision. Training: the losses of the first steps are compared with those of plain fp32 in the
same way, the loss must fall at some time, and the timed steps must change each weight that plain
fp32's change.
"""

import copy
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from labs.inference_benchmark.modes import Setting, Training, Variant, prepare
from labs.inference_benchmark.networks import logits, run_once
from workshop.results import Parity
from workshop.run.precision import set_arithmetic

MOST_TIMES = 3.0
"""The plain network's error at the same precision, of which the timed one may have this many. True
runs of 65 networks had 0.8 to 1.1 of it in fp16 on an H200, and up to 2.0 in bf16 on a CPU."""
FLOOR = 8 * 2.0**-24
"""Relative to the logits: the plain network may by luck be nearer to the truth than fp32 rounds."""
MOST_ERROR = 0.7
"""Relative to the logits: however much the plain network loses, the timed one may not be further
from the truth. Logits of other images are at 1.4. In bf16 random MobileNets and ShuffleNets lose up
to 0.66, since their depthwise convolutions cancel what is smooth, and not the rounding."""
SAMPLE = 8
"""Images of each batch that are compared at most: the last, and others drawn at random."""
MOST_LAYERS_OF_A_BLOCK = 12
FIRST_STEPS = 3
"""Training steps whose losses are compared: later ones amplify the rounding of earlier ones."""


def sample_of(batch_size: int, seed: int) -> Tensor:
    """Indices of the images that are compared, int64 (at most SAMPLE,)."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(batch_size, generator=generator)[: SAMPLE - 1]
    return torch.cat([drawn, torch.tensor([batch_size - 1])]).unique()


@dataclass(frozen=True)
class Truth:
    """Logits of some images, fp64 on the CPU, (N, classes) or (N, classes, H, W)."""

    logits: Tensor
    """Of the fp32 network, computed in fp64."""
    plain: Tensor
    """Of plain eager mode at the variant's precision."""

    def of_first(self, count: int) -> "Truth":
        """That of the first images."""
        return Truth(self.logits[:count], self.plain[:count])


@torch.no_grad()
def find_truth(model: nn.Module, variant: Variant, images: Tensor) -> Truth:
    """Runs the fp32 network in fp64, and as it is at the variant's precision; images are fp32
    (N, 3, H, W)."""
    plain = variant.plain()
    with run_once():
        truth = logits(copy.deepcopy(model).double()(images.double())).cpu()
        with plain.context(images.device):
            eager = logits(prepare(model, plain)(images.to(plain.dtype))).double().cpu()
    return Truth(truth, eager)


def of_inference(variant: Variant, known: Truth, timed: Tensor) -> tuple[Parity, float]:
    """The verdict on logits of the timed iterations, of any precision, and the share of images (of
    segmentation: pixels) for which the class with the largest logit is the truth's."""
    truth, eager, timed = known.logits, known.plain, timed.double().cpu()
    # What all images have in common says nothing of whether each was looked at.
    scale = (truth - truth.mean(0, keepdim=True)).square().mean().sqrt()
    if len(truth) == 1:
        scale = truth.square().mean().sqrt()
    error, lost = (float((x - truth).square().mean().sqrt() / scale) for x in (timed, eager))
    allowed = min(MOST_ERROR, MOST_TIMES * lost + FLOOR)  # MOST_ERROR if lost is NaN
    agreement = float((timed.argmax(1) == truth.argmax(1)).double().mean())
    parity = Parity(
        status="pass" if error <= allowed else "fail",
        batch_size=len(truth),
        reference=f"fp64; plain eager {variant.precision} is {lost:.1e} from it",
        measures={"logits": {"error": _number(error), "allowed": allowed}},
    )
    if not error <= allowed:
        parity.failures.append(
            f"the timed logits are {error:.1e} from the fp32 network's in fp64, "
            f"{allowed:.1e} allowed"
        )
    return parity, agreement


def of_all(variant: Variant, known: Truth, timed: Sequence[Tensor]) -> tuple[Parity, float]:
    """`of_inference` of logits of the first images, at several times: the first one that failed, or
    else the last."""
    for one in timed:
        verdict = of_inference(variant, known.of_first(len(one)), one)
        if verdict[0].status == "fail":
            break
    return verdict


def of_training(
    model: nn.Module,
    variant: Variant,
    setting: Setting,
    images: Tensor,
    targets: Tensor,
    losses: list[float],
    stayed: list[bool],
) -> Parity:
    """The verdict on a training run.

    Args:
        model: the fp32 network before the first step.
        images, targets: the batch that was learned.
        losses: of all steps.
        stayed: whether the timed steps left a parameter of the network as it was.
    """
    count = min(FIRST_STEPS, len(losses))
    true_losses, moves = _plain_steps(model, Variant(), setting, images, targets, count)
    plain_losses, _ = _plain_steps(model, variant.plain(), setting, images, targets, count)
    set_arithmetic(variant.precision)
    lost = max(abs(a - b) for a, b in zip(plain_losses, true_losses, strict=True))
    error = max(abs(a - b) for a, b in zip(losses[:count], true_losses, strict=True))
    allowed = MOST_TIMES * lost + 2.0**-16 * abs(true_losses[0])
    still = sum(moved and stays for moved, stays in zip(moves, stayed, strict=True))
    failures = []
    reference = "plain fp32"
    if variant.precision != "fp32":
        reference += f"; plain {variant.precision} is {lost:.1e} from it"
    if not error <= allowed:
        failures.append(
            f"the losses of the first {count} steps are {error:.1e} from plain fp32's, "
            f"{allowed:.1e} allowed"
        )
    # A network without norms may overshoot later, at this rate: its work is the same.
    if not (all(map(math.isfinite, losses)) and min(losses) < losses[0]):
        failures.append(f"the loss never falls, or overflows: {losses[0]:.4f} to {losses[-1]:.4f}")
    if still:
        failures.append(f"weights that stay as they were in the timed steps: {still}")
    return Parity(
        status="fail" if failures else "pass",
        failures=failures,
        batch_size=len(images),
        reference=reference,
        measures={
            "losses": {"error": _number(error), "allowed": _number(allowed)},
            "weights that stay": {"error": still, "allowed": 0},
        },
    )


def _plain_steps(
    model: nn.Module,
    variant: Variant,
    setting: Setting,
    images: Tensor,
    targets: Tensor,
    count: int,
) -> tuple[list[float], list[bool]]:
    """The losses of this process's images; and whether most of a parameter's numbers change: those
    of a bias before a batch norm do so by rounding alone. Of a group's training one process does
    all: the gradients of a step are those of all parts, each with its share of the whole batch."""
    set_arithmetic(variant.precision)
    torch.backends.cudnn.benchmark = False  # a minute for a batch that is large, to save seconds
    plain = Training(recomputing(copy.deepcopy(model)), variant, setting, images, targets)
    parts = setting.parts or (setting.batch_size,)
    batches = [
        (images, targets) if rank == setting.rank else _batch_of(setting, rank)
        for rank in range(len(parts))
    ]
    losses = []
    for _ in range(count):
        plain.optimizer.zero_grad(set_to_none=True)
        step = [
            plain.backward(*batch, part / sum(parts))
            for batch, part in zip(batches, parts, strict=True)
        ]
        plain.update()
        losses.append(float(step[setting.rank]))
    pairs = zip(model.parameters(), plain.model.parameters(), strict=True)
    return losses, [2 * int((old != new).sum()) > old.numel() for old, new in pairs]


def recomputing(model: nn.Module) -> nn.Module:
    """The network, which computes the activations of its blocks again in the backward pass in the
    place of keeping them: fp32 ones of a batch that just fits at half precision would not fit."""
    for child in model.children():
        layers = sum(next(module.children(), None) is None for module in child.modules())
        if 1 < layers <= MOST_LAYERS_OF_A_BLOCK:
            child.forward = functools.partial(_recomputed, child.forward)
        else:
            recomputing(child)
    return model


def _recomputed(forward: Callable[..., object], *inputs: object) -> object:
    # A list may have grown until the backward pass: DenseNet's does.
    held = [list(one) if isinstance(one, list) else one for one in inputs]
    return checkpoint(forward, *held, use_reentrant=False, preserve_rng_state=False)


def _batch_of(setting: Setting, rank: int) -> tuple[Tensor, Tensor]:
    """The images and targets of another process of the group."""
    network, count, seed = setting.network, setting.parts[rank], setting.images_seed(rank)
    both = network.images(count, seed), network.targets(count, seed)
    return both[0].to(setting.device), both[1].to(setting.device)


def _number(error: float) -> float | None:
    """JSON has no NaN: null is an infinite error."""
    return error if math.isfinite(error) else None

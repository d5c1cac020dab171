"""The gate: the timed iterations did the network's work.

Inference: images are drawn after the clock, and the logits that any timed iteration left for them
are compared with the fp32 network's in fp64. They may be no further from them than a small multiple
of what plain eager mode loses at the same precision. Training: four of its steps, the last two
among them, are done again (workshop/gate/steps.py) by a plain step that has only the network in
common with the run's.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from labs.inference_benchmark.modes import Setting, Variant
from labs.inference_benchmark.networks import AUXILIARY_WEIGHT, Network, logits, run_once
from workshop.gate import steps
from workshop.gate.parity import Measure, as_recorded, badness
from workshop.gate.steps import State, Watch, plain_arithmetic
from workshop.results import Parity
from workshop.run.precision import set_arithmetic

MOST_TIMES = 3.0
"""The timed network's error may be this many times the plain one's at the same precision. True runs
of 65 networks had 0.8 to 1.1 of it in fp16 on an H200, and up to 2.0 in bf16 on a CPU."""
FLOOR = 8 * 2.0**-24
"""Relative to the logits: the plain network may by luck be nearer to the truth than fp32 rounds."""
MOST_ERROR = 0.7
"""Relative to the logits: however much the plain network loses, the timed one may not be further
from the truth. Logits of other images are at 1.4. In bf16 random MobileNets and ShuffleNets lose up
to 0.66, since their depthwise convolutions cancel what is smooth, and not the rounding."""
SAMPLE = 8
"""Images of a batch that are drawn at most: the last, and others."""
MOST_LAYERS_OF_A_BLOCK = 12
SGD = steps.Sgd(0.9, lambda number: 0.01)
Timed = tuple[Sequence[int], Tensor]
"""The drawn images that an iteration had, by number, and its logits for them, fp64 on the CPU."""


def sample_of(batch_size: int, generator: torch.Generator) -> Tensor:
    """Places of images that are compared, int64 (at most SAMPLE,)."""
    drawn = torch.randperm(batch_size, generator=generator)[: SAMPLE - 1]
    return torch.cat([drawn, torch.tensor([batch_size - 1])]).unique()


@dataclass(frozen=True)
class Truth:
    """Logits of some images, fp64 on the CPU, (N, classes) or (N, classes, H, W)."""

    logits: Tensor
    """The fp32 network's, computed in fp64."""
    plain: Tensor
    """Plain eager mode's, at the variant's precision."""


@torch.no_grad()
def find_truth(model: nn.Module, variant: Variant, images: Tensor) -> Truth:
    """Runs the fp32 network in fp64, and as it is at the variant's precision; images are fp32
    (N, 3, H, W)."""
    with run_once():
        truth = logits(copy.deepcopy(model).double()(images.double())).cpu()
        plain = copy.deepcopy(model).to(variant.dtype)
        with variant.context(images.device):
            eager = logits(plain(images.to(variant.dtype))).double().cpu()
    return Truth(truth, eager)


def of_inference(variant: Variant, known: Truth, timed: Sequence[Timed]) -> tuple[Parity, float]:
    """The verdict on what timed iterations gave for the drawn images, and the share of these (of
    segmentation: pixels) for which the class with the largest logit is the truth's."""
    truth, eager = known.logits, known.plain
    # The part that all images share says nothing of whether each was looked at.
    scale = (truth - truth.mean(0, keepdim=True)).square().mean().sqrt()
    if len(truth) == 1:
        scale = truth.square().mean().sqrt()

    def measure(which: Sequence[int], output: Tensor) -> Measure:
        rows = list(which)
        error, lost = (float((x - truth[rows]).square().mean().sqrt() / scale)
                       for x in (output, eager[rows]))  # fmt: skip
        return Measure(error, min(MOST_ERROR, MOST_TIMES * lost + FLOOR), lost)

    worst = max((measure(*one) for one in timed), key=badness)
    same = [output.argmax(1) == truth[list(which)].argmax(1) for which, output in timed]
    far = (
        f"a timed iteration's logits are {worst.error:.1e} from the fp32 network's in fp64, "
        f"{worst.allowed:.1e} allowed"
    )
    parity = Parity(
        status="pass" if worst.passed else "fail",
        failures=[] if worst.passed else [far],
        batch_size=len(truth),
        reference=f"fp64; plain eager {variant.precision} is {worst.baseline:.1e} from it",
        measures={"logits": as_recorded(worst)},
    )
    return parity, float(torch.cat([one.flatten() for one in same]).double().mean())


class Batches(Protocol):
    """measure.Images."""

    images: Tensor
    targets: Tensor

    def window(self, index: int) -> slice: ...


def of_training(
    model: nn.Module,
    variant: Variant,
    setting: Setting,
    watch: Watch,
    batches_of: Callable[[int], Batches],
) -> Parity:
    """The verdict on a training run.

    Args:
        model: the fp32 network; its weights do not matter.
        watch: has seen all steps.
        batches_of: the images and targets of a process of the group, by its rank.
    """
    parts = setting.parts or (setting.batch_size,)
    shares = [part / sum(parts) for part in parts]
    data = [batches_of(rank) for rank in range(len(parts))]

    def plain(
        before: State, number: int, precision: str
    ) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
        """steps.Plain. Of a group's training one process does all: the gradients of a step are
        those of all parts, each with its share of the whole batch."""
        network = recomputing(copy.deepcopy(model)).train()
        network.load_state_dict(before.weights | before.statistics, strict=False)
        for rank in sorted(range(len(parts)), key=lambda rank: rank != setting.rank):
            window = data[rank].window(number)
            images = data[rank].images[window].to(setting.device)
            targets = data[rank].targets[window].to(setting.device)
            with plain_arithmetic(precision, setting.device):
                loss = _loss(setting.network, network(images), targets)
            if rank == setting.rank:  # before a recomputed block sees the batch again
                own_loss = loss.item()
                buffers = dict(network.named_buffers())
                statistics = {name: buffers[name].clone() for name in before.statistics}
            (loss * shares[rank] * before.loss_scale).backward()
        gradients = {
            name: torch.zeros_like(weight)
            if weight.grad is None
            else weight.grad / before.loss_scale
            for name, weight in network.named_parameters()
        }
        return own_loss, gradients, statistics

    verdict = steps.audit(watch.steps, plain, variant.precision, setting.batch_size)
    set_arithmetic(variant.precision)
    return verdict


def _loss(network: Network, output: Any, targets: Tensor) -> Tensor:
    """The mean cross-entropy, and that of auxiliary classifiers by the weight of their paper."""
    outputs = output["out"] if isinstance(output, dict) else output
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    first, *others = (F.cross_entropy(one.float(), targets) for one in outputs)
    loss: Tensor = first + AUXILIARY_WEIGHT.get(network.name, 0.0) * sum(others)
    return loss


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

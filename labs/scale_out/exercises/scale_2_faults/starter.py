"""Trains a model in several processes, each on its part of every batch, without DDP. They should
train what one process trains with whole batches, and do not.

Shapes in the comments:
    B sequences of a batch   F features
"""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


def train(
    model: nn.Module, batches: list[tuple[Tensor, Tensor]], rank: int, size: int, rate: float
) -> tuple[list[float], dict[str, Tensor]]:
    """Trains a step on each batch.

    Args:
        model: the same weights on all processes.
        batches: inputs (B, F) and targets (B, 1) of all processes together.
        rank, size: which process this is, of how many.
        rate: of plain gradient descent.

    Returns:
        The loss of each step, which is the mean over the whole batch, and the weights after the
        step whose loss was the lowest. Both are the same on all processes.
    """
    losses: list[float] = []
    lowest, best = math.inf, {}
    for x, y in batches:
        own_x, own_y = x.tensor_split(size)[rank], y.tensor_split(size)[rank]  # (B / size, F)
        loss = F.mse_loss(model(own_x), own_y)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for weight in model.parameters():
                assert weight.grad is not None
                dist.all_reduce(weight.grad)  # the sum over all processes
                weight.add_(weight.grad, alpha=-rate / size)
        if loss.item() < lowest:
            lowest = loss.item()
            best = {name: weight.clone() for name, weight in model.state_dict().items()}
            dist.barrier()  # the next step begins when all have kept theirs
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean / size))
    return losses, best

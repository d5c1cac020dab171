"""The loop that was recorded for pipeline_2_trace. It gives the answers away: open it afterwards.

Without flags it prints the time of a step, with --fixed that without the fault.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence

if __name__ == "__main__":
    from workshop.needed import import_torch

    import_torch()

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from labs.data_pipeline.formats import Folder, Images
from workshop import errors
from workshop.arguments import parse
from workshop.versions import ROOT

DATASET = ROOT / "labs/data_pipeline/data/digits_1797_32"
"""Written by make_dataset.py."""
BATCH = 128
WORKERS = min(8, os.cpu_count() or 1)
WARMUP, STEPS = 5, 20
LARGEST_ANGLE = 0.3
"""In radians: a digit turned further might be another one."""
MEAN, DEVIATION = 0.35, 0.2


class Loop:
    """A network, and what a step does with a batch of images.

    Args:
        side: of the images, in pixels.
        fixed: without the fault that the exercise asks for.
    """

    def __init__(self, device: torch.device, side: int, *, fixed: bool) -> None:
        torch.manual_seed(42)
        self.device, self.fixed = device, fixed
        after = side // 4 - 1  # two convolutions of 3 x 3, each of which takes every second pixel
        self.model = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU()),
            *(nn.Conv2d(8, 16, 3, stride=2), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(16 * after**2, 10)),
        ).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.angles = torch.Generator().manual_seed(42)

    def step(self, images: Tensor, labels: Tensor) -> float:
        """Trains on a batch; its loss.

        Args:
            images: uint8 (batch, 3, height, width), on the host.
        """
        angles = LARGEST_ANGLE * (2 * torch.rand(len(images), generator=self.angles) - 1)
        if self.fixed:
            batch = prepared(images.to(self.device), angles.to(self.device))
        else:
            pairs = zip(images.split(1), angles.split(1), strict=True)
            batch = torch.cat([prepared(image, angle) for image, angle in pairs]).to(self.device)
        loss = F.cross_entropy(self.model(batch), labels.to(self.device))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def prepared(images: Tensor, angles: Tensor) -> Tensor:
    """Turns each image by its angle in radians, and normalises them.

    Args:
        images: uint8 (batch, 3, height, width).
        angles: (batch).
    """
    cosine, sine, zero = angles.cos(), angles.sin(), torch.zeros_like(angles)
    turned = torch.stack([cosine, -sine, zero, sine, cosine, zero], dim=1).view(-1, 2, 3)
    grid = F.affine_grid(turned, list(images.shape), align_corners=False)
    pixels = F.grid_sample(images / 255, grid, align_corners=False)
    return (pixels - MEAN) / DEVIATION


def batches(dataset: Images, workers: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Epoch after epoch."""
    loader = DataLoader(
        dataset, BATCH, shuffle=True, drop_last=True, num_workers=workers,
        persistent_workers=workers > 0,
    )  # fmt: skip
    while True:
        yield from loader


def timed(loop: Loop, source: Iterator[tuple[Tensor, Tensor]], steps: int) -> float:
    """The median time of a step with the wait for its batch, in ms."""
    seconds = []
    for step in range(WARMUP + steps):
        start = time.perf_counter()
        loop.step(*next(source))  # it ends with .item(), which waits for the device
        if step >= WARMUP:
            seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds)


def main(argv: Sequence[str] | None = None) -> int:
    """Times the loop; returns the exit status."""
    parser = argparse.ArgumentParser(description="Trains on PNG images; prints the time of a step.")
    parser.add_argument("--fixed", action="store_true", help="the loop without its fault")
    arguments = parse(parser, argv)
    return errors.exit_status(lambda: run(arguments.fixed), interrupted="interrupted")


def run(fixed: bool) -> int:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dataset = Folder(DATASET)
    loop = Loop(device, dataset[0][0].shape[-1], fixed=fixed)
    print(f"{timed(loop, batches(dataset, WORKERS), STEPS):.2f} ms a step of {BATCH} images")
    return errors.DONE


if __name__ == "__main__":
    sys.exit(main())

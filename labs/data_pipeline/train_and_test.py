"""A training that is tested after each epoch, as the tutorial's is: loss and accuracy on images
that no step has seen, and their curves. Nothing is timed."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import Subset

from labs import shared
from labs.data_pipeline.formats import Images
from labs.data_pipeline.loop import Loop, Resident, Settings, normalise
from labs.data_pipeline.make_dataset import DIGITS

HELD_OUT = 5
"""One image in five is held out."""
TEST_BATCH = 500
SETTINGS = Settings(on_device=True, resident=True)
"""Those of the rung `resident`. All rungs train the same network on the same batches."""


def split(images: Images) -> tuple[Subset, Subset]:
    """The images of the training, and those that are held out. A digit comes again after DIGITS
    images, in other colours: all of its images are on one side."""
    sides: tuple[list[int], list[int]] = [], []
    for index in range(len(images)):
        sides[index % DIGITS % HELD_OUT == HELD_OUT - 1].append(index)
    train, test = (Subset(images, side) for side in sides)
    return train, test


@torch.no_grad()
def test(loop: Loop, images: Resident) -> tuple[float, float]:
    """The mean loss and the accuracy on these images, not cropped."""
    loop.model.eval()
    loss = torch.zeros((), device=loop.device)
    correct = torch.zeros((), dtype=torch.long, device=loop.device)
    parts = zip(images.images.split(TEST_BATCH), images.labels.split(TEST_BATCH), strict=True)
    for pixels, labels in parts:
        logits = loop.model(normalise(pixels))
        loss += F.cross_entropy(logits, labels, reduction="sum")
        correct += (logits.argmax(1) == labels).sum()
    count = len(images.labels)
    return float(loss) / count, float(correct) / count


def run(
    images: Images,
    device: torch.device,
    *,
    epochs: int,
    batch_size: int,
    steps: int | None,
    seed: int,
    target: Path,
) -> None:
    """Trains, prints a line before the first epoch and after each, and draws the curves.

    Args:
        steps: of an epoch, at most.
        target: the picture's path.
    """
    train, held_out = split(images)
    loop = Loop(SETTINGS, train, device, batch_size, steps, images.classes, seed)
    tested = Resident(held_out, loop.order, device)
    assert isinstance(loop.loader, Resident)
    title = f"{images.path.parent.name}: {len(train):,} images, {len(held_out):,} held out"
    print(f"{title}; an epoch has {loop.order.steps} steps of {batch_size}")
    history = []
    for epoch in range(epochs + 1):
        for _ in loop.epoch(epoch) if epoch else ():
            pass
        loss, accuracy = test(loop, loop.loader)
        test_loss, test_accuracy = test(loop, tested)
        line = {"epoch": float(epoch), "training loss": loss, "held-out loss": test_loss}
        line |= {"training accuracy": accuracy, "held-out accuracy": test_accuracy}
        history.append(line)
        print(
            f"epoch {epoch}/{epochs}  loss {loss:.4f}, held out {test_loss:.4f}  "
            f"accuracy {accuracy:.2%}, held out {test_accuracy:.2%}",
            flush=True,
        )
    curves = {what: [f"training {what}", f"held-out {what}"] for what in ("loss", "accuracy")}
    shared.draw_curves(title, history, curves, target)
    print(f"Written: {target}")

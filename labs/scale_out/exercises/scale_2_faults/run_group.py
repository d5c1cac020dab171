"""Runs mine.py in several processes, and compares them with one that trains on whole batches.

    python run_group.py
    python run_group.py --batch-size 5 --processes 3

A group that has not ended after some seconds hangs: each of its processes then shows the line where
it waits, and all are ended.
"""

import argparse
import copy
import faulthandler
import math
import multiprocessing
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    from workshop.needed import import_torch

    import_torch()

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from workshop import errors
from workshop.arguments import count, parse
from workshop.exercises.frame import MINE, import_file

FEATURES, STEPS, RATE = 8, 12, 0.05
HANGS_S = 5.0
"""A step takes less than a millisecond."""
CLOSE = 1e-9
"""In fp64."""
Trained = tuple[list[float], dict[str, Tensor]]
"""Result of the starter's `train`."""


@dataclass(frozen=True)
class Outcome:
    """Result of one process."""

    trained: Trained | None
    rows: int
    """Sequences that its model got."""
    message: str = ""
    """The error that it ended with, or the line where it waited."""
    hangs: bool = False


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def make_batches(batch_size: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS, batch_size, FEATURES, generator=draw, dtype=torch.float64)
    return [(one, one[:, :1] * one[:, 1:2] + one.sum(1, keepdim=True)) for one in x]


def alone(batches: Sequence[tuple[Tensor, Tensor]]) -> Trained:
    """One process, with whole batches."""
    model, losses, lowest, best = make_model(), [], math.inf, {}
    for x, y in batches:
        loss = F.mse_loss(model(x), y)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for weight in model.parameters():
                assert weight.grad is not None
                weight.add_(weight.grad, alpha=-RATE)
        losses.append(loss.item())
        if losses[-1] < lowest:
            lowest, best = losses[-1], copy.deepcopy(model.state_dict())
    return losses, best


def together(path: Path, batch_size: int, size: int) -> list[Outcome]:
    """The processes' outcomes by rank, of `train` in a file."""
    server = multiprocessing.get_context("forkserver")  # one process that has imported PyTorch
    server.set_forkserver_preload(["torch.distributed"])
    with tempfile.TemporaryDirectory() as folder:
        shared = path, batch_size, size, Path(folder), HANGS_S
        started = [server.Process(target=_process, args=(rank, *shared)) for rank in range(size)]
        for process in started:
            process.start()
        # Each process ends, or shows where it waits.
        stacks = [Path(folder, f"stack{rank}") for rank in range(size)]
        while any(
            process.is_alive() and not (stack.exists() and stack.stat().st_size)
            for process, stack in zip(started, stacks, strict=True)
        ):
            time.sleep(0.05)
        # Read before any is killed: the others would get an error then.
        outcomes = [_outcome(Path(folder), rank) for rank in range(size)]
        for process in started:
            process.kill()
            process.join()
        return outcomes


def _process(
    rank: int, path: Path, batch_size: int, size: int, folder: Path, hangs_s: float
) -> None:
    torch.set_num_threads(1)
    with (folder / f"stack{rank}").open("w") as stack:
        faulthandler.dump_traceback_later(hangs_s, file=stack)
        store = dist.FileStore(str(folder / "store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        model, seen = make_model(), []
        model.register_forward_pre_hook(lambda _, batch: seen.append(len(batch[0])))
        trained, text = None, ""
        try:
            trained = import_file(path).train(model, make_batches(batch_size), rank, size, RATE)
        except Exception as error:
            text = f"{type(error).__name__}: {error!s:.200}"
        outcome = {"trained": trained, "rows": sum(seen), "message": text}
        torch.save(outcome, folder / f"outcome{rank}")
        dist.barrier()  # a process that ends would fail the others' collectives


def _outcome(folder: Path, rank: int) -> Outcome:
    path = folder / f"outcome{rank}"
    if path.exists():
        return Outcome(**torch.load(path, weights_only=True))
    stack = (folder / f"stack{rank}").read_text()
    # The innermost line comes first: of PyTorch's, and then of the file.
    called = re.findall(r'File ".*/(\w+\.py)", line (\d+) in (\w+)', stack)
    inner = next((function for *_, function in called if hasattr(dist, function)), "")
    for name, line, function in called:
        if function == "train":
            where = f"{name}, line {line}, in {function}"
            return Outcome(None, 0, f"waits in {inner}: {where}", hangs=True)
    return Outcome(None, 0, "has ended without a result")


def difference(one: Trained, other: Trained) -> str:
    """The first thing in which two trainings differ; "" if there is none."""
    losses = list(zip(one[0], other[0], strict=False))
    if len(one[0]) != len(other[0]):
        return f"in the number of losses: {len(one[0])} for {len(other[0])} steps"
    for step, (loss, right) in enumerate(losses, 1):
        if not math.isclose(loss, right, rel_tol=CLOSE):
            return f"from step {step} on: loss {loss:.6f}, but one process has {right:.6f}"
    if one[1].keys() != other[1].keys() or not all(
        torch.allclose(one[1][name], weight, rtol=CLOSE, atol=CLOSE)
        for name, weight in other[1].items()
    ):
        return "in the weights that were kept: they are of another step, or missing"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Compares from the command line; returns the exit status."""
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--batch-size", type=count, default=4, metavar="N", help="of all processes (default 4)")
    add("--processes", type=count, default=2, metavar="N", help="default 2")
    arguments = parse(parser, argv)
    return errors.exit_status(
        lambda: run(arguments.batch_size, arguments.processes), interrupted="interrupted"
    )


def run(batch_size: int, processes: int) -> int:
    path = Path(__file__).with_name(MINE)
    import_file(path)  # an error in the file itself is printed once
    right, status = alone(make_batches(batch_size)), errors.DONE
    for rank, outcome in enumerate(together(path, batch_size, processes)):
        text = outcome.message
        if outcome.trained:
            differs = difference(outcome.trained, right)
            text = f"differs {differs}" if differs else "trains as one process does"
        if text != "trains as one process does":
            status = errors.ANSWER_IS_NO
        print(f"process {rank}: {text}")
    return status


if __name__ == "__main__":
    sys.exit(main())

"""The inference benchmark in two processes: each has its part of the batch, the remainder too."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from labs.inference_benchmark import group as groups
from labs.inference_benchmark import networks
from labs.inference_benchmark.group import Group
from labs.inference_benchmark.modes import Setting
from workshop import labs
from workshop.errors import WorkshopError
from workshop.labs import LabRun
from workshop.versions import ROOT

PROGRAM = ROOT / "labs" / "inference_benchmark" / "micro_benchmarking_pytorch.py"
CPU, NETWORK = torch.device("cpu"), networks.get_network("resnet18")
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
ARGUMENTS = (
    "--network shufflenet_v2_x0_5 --batch-size 5 --iterations 3 --warmup-iterations 1 --device cpu"
).split()


@pytest.mark.parametrize(
    ("batch", "world_size", "parts"),
    [(5, 2, (3, 2)), (6, 2, (3, 3)), (9, 4, (3, 2, 2, 2)), (4, 4, (1, 1, 1, 1)), (7, 1, (7,))],
)
def test_no_image_is_lost_and_each_counts_the_same(
    batch: int, world_size: int, parts: tuple[int, ...]
) -> None:
    assert Group(world_size=world_size).parts(batch) == parts
    settings = [Setting(NETWORK, CPU, n, 1, parts, rank) for rank, n in enumerate(parts)]
    for one in settings:  # DDP divides by the number of processes
        assert one.loss_weight / world_size == pytest.approx(one.batch_size / batch)
    assert len({one.images_seed() for one in settings}) == world_size


@pytest.mark.parametrize("url", ("foo://x", "tcp://127.0.0.1"))
def test_a_url_where_nothing_can_meet_is_one_line(url: str) -> None:
    with pytest.raises(WorkshopError, match="--dist-url"):
        groups.join(Group(world_size=2, method=url), CPU, None)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["inference", "training"])
def test_torchrun_splits_a_batch_with_a_remainder(tmp_path: Path, mode: str) -> None:
    command = [sys.executable, *TORCHRUN, str(free_port()), str(PROGRAM), *ARGUMENTS]
    done = subprocess.run(
        [*command, "--mode", mode, "--kineto", "--output-dir", str(tmp_path)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[process 0] Local batch size: 3" in done.stdout
    assert "[process 1] Local batch size: 2" in done.stdout
    assert "Per-process throughput" in done.stdout and "GPU" not in done.stdout
    run = the_run(tmp_path)
    check(run)
    traces = {path.name for path in tmp_path.glob(f"traces/{run.session}/trace*")}
    assert traces == {"trace5_rank0.json", "trace5_rank1.json"}


@pytest.mark.slow
def test_processes_started_by_hand_find_each_other(tmp_path: Path) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    started = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), *ARGUMENTS, "--distributed_dataparallel", "--rank", rank,
             "--world-size", "2", "--dist-url", url, "--output-dir", str(tmp_path)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in "01"
    ]  # fmt: skip
    for process in started:
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 0, said
    check(the_run(tmp_path))


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def the_run(folder: Path) -> LabRun:
    """The one result file that a group writes."""
    (path,) = folder.glob("runs/*/*.json")
    return labs.load(path)


def check(run: LabRun) -> None:
    assert (run.status, run.proof.status) == ("complete", "pass")
    assert (run.units_per_step, run.metrics["processes"]) == (5, 2)
    assert len(run.step_ms) == 3
    alone, efficiency = run.metrics["one_process_per_s"], run.metrics["scaling_efficiency"]
    assert isinstance(alone, float)
    assert efficiency == pytest.approx(5e3 / sorted(run.step_ms)[1] / alone / 2)

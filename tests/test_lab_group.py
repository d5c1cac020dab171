"""The inference benchmark in two processes: each has its part of the batch, the remainder too."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from stored_runs import the_run
from test_lab_scale_out import free_port

from labs.group import VARIABLES, Group
from labs.inference_benchmark import micro_benchmarking_pytorch as benchmark
from labs.inference_benchmark import networks
from labs.inference_benchmark.modes import Setting
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
def test_no_image_is_lost_and_each_counts_the_same(batch, world_size, parts) -> None:
    assert Group(size=world_size).parts(batch) == parts
    settings = [Setting(NETWORK, CPU, n, 1, parts, rank) for rank, n in enumerate(parts)]
    for one in settings:  # DDP divides by the number of processes
        assert one.loss_weight / world_size == pytest.approx(one.batch_size / batch)
    assert len({one.images_seed() for one in settings}) == world_size


class Placed(BaseException):
    """The process has chosen its GPU."""


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with four GPUs, as far as the choice of one."""

    def set_device(device: torch.device) -> None:
        raise Placed(str(device))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)


def torchrun(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """The environment that torchrun gives process "1 of 2", or "5 of 8, 4 a machine"."""
    rank, world_size, *local = re.findall(r"\d+", place)
    here = int(local[0]) if local else int(world_size)
    values = (rank, int(rank) % here, world_size, "localhost", 29500, here)
    for name, value in zip((*VARIABLES, "LOCAL_WORLD_SIZE"), values, strict=True):
        monkeypatch.setenv(name, str(value))


BY_HAND = "--distributed_dataparallel --world-size"


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("flags", "place", "device"),
    [
        ("", "", "cuda:0"),
        ("--device_ids 1", "", "cuda:1"),
        ("--device_ids 1 --compare precision", "", "cuda:1"),
        ("--device_ids 3,2 --dataparallel", "", "cuda:3"),
        (f"{BY_HAND} 2 --rank 1 --device_ids 2,3", "", "cuda:3"),
        (f"{BY_HAND} 8 --rank 6 --device_ids 2", "", "cuda:2"),  # another machine's numbers
        ("", "1 of 2", "cuda:1"),
        ("--device_ids 2,3", "1 of 2", "cuda:3"),
        ("--device_ids 3,2,1,0", "5 of 8, 4 a machine", "cuda:2"),
    ],
)
def test_a_process_runs_on_the_gpu_that_is_named(flags, place, device, monkeypatch) -> None:
    if place:
        torchrun(monkeypatch, place)
    with pytest.raises(Placed, match=f"^{device}$"):
        benchmark.main(["--network", "resnet18", *flags.split()])


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("flags", "place", "message"),
    [
        ("--device_ids 4", "", "PyTorch sees 4 GPUs"),
        ("--device_ids 2,2", "0 of 2", "a GPU twice"),
        ("--device cuda:1", "1 of 2", "one GPU for 2 processes"),
    ],
)
def test_a_gpu_that_is_named_wrongly_is_one_line(
    flags, place, message, monkeypatch, capsys
) -> None:
    if place:
        torchrun(monkeypatch, place)
    assert benchmark.main(["--network", "resnet18", *flags.split()]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error


LEAVES_A_GROUP = """
import contextlib, pathlib, torch
from torch import nn
from labs import group

def threads():
    names = []
    for task in pathlib.Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # one that ends just now
            names.append(task.read_text().strip())
    return [name for name in names if "gloo" in name]

def train():
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
    cycle = lambda: (model, cycle)
    model(torch.ones(2, 3)).sum().backward()

with group.member(group.find_group(), torch.device("cpu")):
    train()
    print(bool(threads()))
print(threads())
"""


def test_a_group_that_is_left_keeps_no_thread(type_command) -> None:
    """DDP's model, in a cycle, would: one that still lets go of a result when Python ends aborts
    the process."""
    place = dict.fromkeys(("RANK", "LOCAL_RANK"), "0") | {"WORLD_SIZE": "1"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    finished = type_command("python", "-c", LEAVES_A_GROUP, **place, **address)
    assert finished.stdout.split("\n")[:2] == ["True", "[]"], finished.stderr


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


def check(run: LabRun) -> None:
    assert (run.status, run.gate.status) == ("complete", "pass")
    assert (run.units_per_step, run.metrics["processes"]) == (5, 2)
    assert len(run.step_ms) == 3
    alone, efficiency = run.metrics["one_process_per_s"], run.metrics["scaling_efficiency"]
    assert isinstance(alone, float)
    assert efficiency == pytest.approx(5e3 / sorted(run.step_ms)[1] / alone / 2)

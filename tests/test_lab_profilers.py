"""The versions' profiler scripts on a lab's program: the inference benchmark's --profile-steps, its
record, and what a profile of it answers."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import HANGS_S
from stored_runs import lab_run
from test_lab_inference import Variant, bench
from test_profile_scripts import NVIDIA_GPU, TOOLS, Machine, finished, problems

from labs.group import Group
from labs.inference_benchmark import counts, measure, profiling
from workshop import records
from workshop.collection import Collection
from workshop.errors import WorkshopError
from workshop.labs import LabRun
from workshop.profilers import advisor, kernel_file, load, profile_run, programs, summary
from workshop.profilers.table import HostCall, Kernel, KernelTable, Timeline
from workshop.versions import ROOT

LAB = programs.PROGRAMS["inference_benchmark"]
FOLDER = LAB.path.parent
FLAGS = "--network resnet50 --batch-size 32 --fp16 1".split()
CPU = torch.device("cpu")
QUESTIONS = ["top-kernels", "launches", "copies", "host-and-gpu", "compute-or-memory"]


# --- the scripts ---------------------------------------------------------------------------------


class LabMachine(Machine):
    """A Machine whose checkout has a lab too, which is what its scripts profile."""

    def __init__(self, folder: Path, program: Path = LAB.path) -> None:
        super().__init__(folder)
        self.folder = self.root / program.parent.relative_to(ROOT)
        self.folder.mkdir(parents=True)
        (self.folder / program.name).touch()
        for link in program.parent.glob("run_*"):
            (self.folder / link.name).symlink_to(link.readlink())


@pytest.mark.parametrize(
    ("program", "tools", "flag", "own"),
    [
        (LAB.path, TOOLS, "--profile-steps", FLAGS),
        (
            ROOT / "labs" / "cifar10_roofline" / "train.py",
            ("ncu", "rocprofv3", "rocprof_compute"),
            "--profile-one-step",
            ["--amp"],
        ),
    ],
    ids=["inference_benchmark", "cifar10_roofline"],
)
def test_every_command_profiles_the_lab_s_program(program, tools, flag, own, tmp_path) -> None:
    machine = LabMachine(tmp_path, program)
    for tool in tools:
        commands = machine.dry_run(tool, "--", *own)
        assert [problem for command in commands for problem in problems(command)] == []
        started = [words for words in commands if flag in words]
        assert started
        for words in started:
            after = words[words.index(str(machine.folder / program.name)) + 1 :]
            assert flag in after and " ".join(own) in " ".join(after)


def test_flags_that_do_not_go_with_a_profiler(tmp_path: Path) -> None:
    """By the scripts in bash, which know two of them, and by those in Python."""
    done = LabMachine(tmp_path).run("ncu", "--", "--iterations", "10")
    assert done.returncode == 2 and "use --steps of" in done.stderr
    with pytest.raises(WorkshopError, match="--compare does not go with a profiler"):
        profile_run.plan(LAB, ["--network", "resnet18", "--compare", "precision"], 1)


# A Python that says it sees the GPU, and is one.
REAL_PYTHON = f'case "$1$2" in -c*is_available*) exit 0 ;; esac\nexec "{sys.executable}" "$@"\n'
RUN_PROGRAM = 'while case $1 in */my_python) false ;; esac; do shift; done; "$@" || exit\n'
NSYS_ROWS = """Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),Name
80.0,8000000,40,200000,1,100000,300000,void cudnn::implicit_convolve_sgemm<float>()
20.0,2000000,60,33333,1,10000,60000,void at::native::batch_norm_kernel<float>()
"""
NSYS = f"""case $1 in
stats) for word; do case $word in --output=*) out=${{word#*=}} ;; esac; done
  printf '%s' '{NSYS_ROWS}' >"$out"_cuda_gpu_kern_sum.csv ;;
*) for word; do case $word in --output=*) echo x >"${{word#*=}}.nsys-rep" ;; esac; done
  {RUN_PROGRAM} ;;
esac"""
NCU_ROWS = ROOT / "tests" / "fixtures" / "profilers" / "ncu" / "ncu_raw_h200.csv"
NCU = f"""case "$*" in *--query*) exit ;; *--import*) cat '{NCU_ROWS}'; exit ;; esac
for word; do case $last in --export) echo x >"$word" ;; esac; last=$word; done
{RUN_PROGRAM}"""


@pytest.mark.slow
@pytest.mark.parametrize(("tool", "body", "first"), [("nsys", NSYS, "80.0%"), ("ncu", NCU, "%")])
def test_a_tool_that_runs_the_program(tool: str, body: str, first: str, tmp_path: Path) -> None:
    """The scripts start the true program by a stand-in of the tool, which leaves its tables."""
    machine = LabMachine(tmp_path)
    shutil.rmtree(machine.root / "workshop")
    for name in ("workshop", "labs"):
        shutil.rmtree(machine.root / name, ignore_errors=True)
        (machine.root / name).symlink_to(ROOT / name)
    machine.install(my_python=REAL_PYTHON, **{tool: body}, **NVIDIA_GPU)
    words = "--network resnet18 --batch-size 2 --warmup-iterations 1 --device cpu".split()
    done = machine.run(tool, "--steps", "2", "--", *words, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    record = load.recorded(machine.out)
    assert isinstance(record, LabRun) and (record.status, record.step_ms) == ("profiled", [])
    assert record.options["num_steps"] == 2
    found = advisor.advise(load.load(machine.out), record)
    assert [advice.finding for advice in found[:5]] == QUESTIONS
    assert first in found[0].sentence


@pytest.mark.slow
def test_torch_profiler_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, "run_pytorch_profiler.py", "--steps", "2", "--output-dir", tmp_path]
    done = subprocess.run(
        [*command, *"-- --network resnet18 --batch-size 2 --device cpu".split()],
        cwd=FOLDER,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "trace").glob("inference_benchmark.*.pt.trace.json.gz"))
    table, record = load.load(tmp_path / "kernels.json"), load.recorded(tmp_path)
    assert (table.what, table.steps, set(table.phases_ns)) == ("operator", 2, {"forward"})
    assert isinstance(record, LabRun) and record.options["num_steps"] == 2
    assert record.flops_per_step == pytest.approx(2 * 3.63e9, rel=0.01)  # of the whole batch
    assert "top 5 operators take" in done.stdout and "was not compared" in done.stdout
    assert "USDT" not in done.stdout + done.stderr and "Iterations: " not in done.stdout
    convolutions = next(k for k in table.kernels if k.name == "aten::conv2d")
    assert convolutions.calls == 2 * 20


# --- the program ---------------------------------------------------------------------------------


def test_a_trace_of_the_benchmark_has_its_record(tmp_path: Path) -> None:
    """--kineto, with the part of the batch that this process has."""
    ours = bench(Variant(), batch=4)
    ours.run.units_per_step, ours.run.flops_per_step = 8, 8 * ours.counts.flops
    measure.measure(ours, 2, 1)
    lines: list[str] = []
    profiling.trace(ours, tmp_path, Group(), lines.append)
    path = Path(lines[0].split()[-1])
    record = load.recorded(path)
    assert isinstance(record, LabRun)
    assert (record.units_per_step, record.flops_per_step) == (4, 4 * ours.counts.flops)
    found = advisor.advise(load.load(path), record)
    assert [advice.finding for advice in found[:5]] == QUESTIONS


# --- what a profile answers ----------------------------------------------------------------------


def kernel(category: str, ms: float, name: str = "", calls: int = 10, **more: float) -> Kernel:
    return Kernel(name or category, category, calls, ms * 1e6, **more)


KERNELS = [
    kernel("GEMM", 40),
    *(kernel("elementwise", ms, f"pass_{ms}") for ms in (20, 15, 10)),
    kernel("copy", 6, "Memcpy HtoD (Pageable -> Device)"),
    kernel("copy", 4, "copy_kernel"),
    kernel("norm", 5),
]  # 100 ms

ON_CPU = [
    kernel("GEMM", 55, "aten::mm"),
    *(kernel("copy", 10, f"aten::{name}", 2) for name in ("to", "_to_copy", "copy_")),
    *(kernel("copy", 7.5, f"aten::{name}", 2) for name in ("stack", "cat")),
]  # 100 ms


def lab_profile(span_ms: float | None = 125.0, **changes: Any) -> tuple[KernelTable, LabRun]:
    """Two steps of 32 images on an H200: 1 TFLOP and 10 GB each."""
    line = Timeline(span_ms * 1e6, 100e6) if span_ms else None
    calls = {"cudaLaunchKernel": HostCall(70, 14e6)}
    table = KernelTable(Path("trace.json"), "torch.profiler", KERNELS, device="NVIDIA H200",
                        timeline=line, steps=2, host_calls=calls)  # fmt: skip
    record = lab_run(status="profiled", step_ms=[], flops_per_step=1e12, units_per_step=32)
    record.lab, record.device = "inference_benchmark", {"name": "NVIDIA H200"}
    record.options |= {"precision": "fp16"}
    record.metrics = {"flop_per_byte": 100.0}
    record.ceiling_tflops = None
    for name, value in changes.items():
        target = record if hasattr(record, name) else table
        setattr(target, name, value)
    return table, record


def answer(question: str, **changes: Any) -> str:
    found = {advice.finding: advice for advice in advisor.advise(*lab_profile(**changes))}
    return found[question].sentence


def counted(flops: float, bytes_: float) -> list[Kernel]:
    return [dataclasses.replace(KERNELS[0], total_ns=1e8, flops=flops, bytes=bytes_)]


@pytest.mark.parametrize(
    ("question", "changes", "words"),
    [
        ("top-kernels", {}, "The top 5 kernels take 91% of the kernels' time: GEMM 40.0%, pass_20"),
        ("launches", {}, "It runs 35 kernels a step (70 in 2), 1.43 ms each on average."),
        ("copies", {}, "10 copies a step; between host and device 6.0%, on the device 4.0%"),
        ("copies", {"what": "operator", "kernels": ON_CPU}, "Copies: 2 copies a step, 45.0% of"),
        ("host-and-gpu", {}, "take 7 ms a step; the GPU works 80% of the time (50 ms a step)"),
        ("host-and-gpu", {"what": "operator"}, "No GPU took part: 50 ms a step"),
        # The H200's fp16 rate and bandwidth meet at 206 FLOP a byte, its fp32 ones at 14.
        ("compute-or-memory", {}, "32 images needs 1,000 GFLOP and 10 GB: 100 FLOP a byte;"),
        ("compute-or-memory", {}, "(data sheet) meet at 206: memory-bound"),
        ("compute-or-memory", {"kernels": counted(9e12, 1e10)},
         "The profiler counted 9,000 GFLOP and 10 GB: 900 FLOP a byte"),
        ("compute-or-memory", {"device": {"name": "a CPU"}, "ceiling_tflops": 1.0},
         "This device's bandwidth is not known, while a large product reached 1 TFLOP/s"),
        ("compute-or-memory", {"device": {"name": "a CPU"}, "ceiling_tflops": 1.0,
                               "metrics": {"flop_per_byte": 100.0, "ceiling_gbs": 50.0}},
         "(measured) meet at 20: compute-bound"),
    ],
)  # fmt: skip
def test_answers(question: str, changes: dict[str, Any], words: str) -> None:
    assert words in answer(question, **changes)


def test_the_advice_names_the_lab_s_flags_and_no_version() -> None:
    found = advisor.advise(*lab_profile())
    assert [advice.finding for advice in found[:5]] == QUESTIONS
    rest = {advice.finding: advice.treatment for advice in found[5:]}
    assert "--fold-norms" in rest["elementwise-bound"] and "--channels-last" in rest["GEMM"]
    text = " ".join(advice.sentence + advice.treatment for advice in found)
    assert not re.search(r"\bV[1-4]\b|trainer\.py|training", text)


def test_a_lab_s_profile_in_the_collection_and_on_the_summary_page(tmp_path: Path) -> None:
    table, record = lab_profile()
    folder = tmp_path / "profiles" / LAB.key
    kernel_file.write(table, folder / "nsys")
    records.save(record, folder / "nsys" / "run.jsonl")
    collection = Collection([tmp_path])
    collection.refresh()
    (profile,) = collection.profiles
    assert (profile.run, profile.lab, profile.device) == (None, record, "NVIDIA H200")
    assert collection.broken == [] and collection.lab_runs == []
    outcome = finished("nsys", exit_status=0, filled=True)
    content = summary.sum_up(LAB, [outcome], FLAGS, folder)
    assert content["configuration"] == f"{record.subject}: {record.variant}"
    assert content["headline"].startswith("elementwise-bound")
    written = summary.write(content, folder)
    assert f'href="{LAB.key}/index.html"' in written[-1].read_text()
    assert json.loads((folder / "summary.json").read_text())["version"] == LAB.key


def test_a_module_has_the_operations_and_bytes_of_all_its_calls() -> None:
    """And of what it calls itself: an addition."""

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 3, 1)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = images + self.conv(self.conv(images))
            return out

    one = bench(Variant(), batch=2)
    one.model = torch.nn.Sequential(Twice())
    one.counts = counts.count(one.model, torch.ones(1, 3, 2, 2))
    one.run.phase_ms = {name: [1.0] for name in (profiling.WHOLE, "0", "0.conv")}
    *_, block, conv = profiling._report(one, 1, Group())
    flop, moved, weights = 2 * 2 * 72, 2 * (24 + 24 + 36), 2 * 12
    assert "MACs, 100.0%, " in block and block.endswith(f", {flop / 4 / (moved + weights):.1f}")
    assert "MACs, 100.0%, " in conv and conv.endswith(f", {flop / 4 / (96 + weights):.1f}")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_layers_are_timed_at_the_precision_of_the_run(precision: str) -> None:
    seen = set()

    class Watched(torch.nn.Conv2d):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            seen.add((images.dtype, images.is_contiguous(memory_format=torch.channels_last)))
            return super().forward(images)

    one = bench(Variant(precision, channels_last=True), batch=2)
    one.model = torch.nn.Sequential(Watched(3, 8, 1))
    assert set(profiling.layer_ms(one)) == {profiling.WHOLE, "0"}
    assert seen == {(one.variant.dtype, True)}

"""Result files for tests, made of the checked-in ones."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

from workshop import records
from workshop.labs import LabRun
from workshop.results import Parity, RunResult

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "results" / "reference"
PARTS = (
    "runs/20261129-191426-351a97.jsonl",  # small, bf16
    "runs/20261129-191803-29d68a.jsonl",  # medium, bf16
    "once/runs/20261122-102718-cc94dc.jsonl",  # small, fp16, fp32 and tf32
    "once/runs/20261122-164643-79a72b.jsonl",  # large, bf16
    "profiles/v1",
    "profiles/v3/pytorch_profiler",
    "kernels",
    "harness",
    "ceilings",
    "waterfall_v4/runs",
    "sweep_batch_size/runs",
)
"""Some of each kind of result of the H200."""


def select(folder: Path) -> Path:
    """Fills a folder with PARTS, a profile of a CPU and a session of a lab."""
    cpu = Path("cpu_amd_epyc", "profiles", "v1")
    for part in (cpu, *(Path("nvidia_h200", part) for part in PARTS)):
        (folder / part).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (REFERENCE / part).is_dir() else shutil.copy
        copy(REFERENCE / part, folder / part)
    write_lab(folder / "lab", *lab_session())
    return folder


def reference(
    version: str = "v1", preset: str = "small", precision: str = "bf16"
) -> dict[str, Any]:
    """A run of the H200 that passed the gate, as JSON has it."""
    wanted = (version, preset, precision, "pass")
    for path in records.files_in(REFERENCE / "nvidia_h200"):
        for run in records.load_runs(path, RunResult):
            if (run.version, run.config_name, run.precision, run.gate.status) == wanted:
                return dataclasses.asdict(run)
    raise AssertionError("no such reference run")


def lines(content: dict[str, Any]) -> str:
    """The file of a comparison that has this run alone."""
    own = dict(content)
    shared = {name: own.pop(name) for name in ("session", "device", "software", "git_commit")}
    head = {"schema_version": 2, **shared, "command": own.pop("parent_command")}
    return f"{json.dumps(head)}\n{json.dumps(own)}\n"


def write(folder: Path, content: dict[str, Any], name: str = "a", **changes: Any) -> Path:
    """A comparison's file of one run, with some fields changed; another name is another file."""
    content = content | changes
    path = folder / "runs" / f"{content['session']}_{content['version']}_{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(lines(content), encoding="utf-8")
    return path


def lab_run(variant: str = "fp32", ms: float = 10.0, **changes: Any) -> LabRun:
    """A run of a lab as its program writes it, its steps around `ms`."""
    fields: dict[str, Any] = {
        "lab": "inference_benchmark",
        "session": "20261123-100000-aaaaaa",
        "subject": "resnet50, 32 x 3 x 224 x 224",
        "variant": variant,
        "unit": "images",
        "units_per_step": 32,
        "device": {"type": "cuda", "name": "NVIDIA H200"},
        "software": {"torch": "2.13.0"},
        "git_commit": "0123456789ab",
        "created": "2026-11-23T10:00:00+00:00",
        "baseline": "fp32",
        "command": ["python", "micro_benchmarking_pytorch.py"],
        "step_ms": [ms, 0.9 * ms, 1.1 * ms],
        "memory_mb": {"peak": 2000.0, "weights": 100.0, "source": "allocator"},
        "gate": Parity(status="pass"),
        "flops_per_step": 2.64e11,
        "peak_tflops": 60.0,
        "peak_source": "data sheet",
        "ceiling_tflops": 52.8,
    }
    return LabRun(**(fields | changes))


def lab_session(**changes: Any) -> list[LabRun]:
    """Two processes each of a baseline and of a variant twice as fast, and one with a red proof."""
    red = Parity(status="fail", failures=["logits: 0.3 of allowed 0.01"])
    found = [
        *(lab_run("fp32", ms, **changes) for ms in (10.0, 10.1)),
        *(lab_run("fp16, channels-last", ms, **changes) for ms in (5.0, 5.05)),
        lab_run("fp16, wrong", 1.0, status="gate failed", gate=red, **changes),
    ]
    for second, run in enumerate(found):
        run.created = f"2026-11-23T10:00:0{second}+00:00"
    return found


def content(path: Path) -> dict[str, Any]:
    """The run of a file that has one, as JSON has it."""
    return dataclasses.asdict(records.load_run(path))


def the_run(folder: Path) -> LabRun:
    """The only run of a lab below a folder."""
    (run,) = records.load_folder(folder, LabRun)
    return run


def write_lab(folder: Path, *runs: LabRun) -> list[Path]:
    return [records.add(run, folder) for run in runs]


def call_run(**changes: Any) -> LabRun:
    """A record as a benchmark of calls begins."""
    blank: dict[str, Any] = {"unit": "calls", "units_per_step": 1, "baseline": "", "step_ms": []}
    blank |= {"gate": Parity(), "memory_mb": {}, "flops_per_step": None, "metrics": {}}
    return lab_run(**{"variant": ""} | blank | changes)

"""The script that measures reference results: what it types, with a stand-in for Python."""

import os
import subprocess
from pathlib import Path

import pytest
import torch_tensor_ops_bench

from analysis_tools import compare_versions, roofline_analysis
from labs.cifar10_roofline import measure_table
from labs.data_pipeline import measure_pipeline
from labs.inference_benchmark import request
from labs.text_generation import measure_engines
from workshop import determinism
from workshop.arguments import parser_of
from workshop.kernels import benchmark

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "results" / "reference" / "measure.sh"
PARSERS = {
    "compare_versions.py": lambda: parser_of(compare_versions.Options),
    "roofline_analysis.py": lambda: parser_of(roofline_analysis.Options),
    "workshop.determinism": lambda: parser_of(determinism.Options),
    "workshop.kernels.benchmark": lambda: parser_of(benchmark.Options),
    "micro_benchmarking_pytorch.py": request.build_parser,
    "torch_tensor_ops_bench.py": torch_tensor_ops_bench.build_parser,
    "measure_table.py": measure_table.build_parser,
    "measure_pipeline.py": measure_pipeline.build_parser,
    "measure_engines.py": measure_engines.build_parser,
}
OF_SEVERAL = "scale_out"
"""A study that takes all GPUs."""
STUDIES = (
    "large ladder profiles cifar10 pipeline text_generation inference_networks inference_ladder "
    "inference_compare inference_peers waterfall_v4 waterfall_v3 sweep_seq_len once "
    "inference_training sweep_hidden_dim sweep_batch_size float8 kernels inference_ops "
    f"inference_profiles harness ceilings determinism {OF_SEVERAL}"
).split()
STAND_IN = """#!/usr/bin/env bash
[[ $1 != -c ]] || { echo "$COUNT" && exit; }
(IFS=$'\t' && echo "$*") >>"$TYPED"
echo "on ${CUDA_VISIBLE_DEVICES-all}, $TRITON_CACHE_DIR"
if [[ $1 == *run_pytorch_profiler.py ]]; then
  mkdir -p "$3" && echo "$1" | tee "$3/kernels.json" >"$3/run.jsonl"
fi
[[ "$*" != *--sweep* ]] || exit "$END"
"""


@pytest.fixture
def measure(tmp_path):
    """Runs the script from another folder; its end, and the commands that it typed."""
    python, typed = tmp_path / "python", tmp_path / "typed"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    typed.touch()
    (tmp_path / "temporary").mkdir()

    def run(
        *words: str, status: int = 0, **changes: str
    ) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        environment = {"PYTHON": str(python), "TYPED": str(typed), "END": str(status)}
        environment |= {"COUNT": "1", "TMPDIR": str(tmp_path / "temporary")} | changes
        done = subprocess.run(
            ["bash", SCRIPT, *words],
            cwd=tmp_path,
            env=os.environ | environment,
            capture_output=True,
            text=True,
        )
        return done, typed.read_text().splitlines()

    return run


def test_every_command_is_one_that_its_tool_knows(measure, tmp_path) -> None:
    done, typed = measure("new folder")
    assert done.returncode == 0, done.stderr
    parsed = []
    for line in typed:
        tool, *flags = line.removeprefix("-m\t").split("\t")
        name = Path(tool).name
        if name in PARSERS:
            arguments = PARSERS[name]().parse_args(flags)
            parsed.append(name)
            folder = arguments.results if name == "roofline_analysis.py" else arguments.output_dir
            if "labs/" in tool:
                folder = folder.parent
                assert folder.name in ("inference_benchmark", "new folder")
            assert (tmp_path / "new folder") in (folder, folder.parent)
    assert set(parsed) == set(PARSERS)
    caches = {line for line in done.stdout.splitlines() if line.startswith("on all, ")}
    assert len(caches) == len(STUDIES) - 1
    assert f"{OF_SEVERAL}: left out, since it takes several GPUs\n" in done.stderr
    kept = sorted((tmp_path / "new folder" / "profiles").glob("v*/pytorch_profiler/*.json*"))
    assert len(kept) == 2 * 4
    assert "version3_triton" in kept[4].read_text()
    kept = sorted(
        (tmp_path / "new folder" / "inference_benchmark" / "profiles").glob("fp*/*.json*")
    )
    assert len(kept) == 2 * 2


def test_a_study_that_fails_is_reported_and_the_next_is_measured(measure) -> None:
    done, typed = measure("out", "sweep_seq_len", "waterfall_v4", status=1)
    assert done.returncode == 1
    assert ["--sweep" in line for line in typed] == [True, False, False]
    assert "failed with status 1: " in done.stderr and "seq-len 128 ... 8192" in done.stderr


def test_wrong_usage_is_one_line(measure, tmp_path) -> None:
    done, typed = measure("out", "ladders")
    message = "unknown study 'ladders': choose from large ladder"
    assert done.returncode == 2 and not typed and not (tmp_path / "out").exists()
    assert done.stderr.startswith(f"error: {message}") and done.stderr.count("\n") == 1

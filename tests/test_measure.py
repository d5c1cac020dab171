"""The script that measures reference results: what it types, with a stand-in for Python."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_lab_documents import STUDIES as STUDIES_OF_LAB
from test_lab_documents import flags

from analysis_tools import compare_versions, roofline_analysis
from labs.cifar10_roofline import measure_table
from labs.data_pipeline import measure_pipeline
from labs.inference_benchmark import documents, request
from labs.scale_out import measure as measure_scaling
from labs.text_generation import documents as text_documents
from labs.text_generation import measure_engines
from workshop.kernels import benchmark

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "labs/inference_benchmark/TorchTensorOpsBench"))

import torch_tensor_ops_bench  # noqa: E402

SCRIPT = ROOT / "results" / "reference" / "measure.sh"
PARSERS = {
    "compare_versions.py": compare_versions.build_parser,
    "roofline_analysis.py": roofline_analysis.build_parser,
    "workshop.kernels.benchmark": benchmark.build_parser,
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
    f"inference_profiles harness ceilings {OF_SEVERAL}"
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
def measure(tmp_path: Path):
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


def test_every_command_is_one_that_its_tool_knows(measure, tmp_path: Path) -> None:
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
    assert {name: parsed.count(name) for name in PARSERS} == dict(
        zip(PARSERS, (12, 1, 2, 9, 2, 1, 1, 1), strict=True)
    )
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


def test_the_labs_documents_quote_the_commands_that_are_measured(measure) -> None:
    """But for the set of operators, and the folder."""
    _, typed = measure("out")
    lines = [line.split("\t")[1:] for line in typed if "micro_benchmarking" in line]
    commands = [command for _, command in [*STUDIES_OF_LAB, documents.NETWORKS]]
    parsed = [
        [vars(request.build_parser().parse_args(words)) | {"output_dir": None} for words in found]
        for found in (lines, map(flags, commands))
    ]
    assert len(parsed[0]) == len(parsed[1])
    assert all(command in parsed[0] for command in parsed[1])
    (engines,) = (line.split("\t") for line in typed if "measure_engines" in line)
    assert [*engines[:1], *engines[3:]] == [
        f"labs/text_generation/{word}" if ".py" in word else word
        for word in text_documents.COMMAND.split()[1:]
    ]


def test_python_may_be_given_by_a_relative_path(measure) -> None:
    done, typed = measure("out", "kernels", PYTHON="./python")
    assert done.returncode == 0 and len(typed) == 2, done.stderr


def test_a_study_that_fails_is_reported_and_the_next_is_measured(measure) -> None:
    done, typed = measure("out", "sweep_seq_len", "waterfall_v4", status=1)
    assert done.returncode == 1
    assert ["--sweep" in line for line in typed] == [True, False, False]
    assert "failed with status 1: " in done.stderr and "seq-len 128 ... 8192" in done.stderr


def test_several_gpus_share_the_studies(measure, tmp_path: Path) -> None:
    done, typed = measure("out", COUNT="2", CUDA_VISIBLE_DEVICES="4,7")
    assert done.returncode == 0, done.stderr
    first = typed.pop(0)
    assert "labs/scale_out/measure.py" in first
    measure_scaling.build_parser().parse_args(first.split("\t")[1:])
    alone = measure("out", COUNT="1")[1][len(typed) + 1 :]
    assert sorted(line.split()[0] for line in typed) == sorted(line.split()[0] for line in alone)
    lines = [line.split(", ")[0] for line in done.stdout.splitlines() if ": on " in line]
    places = [line.split(": on ") for line in lines]
    shared = {*STUDIES} - {OF_SEVERAL}
    assert {study for study, _ in places} == shared and {gpu for _, gpu in places} == {
        "4",
        "7",
    }
    assert all(len({gpu for name, gpu in places if name == study}) == 1 for study in shared)


def test_a_failure_on_one_of_several_gpus_is_reported(measure) -> None:
    done, typed = measure("out", "sweep_seq_len", "waterfall_v4", "kernels", COUNT="2", status=1)
    assert done.returncode == 1 and len(typed) == 5
    assert "sweep_seq_len: failed with status 1: " in done.stdout
    assert (
        measure("out", "sweep_seq_len", "waterfall_v4", COUNT="2", status=130)[0].returncode == 130
    )


def test_what_the_machine_does_not_have_is_no_failure_and_ctrl_c_ends_it(
    measure, tmp_path: Path
) -> None:
    assert measure("out", "sweep_seq_len", status=77)[0].returncode == 0
    done, typed = measure("out", "sweep_seq_len", "waterfall_v4", status=130)
    assert done.returncode == 130 and len(typed) == 2
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.parametrize(
    ("words", "changes", "status", "message"),
    [
        (("out",), {"PYTHON": "no_python"}, 2, "no no_python here: set PYTHON to one that has"),
        (("out",), {"COUNT": "0"}, 77, "no GPU that "),
        ((), {}, 2, "usage: "),
        (("--all",), {}, 2, "usage: "),
        (("out", "ladders"), {}, 2, "unknown study 'ladders': choose from large ladder"),
        (("python/in",), {}, 2, "python/in: no folder can be made there"),
    ],
)
def test_wrong_usage_is_one_line(
    words: tuple[str, ...],
    changes: dict[str, str],
    status: int,
    message: str,
    measure,
    tmp_path: Path,
) -> None:
    done, typed = measure(*words, **changes)
    assert done.returncode == status and not typed and not (tmp_path / "out").exists()
    assert done.stderr.startswith(f"error: {message}") and done.stderr.count("\n") == 1


def test_help(measure) -> None:
    done, typed = measure("--help")
    assert done.returncode == 0 and not typed
    assert "Usage: results/reference/measure.sh FOLDER [STUDY ...]" in done.stdout
    assert done.stdout.splitlines()[-1] == "Studies: " + " ".join(STUDIES)

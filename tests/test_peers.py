"""Peers: other people's code is V1's model too, and is measured like a version."""

import dataclasses
import json
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from stored_runs import PARTS, REFERENCE

from analysis_tools import update_docs
from workshop import errors, records, versions
from workshop.compare.rows import build_rows
from workshop.gate import parity
from workshop.results import RunResult

pytest.importorskip("transformers")


def test_the_documents_compare_with_the_fastest_peer_once_one_has_a_graph() -> None:
    runs = records.load_folder(REFERENCE / "nvidia_h200" / PARTS[0], RunResult)
    without = [run for run in runs if run.version != "hf-graph"]
    assert "Beside" not in update_docs._ladder(build_rows(without), without)
    text = update_docs._ladder(build_rows(runs), runs)
    rows = {row.version: row for row in build_rows(runs)}
    for key in ("v3", "v4"):
        ratio = rows["hf-graph"].step_ms / rows[key].step_ms
        assert f"{key.upper()} {ratio:.2f}x [" in text.partition("Beside the fastest peer")[2]
    assert "| [hf-graph](peers/) | Hugging Face, compiled, graph |" in text
    elsewhere = dataclasses.replace(
        next(run for run in runs if run.version == "hf-graph"), version="torchao", session="other"
    )
    assert "torchao" not in update_docs._ladder(build_rows([*runs, elsewhere]), runs)


def test_hugging_faces_llama_passes_the_gate(odd_config) -> None:
    module = versions.load("hf")
    report = parity.check(
        module.TinyLlama,
        dataclasses.replace(odd_config, rope_theta=500.0, norm_eps=1e-3),
        precision="fp32",
        device="cpu",
        configure_optimizer=module.configure_optimizer,
    )
    assert report.passed, report.failures


def test_it_is_one_graph_to_the_compiler(odd_config) -> None:
    model = versions.load("hf").TinyLlama(odd_config)
    tokens = torch.randint(odd_config.vocab_size, (2, 9))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert compiled(tokens, tokens).item() == pytest.approx(model(tokens, tokens).item())


@pytest.mark.slow
def test_it_is_measured_like_a_version(tmp_path, type_command) -> None:
    flags = ("--config", "tiny", "--device", "cpu", "--compile", "none", "--num-layers", 1)
    small = ("--batch-size", 2, "--seq-len", 17, "--num-steps", 2, "--warmup-steps", 1)
    finished = type_command(
        *("python", "peers/hugging_face_llama.py", *flags, *small, "--output-dir", tmp_path)
    )
    assert finished.returncode == 0, finished.stderr
    (run,) = records.load_folder(tmp_path, RunResult)
    assert (run.version, run.gate.status) == ("hf", "pass")
    again = type_command(
        *("python", "analysis_tools/compare_versions.py", "--from-results", tmp_path),
        *("--format", "json"),
    )
    (row,) = json.loads(again.stdout)["rows"]
    assert (row["version"], row["variant"]) == ("hf", "compile=none")


@pytest.mark.skipif(find_spec("liger_kernel") is not None, reason="liger-kernel is installed")
def test_a_peer_that_is_not_installed_is_named() -> None:
    command = [sys.executable, "peers/hugging_face_liger.py"]
    finished = subprocess.run(command, cwd=versions.ROOT, capture_output=True, text=True)
    assert finished.returncode == errors.NOT_ON_THIS_MACHINE
    assert finished.stderr == (
        "error: hf-liger needs liger-kernel, which is not installed: `pip install liger-kernel`\n"
    )

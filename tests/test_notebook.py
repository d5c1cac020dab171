"""The notebooks: they run, are stored without outputs, and leave all logic to our modules."""

from __future__ import annotations

import ast
import html
import os
import re
from collections.abc import Collection
from pathlib import Path

import nbclient
import nbformat
import pytest
import torch
from conftest import HANGS_S

from labs.data_pipeline import measure_rung, rungs
from workshop import labs, records
from workshop.classroom import notebook
from workshop.errors import WorkshopError
from workshop.exercises.frame import Item
from workshop.gate import parity
from workshop.labs import LabRun
from workshop.profilers.advisor import advise, headline
from workshop.profilers.load import load, recorded_run
from workshop.results import RunResult

ROOT = Path(__file__).resolve().parents[1]
TOUR = ROOT / "exercises" / "notebooks" / "workshop_tour.ipynb"
PIPELINE = ROOT / "labs" / "data_pipeline" / "where_does_the_step_wait.ipynb"
SMALLER = """
from workshop.run import presets

presets.PRESETS["tiny"] = presets.Preset(64, 1, 2, seq_len=64, batch_size=2)
"""
"""Each Python runs it at its start, the kernel's and those that the notebook starts: the same tour,
with a model that costs seconds."""


@pytest.fixture(params=[TOUR, PIPELINE], ids=lambda path: path.stem)
def stored(request) -> nbformat.NotebookNode:
    return nbformat.read(request.param, as_version=4)


def test_it_is_stored_without_outputs_and_without_a_machine(stored) -> None:
    nbformat.validate(stored)
    assert len({cell.id for cell in stored.cells}) == len(stored.cells)
    assert stored.metadata.kernelspec.name == "python3"
    assert set(stored.metadata) == {"kernelspec", "language_info"}
    assert set(stored.metadata.language_info) == {"name"}
    for cell in stored.cells:
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count) == ([], None)
        assert cell.metadata in ({}, {"tags": ["parameters"]})
        folders = r"(?<![\w.])/(?:home|root|tmp|opt|work|usr|Users|mnt)\b|[A-Z]:\\"
        assert not re.search(folders, cell.source)
        figures = r"\d\s?(?:ms|x|MB|GB|GB/s|TFLOP/s|GFLOP/s|samples/s|images/s)(?!\w)"
        assert not re.search(figures, cell.source)


def test_what_it_imports_is_there(stored) -> None:
    code = [cell.source for cell in stored.cells if cell.cell_type == "code"]
    for node in ast.walk(ast.parse("\n".join(code))):
        if isinstance(node, ast.ImportFrom):
            exec(ast.unparse(node), {})


def execute(
    path: Path, parameters: str, environment: dict[str, str], without: Collection[str] = ()
) -> str:
    """Output below the cells of a notebook with other sizes, `without` some of its code, and with
    its files in a folder of the test."""
    ready = nbformat.read(path, as_version=4)
    for text in without:
        [cell] = [cell for cell in ready.cells if text in cell.source]
        cell.source = cell.source.replace(text, "")
    [first] = [i for i, c in enumerate(ready.cells) if "parameters" in c.metadata.get("tags", [])]
    ready.cells.insert(first + 1, nbformat.v4.new_code_cell(parameters))
    where = {"metadata": {"path": str(path.parent)}}
    client = nbclient.NotebookClient(ready, timeout=HANGS_S, kernel_name="python3", resources=where)
    client.execute(env=os.environ | environment)
    return "\n".join(
        str(output.get("data", {}).get("text/html", "")) + str(output.get("text", ""))
        for cell in ready.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    )


def assert_answered(text: str, *predictions: str) -> None:
    for what in predictions:
        answer = rf"<b>{html.escape(what)}</b>: predicted \S+, measured [\d.,%]+"
        assert re.search(answer, text), what


@pytest.mark.slow
def test_the_tour_runs_and_shows_what_it_promises(tmp_path) -> None:
    output = tmp_path / "tour"
    output.mkdir()
    (tmp_path / "sitecustomize.py").write_text(SMALLER)
    parameters = f"import pathlib\nOUTPUT = pathlib.Path({str(output)!r})\nSTEPS, REPEATS = 2, 2"
    more = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "TORCH_COMPILE_DISABLE": "1"}
    text = execute(TOUR, parameters, more)
    assert "v1: pass: gradients 11/11" in text
    assert "v2: pass: gradients 11/11" in text
    assert "loss: right" in text and "the backward pass does not reach it" in text
    assert_answered(text, "tensors that learn", "v2, times faster", "v4, times faster",
                    "v1, a step", "v2, a step", "V1's share of the peak")  # fmt: skip
    for title in ("Distance from V1", "Throughput, time and memory", "The loss of every version"):
        assert f"<p><b>{title}" in text, title
    assert text.count("<svg") >= 4  # and speed-ups, where the machine was quiet enough for one
    assert text.count("data:image/png") == 3
    words = " ".join(re.sub(r"\x1b\[[\d;]*m", "", text).split())  # the terminal's colours
    for version in ("v1", "v2"):
        profile = output / "profiles" / version / "pytorch_profiler"
        bound = headline(advise(load(profile), recorded_run(profile)))
        assert bound is not None and bound.sentence in words
    assert {path.name for path in output.iterdir()} >= {
        *("runs", "profiles", "roofline", "ceilings"),
        *("comparison.json", "v1_step.png", "h200_v4_step.png"),
    }
    assert len(records.load_folder(output / "runs", RunResult)) >= 3


@pytest.mark.slow
def test_the_pipelines_notebook_runs_and_shows_what_it_promises(tmp_path) -> None:
    pytest.importorskip("sklearn")
    parameters = f"""
OUTPUT = Path({str(tmp_path)!r})
IMAGES, BATCH_SIZE, ITERATIONS, RESNET_IMAGES, OPEN_MS = 320, 16, 4, 256, 5.0
"""
    # Two rungs less, each a process with workers: test_lab_pipeline.py trains on every rung.
    without = ['"n-workers": 1.0, ', '"flat": 1.0, ']
    text = execute(PIPELINE, parameters, {"PYTHONPATH": ""}, without)
    of_rungs = ["on-device", "resident"]
    assert {"n-workers", "flat", *of_rungs} <= rungs.BY_NAME.keys()
    faster = [f"{name}, times faster" for name in of_rungs]
    assert_answered(text, "the loop waits", "images a second", *faster)
    assert text.count("gate pass") >= 2 + len(of_rungs)
    assert "5 ms at each open (simulated)" in text
    for name in ("one_worker", "ladder"):
        [session] = (tmp_path / name / "profiles").iterdir()
        for profile in session.iterdir():
            assert f"{profile.name}: {measure_rung.advice(profile)}" in text
    runs = records.load_folder(tmp_path / "ladder", LabRun)
    measured = {row.first.variant: row for group in labs.newest(runs) for row in group}
    assert measured.keys() >= {"1-worker", *of_rungs}
    assert f"{measured['resident'].speedup.value:.3g}" in text
    on_gpu = torch.cuda.is_available()
    assert ("No GPU here" in text) != on_gpu
    assert text.count("data:image/png") == 2 + on_gpu


def test_what_is_shown_is_escaped(tmp_path) -> None:
    shown = notebook.answers([Item(True, "a<b>", "predicted 1 & more\nwhy")])._repr_html_()
    assert shown == "<ul><li><b>a&lt;b&gt;</b>: predicted 1 &amp; more<br>why</li></ul>"
    (tmp_path / "a.png").write_bytes(b"png")
    shown = notebook.image(tmp_path / "a.png", 'a "quoted" one').html
    assert 'src="data:image/png;base64,cG5n"' in shown and "&quot;quoted&quot;" in shown


def test_a_tool_that_fails_stops_the_notebook(tmp_path, capsys) -> None:
    asked: list[list[str]] = []

    def tool(argv: list[str]) -> int:
        asked.append(argv)
        return len(argv) - 2

    notebook.tool(tool, "--steps", 3)
    assert asked == [["--steps", "3"]]
    with pytest.raises(WorkshopError, match=r"test_notebook\.py: ended with status 1"):
        notebook.tool(tool, "--a", tmp_path, "b")

    program = tmp_path / "program.py"
    program.write_text("import sys\nprint(sys.argv[1])\nsys.exit('to stderr')\n")
    with pytest.raises(WorkshopError, match=r"program\.py: ended with status 1"):
        notebook.script(program, 7)
    assert capsys.readouterr().out == "7\nto stderr\n"


def test_a_gate_of_the_real_check_can_be_drawn() -> None:
    v1 = parity.versions.load("v1")
    config = v1.TinyLlamaConfig(64, 32, 48, num_layers=1, num_heads=2, num_kv_heads=1)
    shown = notebook.gate({"v1": parity.check(v1.TinyLlama, config, batch_size=1, seq_len=9)}).html
    assert "<svg" in shown and "11 of 11 gradients" in shown and "mathdefault" not in shown

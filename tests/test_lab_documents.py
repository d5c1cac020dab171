"""The figures in the inference lab's documents: each from the right runs, and one line for what has
not been measured."""

import dataclasses
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from exercise_cases import FOLDERS
from stored_runs import lab_run

from labs.inference_benchmark import documents, request, single
from labs.inference_benchmark.documents import CHECKLIST, README
from workshop.labs import LabRun
from workshop.results import Parity

STUDIES = [
    *documents.LADDERS.values(),
    *documents.PEERS.values(),
    documents.TRAINING,
    documents.PRECISION,
    documents.BATCH_SIZE,
]
RUNGS = ("fp32", "tf32", "fp16", "fp16, folded norms", "fp16, folded norms, graph")
TABLE = CHECKLIST.read_text(encoding="utf-8").split("<!-- techniques:")[1]


def session(subject: str, ms_by_variant: dict[str, float], **changes: Any) -> list[LabRun]:
    """Two processes of each variant, the first of which is the baseline."""
    return [
        lab_run(variant, ms * scatter, subject=subject, baseline=next(iter(ms_by_variant)),
                created=f"2026-11-23T10:{repeat}{minute}:00+00:00", **changes)
        for repeat, scatter in enumerate((1.0, 1.01))
        for minute, (variant, ms) in enumerate(ms_by_variant.items())
    ]  # fmt: skip


def cells(text: str, first: str) -> list[str]:
    """The cells of the only line of a table that begins with this cell."""
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in line.strip("| ").split(" | ")]


def documents_of(runs: list[LabRun]) -> dict[Path, dict[str, str]]:
    found = documents.parts(runs)
    found[CHECKLIST]["techniques"] = documents.techniques(runs, TABLE)
    return found


def flags(command: str) -> list[str]:
    """The flags of a document's command, without the program."""
    full = re.sub(r"^B ", f"{documents.ON} resnet50 --batch-size {documents.USUAL} ", command)
    return shlex.split(full)[2:]


@pytest.mark.parametrize(("subject", "command"), STUDIES)
def test_a_documents_command_writes_the_runs_that_it_shows(subject: str, command: str) -> None:
    arguments = request.build_parser().parse_args(flags(command))
    study = f"compare {arguments.compare}" if arguments.compare else "ladder"
    run, _ = single.planned(flags(command), study, "")
    assert run.subject == subject


def test_what_is_not_measured_has_a_line_with_its_command() -> None:
    found = documents_of([])
    texts = [text for its in found.values() for text in its.values()]
    commands = re.findall(r"Not measured yet: `(.*)`\.$", "\n".join(texts), re.M)
    measured = {command for _, command in [*STUDIES, documents.NETWORKS]}
    assert set(commands) == {*measured, documents.PREDEFINED}
    assert "| `B --compare precision` |" in found[CHECKLIST]["techniques"]


def test_the_ladder_says_what_each_rung_gains() -> None:
    subject, command = documents.LADDERS[32]
    red = Parity(status="fail", failures=["logits: 0.3 of allowed 0.01"])
    times = dict(zip(RUNGS, (10.0, 9.0, 4.5, 4.5, 1.5), strict=True))
    runs = [
        *session(subject, times),
        lab_run("fp16, wrong", 1.0, subject=subject, status="gate failed", gate=red, created="3"),
    ]
    found = documents_of(runs)
    text = found[README]["ladder"]
    assert f"NVIDIA H200, PyTorch 2.13.0, commit 0123456: `{command}`" in text
    assert text.count("Not measured yet") == 2
    # An older session, and another lab's runs of the same name, do not count.
    old = session(subject, {"fp32": 5.0}, session="2025")
    other = session(subject, {"fp32": 5.0}, lab="another_lab", session="2027")
    assert documents_of([*old, *other, *runs]) == found
    first = cells(text, "fp32")
    assert first[1:] == ["3,184", "10.050", "11.110", "-", "pass"]
    assert cells(text, "fp16")[4].startswith("2.00x [1.9")
    assert cells(text, "fp16, folded norms")[4].startswith("~1 [0.9")
    assert cells(text, "fp16, wrong")[1:] == ["-", "-", "-", "-", "FAIL"]
    assert re.search(r"Fastest: `fp16, folded norms, graph`; over the first rung 6\.67x \[", text)
    table = found[CHECKLIST]["techniques"]
    assert re.match(r"batch 32 3\.00x \[.*\], NVIDIA H200; `B --ladder`$", cells(table, "graph")[4])
    assert cells(table, "AOTInductor")[4] == "`B --ladder`"


def test_ours_is_compared_with_the_fastest_peer() -> None:
    runs = []
    times = {
        "fp16": 8.0,
        "timm, fp16, compile": 4.0,
        "torch, fp16, compile": 5.0,
        "fp16, graph": 2.0,
    }
    for run in session(documents.PEERS[256][0], times):
        peer = run.variant.split(",")[0]
        runs.append(dataclasses.replace(run, options={"peer": peer if peer != "fp16" else ""}))
    text = documents_of(runs)[README]["peers"]
    assert re.search(
        r"^`fp16, graph` over the fastest peer, `timm, .*`: 2\.00x \[.*\]\.$", text, re.M
    )
    assert cells(text, "fp16")[4] == "baseline" and text.count("Not measured yet") == 1


def test_all_networks_are_one_table_of_pairs() -> None:
    """Their result files name no baseline."""
    runs = []
    for name, fast_ms in (("vgg16", 2.5), ("alexnet", 5.0)):
        subject = f"{name}, batch 32, 224 x 224, inference, all networks"
        for variant, ms in (("fp16, compile, graph", fast_ms), ("fp16", 10.0)):
            options = {"network": name, "precision": "fp16", "compile": None}
            options |= {"compile": "{}"} if "compile" in variant else {}
            runs.append(lab_run(variant, ms, subject=subject, baseline="", options=options))
    runs.append(lab_run(subject="vgg11, batch 32, 224 x 224, inference, all networks"))
    text = documents_of(runs)[README]["networks"]
    assert cells(text, "vgg16")[1:4] == ["3,200", "12,800", "4.00x"]
    assert cells(text, "alexnet")[1:4] == ["3,200", "6,400", "2.00x"]
    assert "vgg11" not in text and "Not measured" not in text


@pytest.mark.parametrize(
    "path",
    [
        CHECKLIST,
        *(folder / "README.md" for name, folder in FOLDERS.items() if "inference_" in name),
    ],
    ids=lambda path: path.parent.name,
)
def test_the_benchmark_knows_the_flags_of_all_commands(path: Path) -> None:
    text = re.sub(r"\n +", " ", path.read_text(encoding="utf-8"))
    commands = re.findall(r"(?:micro_benchmarking_pytorch\.py|run_\w+\.sh --) ([^`\n]+)", text)
    commands += [f"--network resnet50 {flags}" for flags in re.findall(r"`B ([^`]+)`", text)]
    assert commands
    for command in commands:
        request.build_parser().parse_args(shlex.split(command))

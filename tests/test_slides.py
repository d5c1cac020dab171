"""The slide decks: as long as the guide says, readable, with the figures of the result files.

Read from the .pptx files, as PowerPoint would.
"""

import re
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest
from pptx import Presentation

from slides import build
from workshop import records
from workshop.results import RunResult
from workshop.versions import ROOT

H200 = ROOT / "results" / "reference" / "nvidia_h200"
SMALL_SESSION = "20261129-191426-351a97"
MINUTES = (36, 43, 32, 73)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """With the decks of the checked-in results."""
    target = tmp_path_factory.mktemp("slides")
    assert build.main(["--output-dir", str(target)]) == 0
    return target


@pytest.fixture(scope="module")
def decks(folder) -> dict[str, Any]:
    return {deck: Presentation(str(folder / f"{deck}.pptx")) for deck in build.DECKS}


def notes(page: Any) -> str:
    return str(page.notes_slide.notes_text_frame.text)


def title(page: Any) -> str:
    return str(page.shapes.title.text_frame.text)


@pytest.mark.parametrize(("deck", "minutes"), list(zip(build.DECKS, MINUTES, strict=True)))
def test_its_times_add_up(decks, deck, minutes) -> None:
    slides = list(decks[deck].slides)
    times = [
        re.match(r"Time: (\d+) minutes, from (\d+) to (\d+) of (\d+)\n\n\S", notes(p))
        for p in slides
    ]
    spans = [[int(number) for number in time.groups()] for time in times if time]
    assert len(spans) == len(slides) and 10 <= len(slides) <= 24
    assert [start for _, start, *_ in spans] == [0, *(end for *_, end, _ in spans[:-1])]
    assert sum(own for own, *_ in spans) == spans[-1][2] == spans[-1][3] == minutes
    pictures = [
        p
        for p in slides
        if any(s.has_chart or s.name == "Code" or "Freeform" in s.name for s in p.shapes)
    ]
    assert len(pictures) >= len(slides) / 2
    assert not [title(page) for page in slides if "Not measured" in title(page)]


def test_a_chart_has_the_numbers_of_its_result_files(decks) -> None:
    (page,) = (p for p in decks["results_analysis"].slides if title(p).startswith("Size small"))
    (chart,) = (shape.chart for shape in page.shapes if shape.has_chart)
    shown = dict(zip(chart.plots[0].categories, chart.plots[0].series[0].values, strict=True))
    path = H200 / "runs" / f"{SMALL_SESSION}.jsonl"
    runs = records.load_runs(path, RunResult)
    for version in ("v1", "v2", "v3", "v4"):
        steps = [ms for run in runs if run.version == version for ms in run.step_ms]
        assert shown[version.upper()] == pytest.approx(statistics.median(steps))
    assert notes(page).count(path.name) == 1
    assert chart.part.chart_workbook.xlsx_part is not None  # what PowerPoint edits


def test_ones_own_results_and_what_they_have_not(tmp_path) -> None:
    (tmp_path / "own" / "runs").mkdir(parents=True)
    shutil.copy(H200 / "runs" / f"{SMALL_SESSION}.jsonl", tmp_path / "own" / "runs")
    arguments = ["--results", str(tmp_path / "own"), "--output-dir", str(tmp_path)]
    assert build.main(arguments) == 0
    found = [Presentation(str(tmp_path / f"{deck}.pptx")) for deck in build.DECKS]
    shown = {title(page): page for deck in found for page in deck.slides}
    assert any(text.startswith("Size small: V3 takes") for text in shown)
    page = shown["Not measured: the versions at medium, or another size"]
    assert any("make compare" in getattr(s, "text_frame", s.name).text for s in page.shapes)

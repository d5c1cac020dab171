"""The slide decks: as long as the sessions, readable, with the figures of the result files.

Read from the .pptx files, as PowerPoint would.
"""

import re
import shutil
import statistics
import subprocess
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from PIL import ImageFont
from pptx import Presentation
from pptx.util import Inches, Pt

from slides import build, figures, pages
from slides.measured import Measured
from workshop import records
from workshop.errors import WorkshopError
from workshop.exercises import sheet
from workshop.results import RunResult
from workshop.versions import ROOT

H200 = ROOT / "results" / "reference" / "nvidia_h200"
SMALL_SESSION = "20261126-220308-a5fe87"
MINUTES = list(sheet.SESSION_MINUTES.values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the decks of the checked-in results."""
    target = tmp_path_factory.mktemp("slides")
    assert build.main(["--output-dir", str(target)]) == 0
    return target


@pytest.fixture(scope="module")
def decks(folder: Path) -> dict[str, Any]:
    return {deck: Presentation(str(folder / f"{deck}.pptx")) for deck in build.DECKS}


def notes(page: Any) -> str:
    return str(page.notes_slide.notes_text_frame.text)


def title(page: Any) -> str:
    return str(page.shapes.title.text_frame.text)


def lines_needed(text: str, width: float, font: ImageFont.FreeTypeFont) -> int:
    """Of a paragraph in a box of `width` pixels; 99 if one of its words does not fit."""
    lines, used = 1, 0.0
    if any(font.getlength(word) > width for word in text.split(" ")):
        return 99
    for word in text.split(" "):
        own = font.getlength(word)
        if used and used + font.getlength(f" {word}") > width:
            lines, used = lines + 1, 0.0
        used += font.getlength(f" {word}") if used else own
    return lines


def overflowing(page: Any) -> list[str]:
    """Texts that need more room than their box has, in a font that is wider than the deck's; and
    boxes that leave the slide."""
    found = []
    for shape in page.shapes:
        frame, needed = getattr(shape, "text_frame", None), 0.0
        for paragraph in frame.paragraphs if frame else ():
            if not paragraph.runs:
                continue
            font = paragraph.runs[0].font
            file = "DejaVuSansMono" if font.name == pages.CODE_FONT else "DejaVuSans"
            path = Path(
                matplotlib.get_data_path(), "fonts", "ttf", f"{file}{'-Bold' * bool(font.bold)}.ttf"
            )
            indent = int(paragraph._p.get_or_add_pPr().get("marL", 0))
            width = shape.width - frame.margin_left - frame.margin_right - indent
            measure = ImageFont.truetype(str(path), round(font.size / Pt(1)))
            lines = lines_needed(paragraph.text, width / Pt(1), measure)
            needed += lines * font.size * pages.LINE + (paragraph.space_after or 0)
        inside = shape.left >= 0 and shape.left + shape.width <= Inches(13.34)
        inside = inside and shape.top >= 0 and shape.top + shape.height <= Inches(7.5)
        if needed > shape.height + Pt(1) or not inside:
            found.append(frame.text if frame else shape.name)
    return found


@pytest.mark.parametrize(("deck", "minutes"), list(zip(build.DECKS, MINUTES, strict=True)))
def test_it_is_as_long_as_its_session(decks: dict[str, Any], deck: str, minutes: int) -> None:
    slides = list(decks[deck].slides)
    times = [
        re.match(r"Time: (\d+) minutes, from (\d+) to (\d+) of (\d+)\n\n\S", notes(p))
        for p in slides
    ]
    spans = [[int(number) for number in time.groups()] for time in times if time]
    assert len(spans) == len(slides) and 12 <= len(slides) <= 20
    assert [start for _, start, *_ in spans] == [0, *(end for *_, end, _ in spans[:-1])]
    assert sum(own for own, *_ in spans) == spans[-1][2] == spans[-1][3] == minutes
    pictures = [
        p
        for p in slides
        if any(s.has_chart or s.name == "Code" or "Freeform" in s.name for s in p.shapes)
    ]
    assert len(pictures) > len(slides) / 2
    assert not [title(page) for page in slides if "Not measured" in title(page)]


@pytest.mark.parametrize("deck", build.DECKS)
def test_it_can_be_read_from_the_last_row(decks: dict[str, Any], deck: str) -> None:
    for page in decks[deck].slides:
        assert overflowing(page) == [], title(page)
        for shape in page.shapes:
            xml = shape.chart._chartSpace.xml if shape.has_chart else shape._element.xml
            sizes = [int(size) / 100 for size in re.findall(r'\bsz="(\d+)"', xml)]
            assert shape.name == "Source" or min(sizes, default=24) >= 24, title(page)
            assert not shape.has_chart or shape.height > Inches(1.4), title(page)


@pytest.mark.parametrize(
    "slide",
    (
        pages.Slide("one word too many " * 8, [pages.Points(["text"])]),
        pages.Slide("A title", [pages.Points(["one line too many"] * 12)]),
        pages.Slide("A title", [pages.Points(["A" * 60])]),
        pages.Slide("A title", [pages.Cards([["head", "a few words too many"]] * 8)]),
        pages.Slide("A title", [pages.Code(["x = 1"] * 14)]),
        pages.Slide("A title", [pages.Points(["text"])], "W" * 60),
    ),
)
def test_text_that_runs_out_of_its_box_is_seen(slide: pages.Slide, tmp_path: Path) -> None:
    writer = pages.Writer()
    writer.add(slide)
    writer.save(tmp_path / "a.pptx")
    assert overflowing(Presentation(str(tmp_path / "a.pptx")).slides[0])


@pytest.mark.parametrize("deck", build.DECKS)
def test_the_notes_name_the_files_of_the_figures(decks: dict[str, Any], deck: str) -> None:
    for page in decks[deck].slides:
        lines = notes(page).partition("From these files:\n")[2].splitlines()
        for place, _, names in (line.partition(": ") for line in lines):
            assert all((ROOT / place / name).is_file() for name in names.split(", ")), place
        shown = any(s.has_chart or s.name == "Code" or "Freeform" in s.name for s in page.shapes)
        assert bool(lines) == shown, title(page)


@pytest.mark.parametrize("deck", build.DECKS)
def test_no_figure_is_typed(deck: str) -> None:
    names = r"\{[^}]*\}|\(\d+ min\)|\bV[1-4]|[a-z]+\d+|\| [1-4] "
    names += "|95% interval|(contains|status) 1|1 process"
    for line in Path(build.__file__).with_name(f"{deck}.md").read_text("utf-8").splitlines():
        if line.startswith(("## ", "> ", "- ", "| ")):
            assert not re.search(r"\d", re.sub(names, "", line)), line


def test_a_chart_has_the_numbers_of_its_result_files(decks: dict[str, Any]) -> None:
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


def test_ones_own_results_and_what_they_have_not(tmp_path: Path) -> None:
    (tmp_path / "own" / "runs").mkdir(parents=True)
    shutil.copy(H200 / "runs" / f"{SMALL_SESSION}.jsonl", tmp_path / "own" / "runs")
    arguments = ["--results", str(tmp_path / "own"), "--output-dir", str(tmp_path)]
    assert build.main(arguments) == 0
    found = [Presentation(str(tmp_path / f"{deck}.pptx")) for deck in build.DECKS]
    shown = {title(page): page for deck in found for page in deck.slides}
    assert [text for page in shown.values() for text in overflowing(page)] == []
    assert any(text.startswith("Size small: V3 takes") for text in shown)
    page = shown["Not measured: the versions at medium, or another size"]
    assert any("make compare" in getattr(s, "text_frame", s.name).text for s in page.shapes)


def test_code_that_is_gone_is_named() -> None:
    measured = Measured([H200 / "once"])
    body, _ = figures.code(measured, "v1", "class RMSNorm", "return", "return")
    assert body == pages.Code(
        ["return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight"]
    )
    with pytest.raises(
        WorkshopError, match=r"tiny_llama_v1\.py has no 'sgd' there: change the deck"
    ):
        figures.code(measured, "v1", "def train_step", "sgd", "return")


@pytest.mark.skipif(shutil.which("soffice") is None, reason="LibreOffice is not installed")
def test_libreoffice_renders_every_page(
    folder: Path, decks: dict[str, Any], tmp_path: Path
) -> None:
    files = sorted(map(str, folder.glob("*.pptx")))
    profile = f"-env:UserInstallation=file://{tmp_path}/profile"
    command = ["soffice", profile, "--headless", "--convert-to", "pdf", "--outdir", str(tmp_path)]
    subprocess.run([*command, *files], check=True, capture_output=True, timeout=300)
    for deck in build.DECKS:
        content = (tmp_path / f"{deck}.pdf").read_bytes()
        assert len(re.findall(rb"/Type\s*/Page\b", content)) == len(decks[deck].slides)

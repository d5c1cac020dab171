"""The documents' pictures: a stale one is found without a browser, and made again where one is."""

from pathlib import Path

import pytest
import stored_runs
from PIL import Image as Pillow

from analysis_tools import update_docs
from workshop.collection import Collection
from workshop.errors import NotOnThisMachine
from workshop.report import doc_images
from workshop.report.doc_images import Image


def found(folder: Path, report: str = "") -> dict[str, Image]:
    collection = Collection([folder])
    collection.refresh()
    return {image.path.name: image for image in doc_images.find(collection, report)}


def test_a_fingerprint_is_that_of_what_a_picture_shows(tmp_path: Path) -> None:
    stored_runs.write(tmp_path, stored_runs.reference())
    before = found(tmp_path, "# A\n\n## Device\n\n1 ms\n\n### small\n\n2 ms\n")
    assert {image.path for image in before.values()} == set(doc_images.FOLDER.glob("*.png"))
    assert max(image.path.stat().st_size for image in before.values()) < 300_000
    stored_runs.write(tmp_path, stored_runs.reference(), step_ms=[7.0] * 20)
    after = found(tmp_path, "# A\n\n## Device\n\n1 ms\n\n### small\n\n3 ms\n")
    other = found(tmp_path, "# A\n\n## Device\n\n2 ms\n\n### small\n\n3 ms\n")

    def differing(a: dict[str, Image], b: dict[str, Image]) -> set[str]:
        return {name for name in a if a[name].fingerprint != b[name].fingerprint}

    assert differing(before, after) == {"dashboard.png"}
    assert differing(after, other) == {"report.png"}


def test_stale_pictures_are_made_again_or_left_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def draw(path: Path) -> None:
        Pillow.new("RGB", (8, 8), "red").save(path)

    def no_browser(path: Path) -> None:
        raise NotOnThisMachine("no Chromium: install it")

    drawn = Image(tmp_path / "a.png", "1", draw)
    taken = Image(tmp_path / "b.png", "1", no_browser)
    report = tmp_path / "report.md"
    report.write_text("")
    for name, value in (
        ("ROOT", tmp_path), ("REFERENCE", tmp_path), ("FULL_REPORT", report),
        ("render", lambda collection: {report: ""}),
    ):  # fmt: skip
        monkeypatch.setattr(update_docs, name, value)
    monkeypatch.setattr(doc_images, "find", lambda collection, text: [drawn, taken])
    stale = "{} is not what its result files say: run make docs\n"
    for words, status, printed in (
        (["--check"], 1, stale.format("a.png") + stale.format("b.png")),
        ([], 0, "Written: a.png\nb.png is left as it was: no Chromium: install it\n"),
        (["--check"], 1, stale.format("b.png")),
    ):
        assert update_docs.main(words) == status
        assert capsys.readouterr() == (printed, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "report.md"]
    assert Pillow.open(drawn.path).size == (8, 8)

"""The documents' pictures: a stale one is found without a browser, and made again where one is."""

import re
from pathlib import Path

from PIL import Image as Pillow

from analysis_tools import update_docs
from workshop.collection import Collection
from workshop.errors import NotOnThisMachine
from workshop.show import cheat_sheet, doc_images
from workshop.show.doc_images import Image


def test_every_picture_in_the_folder_is_one_that_make_docs_makes() -> None:
    images = doc_images.find(Collection([doc_images.REFERENCE]))
    found = [image.path for image in images if image.path.suffix == ".png"]
    assert sorted(found) == sorted(doc_images.FOLDER.glob("*.png"))


def test_stale_pictures_are_made_again_or_left_and_named(tmp_path, monkeypatch, capsys) -> None:
    def draw(path: Path) -> None:
        Pillow.new("RGB", (8, 8), "red").save(path)

    def no_browser(path: Path) -> None:
        raise NotOnThisMachine("no Chromium: install it")

    drawn = Image(tmp_path / "a.png", "1", draw)
    taken = Image(tmp_path / "b.png", "1", no_browser)
    report = tmp_path / "report.md"
    report.write_text("")
    for name, value in (
        ("ROOT", tmp_path), ("REFERENCE", tmp_path),
        ("render", lambda collection: {report: ""}),
    ):  # fmt: skip
        monkeypatch.setattr(update_docs, name, value)
    monkeypatch.setattr(doc_images, "find", lambda collection: [drawn, taken])
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


def test_the_cheat_sheet_has_two_sides() -> None:
    pdf = cheat_sheet.SOURCE.with_suffix(".pdf").read_bytes()
    assert len(re.findall(rb"/Type /Page\b", pdf)) == 2

"""The dashboard as its users meet it: typed on a command line, and looked at in a real browser."""

import json
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import browser as chromium
import pytest
import stored_runs

from analysis_tools import performance_dashboard
from workshop import records, versions
from workshop.collection import Collection
from workshop.compare.rows import build_rows, ordinary
from workshop.dashboard import blocks, figures, server
from workshop.dashboard.data import Choice, Live, Snapshot
from workshop.profilers.names import display_name
from workshop.report.parts import BAD
from workshop.results import RunResult

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "results" / "reference"
PROFILE = REFERENCE / "cpu_amd_epyc" / "profiles" / "v1" / "pytorch_profiler"
SPEED, ROOFLINE, KERNELS = "Speed and memory", "Roofline", "Kernels"
WAIT_S = 60
"""For a page to change: by then it never will."""
HOSTILE = "<b><img src=x onerror='window.hacked=1'><script>window.hacked=1</script>\x1b[31m&amp;"
AS_SHOWN = "<b><img src=x onerror='window.hacked=1'><script>window.hacked=1</script>[31m&amp;"


@contextmanager
def served(*folders: Path) -> Iterator[str]:
    """The address of a dashboard over some folders."""
    with server.listen(0) as listener:
        running = server.make_server(server.make_app(Live(Collection(folders))), listener)
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        try:
            yield f"http://{server.HOST}:{listener.getsockname()[1]}/"
        finally:
            running.shutdown()
            thread.join(WAIT_S)


@pytest.fixture(scope="module")
def window(tmp_path_factory) -> Iterator[Any]:
    with chromium.open_browser(tmp_path_factory.mktemp("browser")) as running:
        yield running


@pytest.fixture(scope="module")
def selection(tmp_path_factory) -> Path:
    return stored_runs.select(tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="module")
def address(selection) -> Iterator[str]:
    with served(selection) as address:
        yield address


def until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, f"not within {WAIT_S} s: {what}"
        time.sleep(0.05)


def text(window: Any, place: str = "body") -> str:
    found: str = window.execute_script(
        "return document.querySelector(arguments[0])?.textContent ?? ''", place
    )
    return found


def open_page(window: Any, address: str) -> None:
    window.get("about:blank")  # the page before may still ask a server that has ended
    chromium.complaints(window), chromium.requested(window)
    window.get(address)
    until(lambda: text(window, "#view") and drawn(window), "the page")


def choose(window: Any, control: str, wanted: str) -> None:
    """Clicks an option of a control."""
    script = """[...document.querySelectorAll(`#${arguments[0]} label`)]
        .find(label => label.textContent === arguments[1]).click()"""
    window.execute_script(script, control, wanted)


def drawn(window: Any) -> bool:
    """Whether every figure that is seen has been drawn."""
    counts = window.execute_script(
        """const seen = [...document.querySelectorAll("main figure")]
             .filter(figure => figure.offsetParent);
        return [seen.length, seen.filter(f => f.querySelector(".main-svg")).length]"""
    )
    return bool(counts[0] == counts[1])


def show(window: Any, view: str, word: str) -> None:
    choose(window, "view", view)
    until(lambda: word in text(window, "main:not([hidden])") and drawn(window), f"{view}: {word}")


WORDS = {
    blocks.CONTENTS: "V3 is 3.39x",
    SPEED: "What fills the memory at its peak",
    "Same model?": "Largest difference from V1",
    "Ladder": "Where it is saved",
    "Sweeps": "Cost as work grows",
    ROOFLINE: "V3's kernels",
    KERNELS: "elementwise_kernel<masked_fill_kernel>",
    blocks.LABS: "6,368.2",
}


@pytest.mark.slow
def test_every_view_renders(window, address) -> None:
    """Offline, without a word on the console, within the width of a projector and of a phone."""
    open_page(window, address)
    assert set(WORDS) == set(blocks.VIEWS)
    choose(window, "preset", "small")  # a sweep goes through it
    for theme, size in (("light", (1280, 720)), ("dark", (400, 800))):
        chromium.wear(window, theme)
        chromium.resize(window, *size)
        for view, word in WORDS.items():
            show(window, view, word)
            wide = window.execute_script("return document.documentElement.scrollWidth")
            assert wide <= size[0], f"{view} is {wide} pixels wide"
        page, words = (
            window.execute_script(f"return getComputedStyle(document.body).{what}")
            for what in ("backgroundColor", "color")
        )
        assert (brightness(page) > brightness(words)) == (theme == "light")
    chromium.as_opened(window)
    assert chromium.complaints(window) == []
    assert {url for url in chromium.requested(window) if not url.startswith(address)} == set()


def brightness(colour: str) -> int:
    return sum(map(int, re.findall(r"\d+", colour)[:3]))


def test_a_choice_changes_the_figures(window, address, selection) -> None:
    runs = records.load_folder(selection, RunResult)
    rows = build_rows(ordinary(runs))
    rates = {(row.config, row.precision, row.version): f"{row.tokens_per_s:,.0f}" for row in rows}

    def shows(config: str, precision: str, versions: str) -> bool:
        found = text(window, "#block-summary")
        return all(
            (rates[config, precision, version] in found) == (version in versions.split())
            for version in ("v1", "v2", "v3", "v4")
        )

    bars = "return document.querySelectorAll('#block-throughput .bars .point').length"
    open_page(window, address)
    choose(window, "view", SPEED)
    until(lambda: shows("medium", "bf16", "v1 v2 v3 v4"), "first choice")
    choose(window, "preset", "small")
    until(lambda: shows("small", "bf16", "v1 v2 v3 v4"), "small")
    choose(window, "precision", "fp16")
    until(lambda: shows("small", "fp16", "v1 v2 v3 v4"), "fp16")
    until(lambda: window.execute_script(bars) == 4, "four bars")
    choose(window, "versions", "v2")
    until(lambda: shows("small", "fp16", "v1 v3 v4"), "without v2")
    until(lambda: window.execute_script(bars) == 3, "three bars")
    # By the keyboard alone: the arrows choose, the tabulator leads on, space ticks.
    from selenium.webdriver.common.keys import Keys

    window.find_element("css selector", "#preset input:checked").send_keys(Keys.ARROW_RIGHT)
    until(lambda: shows("medium", "bf16", "v1 v3 v4"), "an arrow")
    window.switch_to.active_element.send_keys(Keys.TAB, Keys.TAB)
    window.switch_to.active_element.send_keys(Keys.SPACE)
    until(lambda: shows("medium", "bf16", "v3 v4"), "space")
    assert chromium.complaints(window) == []


def test_new_files_appear_and_broken_ones_are_named(window, tmp_path) -> None:
    with served(tmp_path) as address:
        open_page(window, address)
        until(lambda: "No results yet" in text(window), "an empty page")
        choose(window, "view", SPEED)
        written = stored_runs.write(tmp_path, stored_runs.reference())
        until(lambda: "NVIDIA H200" in text(window, "#device"), "a first result")
        until(lambda: "859" in text(window, "#block-summary") and drawn(window), "its figures")
        stored_runs.write(tmp_path, stored_runs.reference("v2"))
        written.with_name("cut.jsonl").write_text(written.read_text()[:500])
        until(lambda: "cut.jsonl" in text(window, "#alarms"), "a broken file")
        until(lambda: "v2" in text(window, "#block-summary"), "a second result")
        assert "v1" in text(window, "#block-summary")
        written.with_name("cut.jsonl").unlink()
        until(lambda: "cut.jsonl" not in text(window), "it is removed")
        assert chromium.complaints(window) == []


def test_names_are_text(window, hostile) -> None:
    with served(hostile) as address:
        open_page(window, address)
        show(window, SPEED, "")
        choose(window, "versions", f"v4 compile={AS_SHOWN} no-cuda-graph")
        until(lambda: "v4 compile=<b>" in text(window, "#block-throughput .xaxislayer-above"),
              "markup below a bar")  # fmt: skip
        for view in (SPEED, "Same model?", "Ladder", "Sweeps", ROOFLINE):
            show(window, view, "")
        assert AS_SHOWN in text(window, "#device") and AS_SHOWN in text(window, "#preset")
        until(lambda: f"IMPLAUSIBLE: {AS_SHOWN}" in text(window, "#alarms"), "an alarm")
        show(window, KERNELS, display_name(HOSTILE, 60))
        show(window, blocks.LABS, f"fp32: {AS_SHOWN}")
        harmless(window)


def harmless(window: Any) -> None:
    assert window.execute_script("return window.hacked") is None
    assert not window.find_elements("css selector", "img[src=x], svg image[href=x]")
    assert chromium.complaints(window) == []


@pytest.fixture
def hostile(tmp_path) -> Path:
    """Results in which every name that may be anything is markup."""
    content = stored_runs.reference()
    red = {"status": "fail", "failures": [HOSTILE]}
    named = content | dict.fromkeys(("config_name", "precision"), HOSTILE)
    named["device"] = content["device"] | {"name": HOSTILE}
    for version, changes in (
        ("v1", {"plausibility": [HOSTILE]}),
        ("v2", {"status": "gate failed", "gate": content["gate"] | red}),
        ("v3", {"status": "failed", "error": HOSTILE}),
        ("v4", {"options": content["options"] | {"compile": HOSTILE}}),
    ):
        stored_runs.write(tmp_path, named | {"version": version}, **changes)
    stored_runs.write_lab(tmp_path, *stored_runs.lab_session(
        lab=HOSTILE, subject=HOSTILE, unit=HOSTILE, baseline="", plausibility=[HOSTILE],
        device={"name": HOSTILE}, peak_source=HOSTILE, error=HOSTILE,
    ), stored_runs.lab_run(HOSTILE, created="3", lab=HOSTILE, subject=HOSTILE,
                           device={"name": HOSTILE}))  # fmt: skip
    profile = tmp_path / "profiles" / "v1" / "tool"
    shutil.copytree(PROFILE, profile)
    table = json.loads((profile / "kernels.json").read_text())
    table["kernels"][0]["name"] = table["kernel_table"] = HOSTILE
    (profile / "kernels.json").write_text(json.dumps(table))
    (profile / "run.jsonl").unlink()
    return tmp_path


def snapshot_of(folder: Path) -> Snapshot:
    collection = Collection([folder])
    collection.refresh()
    assert not collection.broken
    return Snapshot(collection)


def test_the_bars_are_the_rows_numbers() -> None:
    runs = ordinary(records.load_folder(REFERENCE / "nvidia_h200" / "runs", RunResult))
    rows = [row for row in build_rows(runs) if row.config == "medium"]
    shown = {"tokens_per_s": figures.throughput(rows), "speedup": figures.speedups(rows)}
    for field, figure in shown.items():
        bars = figure.data[0]
        expected = {row.label: getattr(row, field) for row in rows}
        assert dict(zip(bars.x, bars.y, strict=True)) == expected, field


def test_the_ladder_has_the_versions_of_one_comparison(tmp_path) -> None:
    content = stored_runs.reference()
    for key, session, medians in (
        ("v1", "2", (80, 81)), ("v2", "2", (80, 82)), ("v3", "2", (40, 41)), ("v4", "1", (20, 20)),
        ("v1", "1", (90, 90)),
    ):  # fmt: skip
        for number, ms in enumerate(medians):
            changes = {"version": key, "session": session, "step_ms": [ms] * 20, "options": {}}
            stored_runs.write(tmp_path, content, str(number), **changes)
    snapshot = snapshot_of(tmp_path)
    choice = snapshot.settle(Choice())
    (saved,) = blocks.view("Ladder", snapshot, choice)
    (line,) = saved.tables[0].lines  # of v2 there is no significant difference
    assert (line.cells[0].text, line.cells[-1].text) == ("v3", "40.00")
    overview = {block.key: block for block in blocks.view(SPEED, snapshot, choice)}
    speedups = overview["speedup"].figure
    assert speedups is not None and speedups.data[0].error_y.array[0] is None, "of V1 over itself"
    assert {"phases", "memory"} < overview.keys()


def words_of(block: blocks.Block) -> list[str]:
    return [cell.text for table in block.tables for line in table.lines for cell in line.cells]


def test_a_red_gate_is_in_no_figure(tmp_path) -> None:
    """No bar, no speed-up and no place in the ladder; and an error without number is the worst."""
    stored_runs.write(tmp_path, stored_runs.reference())
    red = stored_runs.reference("v2")
    measures = {
        "logits": {"error": None, "allowed": 1e-5},
        "loss": {"error": 1e-8, "allowed": 1e-5},
    }
    failed = red["gate"] | {"status": "fail", "failures": ["x"], "measures": measures}
    stored_runs.write(tmp_path, red, status="gate failed", gate=failed)
    snapshot = snapshot_of(tmp_path)
    overview = {b.key: b for b in blocks.view(SPEED, snapshot, snapshot.settle(Choice()))}
    figure = overview["throughput"].figure
    assert figure is not None and list(figure.data[0].x) == ["v1"]
    assert [note.text for note in figure.layout.annotations] == ["FAIL"]
    looks = {c.look for b in overview.values() for t in b.tables for ln in t.lines for c in ln.cells
             if c.text.startswith("FAIL")}  # fmt: skip
    assert looks == {BAD}
    (ladder,) = blocks.view("Ladder", snapshot, snapshot.settle(Choice()))
    assert not ladder.tables
    proof = {b.key: b for b in blocks.view("Same model?", snapshot, snapshot.settle(Choice()))}
    assert "not finite" in words_of(proof["gate"])


def test_the_newest_day_s_fullest_comparison_is_seen_first(tmp_path) -> None:
    shutil.copytree(REFERENCE, tmp_path / "reference")
    reference = stored_runs.reference()
    first = snapshot_of(tmp_path).settle(Choice())
    assert (first.device, first.preset, first.precision) == ("NVIDIA H200", "medium", "bf16")
    assert set(first.versions) >= {*versions.VERSIONS, "hf"}  # all that have results
    own = reference["device"] | {"name": "my laptop"}
    stored_runs.write(tmp_path, reference, device=own, session="20991231-000000-abcdef")
    assert snapshot_of(tmp_path).settle(Choice()).device == "my laptop"


def test_a_port_in_use_is_one_line(capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for port in (str(taken.getsockname()[1]), "65536"):
            assert performance_dashboard.main(["--port", port, "--no-browser"]) == 2
            error = capsys.readouterr().err
            assert f"--port {port}: " in error and error.count("\n") == 1


def test_a_missing_package_is_no_failure(monkeypatch, capsys) -> None:
    monkeypatch.setattr(performance_dashboard, "NEEDS", ("dash", "no_such_package"))
    assert performance_dashboard.main([]) == 77
    assert "no_such_package is missing" in capsys.readouterr().err

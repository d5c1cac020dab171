"""The dashboard as its users meet it: typed on a command line, and looked at in a real browser."""

import cProfile
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
from workshop.compare.figures import NEITHER, SAVED
from workshop.compare.rows import build_rows, ordinary
from workshop.dashboard import blocks, figures, server
from workshop.dashboard.data import Choice, Live, Snapshot
from workshop.report import comparisons
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
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium.open_browser(tmp_path_factory.mktemp("browser")) as running:
        yield running


@pytest.fixture(scope="module")
def selection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stored_runs.select(tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="module")
def address(selection: Path) -> Iterator[str]:
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


# --- in the browser ------------------------------------------------------------------------------


WORDS = {
    blocks.CONTENTS: "V3 is 3.39x",
    SPEED: "Peak memory",
    "Same model?": "Largest difference between 7 versions",
    "Ladder": "What each rung saves",
    "Sweeps": "over batch size",
    ROOFLINE: "V3's kernels",
    KERNELS: "elementwise_kernel<masked_fill_kernel>",
    blocks.LABS: "6,368.2",
}


@pytest.mark.slow
def test_every_view_renders(window: Any, address: str) -> None:
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


def test_a_choice_changes_the_figures(window: Any, address: str, selection: Path) -> None:
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


def test_new_files_appear_and_broken_ones_are_named(window: Any, tmp_path: Path) -> None:
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


def test_names_are_text(window: Any, hostile: Path) -> None:
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
        show(window, KERNELS, AS_SHOWN)
        show(window, blocks.LABS, f"IMPLAUSIBLE: fp32: {AS_SHOWN}")
        harmless(window)


def harmless(window: Any) -> None:
    assert window.execute_script("return window.hacked") is None
    assert not window.find_elements("css selector", "img[src=x], svg image[href=x]")
    assert chromium.complaints(window) == []


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
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


# --- what is made of results ---------------------------------------------------------------------


def test_what_a_change_costs_does_not_grow_with_the_files(tmp_path: Path) -> None:
    def calls(folder: Path, count: int) -> int:
        """Calls of functions for a view of each size, after files are read and rows are made."""
        snapshot = Live(Collection([folder])).snapshot
        assert sum(map(len, snapshot.groups.values())) == count
        profile = cProfile.Profile()
        for group in snapshot.groups:
            snapshot.rows(group)
            choice = snapshot.settle(Choice(*group))
            assert len(profile.runcall(blocks.view, SPEED, snapshot, choice)) == 5
        return sum(entry.callcount for entry in profile.getstats())

    few, many = tmp_path / "few", tmp_path / "many"
    stored_runs.write_many(few, 96)
    stored_runs.write_many(many, 480)
    assert calls(many, 480) < 1.5 * calls(few, 96)


def snapshot_of(folder: Path) -> Snapshot:
    collection = Collection([folder])
    collection.refresh()
    assert not collection.broken
    return Snapshot(collection)


def test_a_page_opened_after_news_shows_them(tmp_path: Path) -> None:
    live = Live(Collection([tmp_path]))
    live.refresh()
    app = server.make_app(live)
    stored_runs.write(tmp_path, stored_runs.reference())
    page = str(app.layout())
    assert "NVIDIA H200" in page and f"data={live.refresh()}" in page.replace("'", "")


def test_the_bars_are_the_rows_numbers() -> None:
    runs = ordinary(records.load_folder(REFERENCE / "nvidia_h200" / "runs", RunResult))
    rows = [row for row in build_rows(runs) if row.config == "medium"]
    phases = {bars.name: bars for bars in figures.phases(rows).data}
    shown = {"tokens_per_s": figures.throughput(rows).data[0]}
    shown |= {"speedup": figures.speedups(rows).data[0], "step_ms": phases["whole step"]}
    shown |= {f"{part}_ms": phases[part] for part in ("forward", "backward", "optimizer")}
    for field, bars in shown.items():
        expected = {row.label: getattr(row, field) for row in rows}
        assert dict(zip(bars.x, bars.y, strict=True)) == expected, field


def test_all_sizes_of_a_session_have_one_peak(tmp_path: Path) -> None:
    """In the dashboard and in the report, which show each size by itself."""
    for preset, peak in (("small", 200.0), ("medium", 300.0)):
        changes = {"session": "s", "peak_tflops": peak}
        stored_runs.write(tmp_path, stored_runs.reference(preset=preset), preset, **changes)
    collection = Collection([tmp_path])
    collection.refresh()
    snapshot = Snapshot(collection)
    shown = [row for group in snapshot.groups for row in snapshot.rows(group)]
    reported = [row for group in comparisons.groups(collection.runs) for row in group.rows]
    assert [row.peak_tflops for row in (*shown, *reported)] == [300.0] * 4


def test_a_sweep_is_of_one_session_and_has_no_point_where_that_failed(tmp_path: Path) -> None:
    content = stored_runs.reference()
    red = content["gate"] | {"status": "fail", "failures": ["logits differ"]}
    for session, lengths in (("1", (64, 128, 256)), ("2", (128, 256, 512)), ("3", (128,))):
        for length in lengths:
            step_ms = [100.0 * int(session) + length] * 9
            at = {"session": session, "seq_len": length, "step_ms": step_ms, "kind": "sweep point"}
            if (session, length) == ("2", 256):
                at |= {"gate": red, "status": "gate failed", "step_ms": []}
            stored_runs.write(tmp_path, content, f"{session}-{length}", **at)
    snapshot = snapshot_of(tmp_path)
    group = next(group for group in snapshot.groups if group.shape == "8 × 128")
    found = blocks.view("Sweeps", snapshot, snapshot.settle(Choice(*group)))
    assert [block.key for block in found] == ["seq-len-step", "seq-len-throughput",
                                              "seq-len-memory"]  # fmt: skip
    assert found[0].figure is not None
    line = found[0].figure.data[0]
    assert list(zip(line.x, line.y, strict=True)) == [(128, 328), (512, 712)]


def test_switches_are_shown_with_their_version(tmp_path: Path) -> None:
    content = stored_runs.reference("v2")
    without = content["options"] | {"fuse_qkv": False}
    slower = [ms + 1.0 for ms in content["step_ms"]]
    stored_runs.write(tmp_path, content)
    stored_runs.write(tmp_path, content, "off", options=without, step_ms=slower)
    snapshot = snapshot_of(tmp_path)
    found = {b.key: b for b in blocks.view("Ladder", snapshot, snapshot.settle(Choice()))}
    figure = found["switches-v2"].figure
    assert figure is not None and figure.layout.yaxis.ticktext == ("no-fuse-qkv",)
    assert figure.data[0].x[0] == pytest.approx(1.0)


def test_the_ladder_has_the_versions_of_one_comparison(tmp_path: Path) -> None:
    content = stored_runs.reference()
    for key, session, medians in (
        ("v1", "2", (80, 81)), ("v2", "2", (80, 82)), ("v3", "2", (40, 41)), ("v4", "1", (20, 20)),
        ("hf", "2", (5, 5)), ("v1", "1", (90, 90)),
    ):  # fmt: skip
        for number, ms in enumerate(medians):
            changes = {"version": key, "session": session, "step_ms": [ms] * 20, "options": {}}
            stored_runs.write(tmp_path, content, str(number), **changes)
    snapshot = snapshot_of(tmp_path)
    choice = snapshot.settle(Choice())
    fall, parts = blocks.view("Ladder", snapshot, choice)
    assert fall.figure is not None and parts.figure is not None
    bars = fall.figure.data[0]
    assert bars.x == ("v1", "v1 → v2", "v2 → v3", "left")
    assert (bars.base, bars.y) == ((0, 80.5, 40.5, 0), (80.5, 0.5, 40.5, 40.5))
    grey = versions.ALL["v1"].colour
    assert bars.marker.color == (grey, NEITHER, SAVED, grey)
    assert bars.text[1] == "<b>+0.5 ms</b><br>+1%<br>no difference"
    assert parts.figure.data[0].x == ("v3",), "as the table says of v2: no significant difference"
    assert fall.after == ["Left out: v4 (another comparison), hf (a peer)."]
    overview = {block.key: block for block in blocks.view(SPEED, snapshot, choice)}
    speedups = overview["speedup"].figure
    assert speedups is not None and speedups.data[0].error_y.array[0] is None, "of V1 over itself"


def test_each_profile_has_a_bar_of_its_own_as_long_as_its_list(tmp_path: Path) -> None:
    labs = REFERENCE / "nvidia_h200" / "inference_benchmark" / "profiles"
    shutil.copytree(labs, tmp_path / "lab" / "profiles")
    record = stored_runs.content(PROFILE / "run.jsonl")
    for place, changes in (
        ("a/v1/tool", {}),
        ("b/v1/tool", {"created": "2027-01-01T10:11:12+00:00"}),
        ("c/v1/tool", {"created": "2027-01-01T10:11:12+00:00"}),
        ("d/v1/tool", {"options": record["options"] | {"compile": "default"}}),
    ):
        shutil.copytree(PROFILE, tmp_path / "profiles" / place)
        path = tmp_path / "profiles" / place / "run.jsonl"
        path.write_text(stored_runs.lines(record | changes))
    snapshot = snapshot_of(tmp_path)
    shown = []
    for key, profile in snapshot.profiles.items():
        bars, hot, *_ = blocks.view(KERNELS, snapshot, Choice(profile=key))
        assert bars.figure is not None and hot.table is not None
        names = bars.figure.layout.yaxis.ticktext
        assert len(set(names)) == len(names) and snapshot.profile_labels[key] in hot.title
        assert {trace.y for trace in bars.figure.data} == {None}, "a place for each name"
        lengths = [sum(ms) for ms in zip(*(t.x for t in bars.figure.data), strict=True)]
        _, _, _, ms, *_ = hot.table.rows[-1]
        assert hot.table.header[3] == "ms a step" and profile.table.steps
        assert float(str(ms).replace(",", "")) == pytest.approx(
            profile.table.total_ns / profile.table.steps / 1e6, abs=1e-3
        )
        assert len(lengths) == len(names)
        assert any(length == pytest.approx(float(str(ms)), abs=1e-3) for length in lengths)
        shown.append(names)
    later = "v1, 2027-01-01 10:11"
    assert shown[:2] == [("fp16", "fp32")] * 2
    assert (
        shown[2:]
        == [
            (
                "v1, 2026-11-26 07:41",
                f"{later}, b/v1/tool",
                f"{later}, c/v1/tool",
                "v1, compile=default",
            )
        ]
        * 4
    )
    assert len(set(snapshot.profile_labels.values())) == len(snapshot.profiles)
    *_, contents = blocks.view(blocks.CONTENTS, snapshot, Choice())
    assert contents.title == "Profiles: 6"


def test_a_red_gate_is_in_no_figure(tmp_path: Path) -> None:
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
    ladder = blocks.view("Ladder", snapshot, snapshot.settle(Choice()))
    assert [block.figure for block in ladder] == [None]
    proof = str(blocks.view("Same model?", snapshot, snapshot.settle(Choice())))
    assert "not finite" in proof and "1.0e-08" not in proof


def test_the_newest_day_s_fullest_comparison_is_seen_first(tmp_path: Path) -> None:
    shutil.copytree(REFERENCE, tmp_path / "reference")
    reference = stored_runs.reference()
    first = snapshot_of(tmp_path).settle(Choice())
    assert (first.device, first.preset, first.precision) == ("NVIDIA H200", "medium", "bf16")
    assert set(first.versions) >= {*versions.VERSIONS, "hf"}  # all that have results
    own = reference["device"] | {"name": "my laptop"}
    stored_runs.write(tmp_path, reference, device=own, session="20991231-000000-abcdef")
    assert snapshot_of(tmp_path).settle(Choice()).device == "my laptop"


def test_a_gate_on_fewer_tokens_is_marked(tmp_path: Path) -> None:
    run = stored_runs.reference("v1", "large")
    stored_runs.write(tmp_path, run)
    snapshot = snapshot_of(tmp_path)
    choice = snapshot.settle(Choice())
    shown = ("pass *", "the gate ran on fewer tokens than the run: 4 x 1024")
    for view in ("Speed and memory", "Same model?"):
        tables = [block.table for block in blocks.view(view, snapshot, choice) if block.table]
        (gate,) = {row[1] for table in tables for row in table.rows if table.header[1] == "verdict"}
        assert (gate.text, gate.title) == shown


# --- the command line ----------------------------------------------------------------------------


def test_a_port_that_can_not_be_had_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for port in (str(taken.getsockname()[1]), "65536"):
            assert performance_dashboard.main(["--port", port, "--no-browser"]) == 2
            error = capsys.readouterr().err
            assert f"--port {port}: " in error and error.count("\n") == 1


def test_a_missing_package_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(performance_dashboard, "NEEDS", ("dash", "no_such_package"))
    assert performance_dashboard.main([]) == 77
    assert "no_such_package is missing" in capsys.readouterr().err

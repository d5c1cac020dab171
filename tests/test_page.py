"""The page of all results, as report_generator.py writes it and performance_dashboard.py serves it:
its numbers are the result files', and no file can break or fool it."""

import dataclasses
import html
import json
import re
import shutil
import socket
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from statistics import median
from typing import Any

import browser as chromium
import pytest
from stored_runs import PARTS, REFERENCE, lab_run, reference, select, write, write_lab

from analysis_tools import performance_dashboard, report_generator
from workshop import records, versions
from workshop.collection import Collection
from workshop.exercises.progress import Progress
from workshop.results import Parity, RunResult
from workshop.show import page, server
from workshop.show.page import Choice

H200 = REFERENCE / "nvidia_h200"
TOOL = "analysis_tools/report_generator.py"
SIZES = [("small", "bf16"), ("small", "fp16"), ("small", "fp32"), ("small", "tf32"),
         ("medium", "bf16"), ("large", "bf16")]  # fmt: skip
"""In the page's order."""
EVIL = (
    "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>\x1b[31m`| [x](javascript:alert(3))"
)
WAIT_S = 60
"""For a page to change: by then it never will."""


class Parsed(HTMLParser):
    """The elements of a page, its links, and what it loads; elements that are closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(f"{tag} {name}", value or "") for name, value in attrs]
        if tag not in {"meta", "link", "img", "br", "input", "hr"}:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def values(self, *names: str) -> list[str]:
        """The values of attributes, named with their elements or alone."""
        return [value for at, value in self.attributes if at in names or at.split()[1] in names]


def results_of(*folders: Path) -> server.Results:
    return server.Results(Collection(folders))


def make(*folders: Path, at: Path) -> tuple[str, str]:
    """The page and the Markdown of some results, written for a folder."""
    made = page.make(results_of(*folders).parts, title="Results")
    return page.html_page(made, at), page.markdown_page(made, at)


@pytest.fixture(scope="module")
def selection(tmp_path_factory) -> Path:
    return select(tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="module")
def written(selection, tmp_path_factory) -> tuple[str, str, Path]:
    """A page, its Markdown, and their folder."""
    folder = tmp_path_factory.mktemp("a folder, with # and %")
    return *make(selection, at=folder), folder


@pytest.fixture(scope="module")
def sections(selection) -> list[page.Section]:
    made = page.make(results_of(selection).parts, title="Results")
    return [s for shelf in made.shelves for device in shelf.devices for s in device.sections]


def tables_of(section: page.Section) -> dict[str, list[list[str]]]:
    """The cells of a section's tables, by title."""
    return {table.title: [list(line.cells) for line in table.lines] for table in section.tables}


# --- numbers -------------------------------------------------------------------------------------


def runs_of(preset: str, precision: str, version: str) -> list[dict[str, Any]]:
    wanted = (preset, precision, version)
    ladders = [H200 / part for part in PARTS if "runs/2" in part]
    runs = [run for path in ladders for run in records.load_runs(path, RunResult)]
    found = [run for run in runs if (run.config_name, run.precision, run.version) == wanted]
    return list(map(dataclasses.asdict, found))


def middle(runs: list[dict[str, Any]], name: str) -> float:
    return median(value for run in runs for value in run[name])


def number(text: str) -> float:
    return float(text.split()[0].replace(",", ""))


@pytest.mark.parametrize("size", SIZES)
def test_a_ladders_numbers_are_its_result_files(sections, size) -> None:
    (tables,) = (
        tables_of(s)
        for s in sections
        if s.title.startswith(f"{size[0]}: ")
        and f", {size[1]}," in s.title
        and s.kind == "Versions"
    )
    fast, verdicts = tables["How fast"], tables["Verdict and cost"]
    saved = {row[0]: row[1:] for row in tables.get("Saved of V1's step, in ms", [])}
    ran = [key for key in versions.ALL if runs_of(*size, key)]
    assert [row[0] for row in fast] == [row[0] for row in verdicts] == ran and len(ran) >= 4
    baseline = runs_of(*size, "v1")
    for shown, checked in zip(fast, verdicts, strict=True):
        runs = runs_of(*size, shown[0])
        names = ("step_ms", "forward_ms", "backward_ms", "optimizer_ms")
        times = [middle(runs, name) for name in names]
        tokens = runs[0]["batch_size"] * runs[0]["seq_len"] / times[0] * 1e3
        assert shown[2] == f"{tokens:,.0f}"
        assert [number(text) for text in shown[3:7]] == pytest.approx(times, abs=0.0051)
        ratio = middle(baseline, "step_ms") / times[0]
        same = shown[7].startswith("no significant difference [")
        once = len(runs) == 1  # then there is no verdict, and no saving
        speedup = f"{ratio:.2f}x (1 process)" if once else f"{ratio:.2f}x ["
        assert same or shown[7] == "baseline" or shown[7].startswith(speedup)
        tensors = runs[0]["gradients"]["tensors_total"]
        audited = all(run.get("audit", {}).get("status") == "pass" for run in runs)
        gate = ("pass" if audited else "not audited") + (" *" if size[0] == "large" else "")
        assert checked[1:3] == [gate, f"{tensors}/{tensors}"]
        assert checked[4] == f"{max(run['memory_mb']['peak'] for run in runs):,.0f}"
        assert (shown[0] in saved) == (shown[0] != "v1" and not same and not once)
        if shown[0] in saved:
            less = [middle(baseline, name) - middle(runs, name) for name in (*names[1:], names[0])]
            assert [number(text) for text in saved[shown[0]]] == pytest.approx(less, abs=0.0051)


def test_hot_lists_are_the_kernel_tables(selection, sections) -> None:
    heads = []
    for path in selection.glob("*/profiles/*/*/kernels.json"):
        table = json.loads(path.read_text(encoding="utf-8"))
        kernel, steps = table["kernels"][0], table["steps"] or 1
        times = f"{kernel['calls'] / steps:,.0f}", f"{kernel['total_ns'] / steps / 1e6:,.3f}"
        heads.append([kernel["category"], *times, f"{kernel['share']:.1%}"])
    shown = [rows[0][1:] for section in sections for title, rows in tables_of(section).items()
             if title.startswith("The longest")]  # fmt: skip
    assert sorted(shown) == sorted(heads) and len(heads) == 5


def test_each_cell_is_in_both_forms(sections, written) -> None:
    page_, markdown = (text.replace("\\", "") for text in written[:2])
    rows = [rows for section in sections for rows in tables_of(section).values()]
    cells = {cell for table in rows for row in table for cell in row}
    assert len(rows) > 30 and len(cells) > 1000
    assert [cell for cell in cells if html.escape(cell) not in page_] == []
    assert [cell for cell in cells if cell not in markdown] == []
    run = runs_of("medium", "bf16", "v3")[0]
    for text in (page_, markdown):
        assert f"torch {run['software']['torch']}" in text and run["git_commit"] in text


def test_every_link_leads_somewhere_and_nothing_is_loaded(selection, written) -> None:
    html, markdown, folder = written
    parsed = Parsed(html)
    ids, links = parsed.values("id"), parsed.values("a href")
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in links if link[0] == "#"} <= set(ids)
    files = (folder / urllib.parse.unquote(link) for link in links if link[0] != "#")
    linked = {file.resolve(strict=True) for file in files}
    assert linked >= set(selection.glob("*/runs/*.jsonl"))
    assert linked >= set(selection.glob("*/profiles/*/*/kernels.json"))
    loads = parsed.values("src", "data", "link href")
    assert all(address.startswith("data:") for address in loads)
    assert "script" not in parsed.tags and "http://" not in re.sub(r'xmlns\S*="[^"]*"', "", html)
    targets = set(re.findall(r"\]\(([^)#]+)\)", markdown))
    assert targets and all((folder / urllib.parse.unquote(one)).is_file() for one in targets)


# --- what comes first ----------------------------------------------------------------------------


def test_ones_own_results_come_first_and_others_failures_are_no_warning_above_them(
    tmp_path,
) -> None:
    theirs, own = reference("v2"), reference("v1")
    red = theirs["gate"] | {"status": "fail", "failures": ["norm.weight is missing"]}
    changes: dict[str, Any] = {"gate": red, "step_ms": [], "status": "gate failed"}
    write(tmp_path / "reference", theirs, **changes)
    write(tmp_path, own, device=own["device"] | {"name": "My GPU"})
    html, markdown = make(tmp_path, at=tmp_path)
    for text in (html, markdown):
        words = page.OWN, "My GPU", "How fast", page.OTHERS, "norm.weight is missing"
        places = [text.rindex(one) for one in words]
        assert places[0] < places[1] < places[3] < places[4] and places[2] > places[0]
    assert "to look into" not in html and '"alarm"' not in html
    # Now it is one's own.
    write(tmp_path, theirs, "red", **changes)
    write(tmp_path, own, "fast", plausibility=["faster than light"])
    html, markdown = make(tmp_path, at=tmp_path)
    for text in (html, markdown):
        begin = text[text.index("2 to look into") :]
        words = ("FAIL", "norm.weight is missing", "IMPLAUSIBLE", "faster than light")
        assert all(begin.index(word) < begin.index("median over all steps") for word in words)
    assert '<td class="number">FAIL</td>' in html[: html.index(f"<h2>{page.OTHERS}")]
    assert 'class="verdict good"' not in html[: html.index(f"<h2>{page.OTHERS}")]


def test_the_first_screen_has_the_newest_fullest_ladder_and_ones_own_first(tmp_path) -> None:
    shutil.copytree(REFERENCE, tmp_path / "reference")

    def first() -> page.Page:
        return results_of(tmp_path).page(Choice())

    here, says, then = first().sentences
    assert "make compare" in then
    assert says.startswith("V3 is 3.39x [3.37, 3.41] as fast as V1, in 55% less memory, at medium")
    drawn = first().picture
    assert drawn is not None and "v3 19.85 (forward 6.38" in drawn.alt
    own = reference("v1")["device"] | {"name": "my laptop"}
    for version in ("v1", "v2"):
        write(tmp_path, reference(version), device=own, session="20991231-000000-abcdef")
    here, says, then = first().sentences
    assert here.startswith(f"{page.OWN}: 2 runs") and "on my laptop" in says


# --- names, odd values and broken files ----------------------------------------------------------


def write_evil(folder: Path) -> None:
    run = reference("v1")
    red = run["gate"] | {"status": "fail", "failures": [EVIL]}
    names = {"device": run["device"] | {"name": EVIL}, "software": {EVIL: EVIL},
             "git_commit": EVIL, "command": [EVIL], "data": {"name": EVIL}}  # fmt: skip
    write(folder, run, "evil", config_name=EVIL, gate=red, plausibility=[EVIL], **names)
    write(folder, run, "plain", config_name=EVIL, plausibility=[EVIL])
    odd = dict.fromkeys(("lab", "subject", "unit", "peak_source"), EVIL)
    odd |= {"gate": Parity(status="fail", failures=[EVIL]), "device": {"name": EVIL}}
    write_lab(folder, lab_run(EVIL, session=EVIL.replace("/", "∕"), plausibility=[EVIL], **odd))
    profile = folder / "profiles" / EVIL.replace("/", "∕") / "tool"
    profile.mkdir(parents=True)
    source = next(REFERENCE.glob("*/profiles/v1/*/kernels.json"))
    table = json.loads(source.read_text(encoding="utf-8"))
    for kernel in table["kernels"][:2]:  # with counters they are points of a roofline
        name = f'"><script>alert(1)</script>{kernel["name"]}'
        kernel |= {"name": name, "bytes": 1e9, "flops": 1e9}
    table |= {"tool": EVIL, "device": "NVIDIA H200", "warnings": [EVIL]}
    (profile / "kernels.json").write_text(json.dumps(table), encoding="utf-8")


def test_names_from_files_are_text(tmp_path) -> None:
    write_evil(tmp_path)
    html, markdown = make(tmp_path, at=tmp_path)
    parsed = Parsed(html)
    assert not {"script", "iframe", "object", "embed"} & set(parsed.tags)
    assert not [name for name, _ in parsed.attributes if name.split()[1].startswith("on")]
    links = parsed.values("a href")
    assert all(link[0] in "#." or "://" not in link for link in links)
    assert not [link for link in links if link.lower().startswith("javascript")]
    assert html.count("&lt;script&gt;alert(1)") >= 10 and "img" in parsed.tags
    assert "\x1b" not in html + markdown
    tokens = list(tokens_of(markdown))
    raw = {token.content for token in tokens if token.type.startswith("html")}
    assert all(re.fullmatch(r'<a id="[-a-z0-9]+">|</a>', text.strip()) for text in raw), raw
    targets = [str(token.attrs["href"]) for token in tokens if token.type == "link_open"]
    assert targets and all(target.startswith(("runs/", "profiles/", "#")) for target in targets)
    assert "image" not in {token.type for token in tokens}
    texts = [token.content for token in tokens if token.type == "text"]
    assert sum("<script>alert(1)</script>" in text for text in texts) >= 10


def tokens_of(markdown: str) -> Iterator[Any]:
    """Tokens of a document, those inside of lines among them."""
    from markdown_it import MarkdownIt

    for token in MarkdownIt("commonmark").enable("table").parse(markdown):
        yield from token.children or [token]


def test_broken_files_are_named_and_do_no_harm(tmp_path) -> None:
    write(tmp_path, reference("v1"))
    cut = write(tmp_path, reference("v2"), "cut")
    cut.write_text(cut.read_text()[:300])
    write(tmp_path, reference("v2"), "typed", step_ms="fast")
    (benchmark,) = records.files_in(H200 / "kernels")
    path = tmp_path / "kernels" / "runs" / "a.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text(benchmark.read_text().replace('"phase_ms": {', '"phase": {', 1))
    html, markdown = make(tmp_path, at=tmp_path)
    assert "How fast" in html
    for text in (html[html.index("Broken files") :], markdown[markdown.index("Broken files") :]):
        plain = text.replace("\\", "")
        for words in ("v2_cut.jsonl", "truncated", "step_ms: expected", "phase is unknown"):
            assert words in plain, words


# --- the command lines ---------------------------------------------------------------------------


def test_the_report_is_two_files_of_all_folders(tmp_path, capsys) -> None:
    write(tmp_path / "theirs", reference("v1"))
    own = reference("v1", "medium")
    write(tmp_path / "own", own, device=own["device"] | {"name": "My GPU"}, session="2027-01")
    folder = tmp_path / "out" / "deeper"
    words = ["--results", tmp_path / "theirs", "--results", tmp_path / "own",
             "--output-dir", folder]  # fmt: skip
    assert report_generator.main(list(map(str, words))) == 0
    assert capsys.readouterr().err == ""
    assert sorted(path.name for path in folder.iterdir()) == ["report.html", "report.md"]
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert text.index("<h3>My GPU") < text.index("<h3>NVIDIA H200")  # the newest run's is first
    (tmp_path / "empty").mkdir()
    assert report_generator.main(["--results", str(tmp_path / "empty")]) == 2
    assert "no result in it" in capsys.readouterr().err


def test_a_participants_sheet_has_their_runs_alone(tmp_path, capsys) -> None:
    results = tmp_path / "results"
    write(results / "reference", reference("v1"), device={"type": "cuda", "name": "Theirs"})
    command = ["--results", str(results), "--output-dir", str(tmp_path), "--sheet"]
    assert report_generator.main(command) == 2
    assert "no runs of yours" in capsys.readouterr().err
    own = reference("v1")
    write(results, own, "own", device=own["device"] | {"name": "My GPU"})
    for length in (333, 444):  # a sweep, which is no part of the sheet
        write(results, own, f"{length}", seq_len=length, session="1", kind="sweep point")
    Progress(results).checked("triton_basics", 3, 3)
    write_lab(results, lab_run("mine"))
    assert report_generator.main(command) == 0
    path = tmp_path / "my_results.md"
    text, html = path.read_text(encoding="utf-8"), path.with_suffix(".html").read_text("utf-8")
    for found in (text, html):
        assert "Theirs" not in found and "333" not in found and "444" not in found
        assert f"{median(own['step_ms']):,.2f} ±" in found and own["software"]["torch"] in found
        assert "passed 20" in found and "mine" in found
    path.write_text("my notes")
    assert report_generator.main(command) == 2
    assert "your notes may be in it" in capsys.readouterr().err
    assert path.read_text() == "my notes"


def test_help_imports_nothing_large(type_command) -> None:
    answer = type_command("python", "-X", "importtime", TOOL, "--help")
    assert answer.returncode == 0 and "--sheet" in answer.stdout
    assert not re.search(r"\| +(torch|matplotlib|jinja2|numpy|rich)\n", answer.stderr)


def test_a_port_in_use_is_one_line(capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert performance_dashboard.main(["--port", port, "--no-browser"]) == 2
        error = capsys.readouterr().err
        assert f"--port {port}: " in error and error.count("\n") == 1


# --- the dashboard -------------------------------------------------------------------------------


@contextmanager
def served(*folders: Path) -> Iterator[str]:
    """The address of a dashboard over some folders."""
    with server.make_server(results_of(*folders), 0) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        try:
            yield f"http://{server.HOST}:{running.server_port}/"
        finally:
            running.shutdown()
            thread.join(WAIT_S)


def test_the_served_page_is_the_choice_of_the_reports(selection) -> None:
    found = results_of(selection)
    everything = found.page(Choice())
    assert [s.title for s in page.make(found.parts, title="x").shelves] == [
        shelf.title for shelf in everything.shelves
    ]
    chosen = server.choice_of("size=small&precision=bf16&versions=v3&versions=v1&show=Versions")
    (section,) = found.page(chosen).shelves[0].devices[0].sections
    assert section.title.startswith("small: 8 x 128 tokens, bf16")
    assert [line.cells[0] for line in section.tables[0].lines] == ["v1", "v3"]
    picture = found.page(chosen).picture
    assert picture is not None and "v1 29.51" in picture.alt and "v2" not in picture.alt
    for kind in ("Labs", "Profiles", "V3's kernels", "Waterfalls and sweeps"):
        devices = found.page(Choice(show=kind)).shelves[0].devices
        assert {s.kind for device in devices for s in device.sections} == {kind}


def test_another_sites_page_gets_nothing(selection) -> None:
    with served(selection) as address:
        for host, status in (("localhost", 200), ("127.0.0.1:80", 200), ("evil.example", 404)):
            asked = urllib.request.Request(f"{address}generation", headers={"Host": host})
            try:
                found = urllib.request.urlopen(asked).status
            except urllib.error.HTTPError as error:
                found = error.code
            assert found == status, host


@pytest.fixture(scope="module")
def window(tmp_path_factory) -> Iterator[Any]:
    with chromium.open_browser(tmp_path_factory.mktemp("browser")) as running:
        yield running


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
    until(lambda: text(window, "#first"), "the page")


def choose(window: Any, control: str, wanted: str) -> None:
    """Clicks an option of a control."""
    script = """[...document.querySelectorAll(`#${arguments[0]} label`)]
        .find(label => label.textContent.trim() === arguments[1]).click()"""
    window.execute_script(script, control, wanted)


def test_a_choice_changes_the_page_offline_on_any_screen(window, selection) -> None:
    """Offline, without a word on the console, within the width of a projector and of a phone."""
    with served(selection) as address:
        open_page(window, address)
        until(lambda: window.execute_script("return document.querySelector('#first svg')"), "drawn")
        choose(window, "precision", "bf16")
        until(lambda: "fp16, NVIDIA" not in text(window, "main"), "bf16")
        assert text(window, "h1") == server.TITLE
        for theme, size in (("light", (1280, 720)), ("dark", (400, 800))):
            chromium.wear(window, theme)
            chromium.resize(window, *size)
            for kind, word in (("Versions", "Verdict and cost"), ("Profiles", "The longest"),
                               ("Labs", "6,368.2"), ("V3's kernels", "swiglu")):  # fmt: skip
                choose(window, "show", kind)
                until(lambda w=word: w in text(window, "main"), kind)
                wide = window.execute_script("return document.documentElement.scrollWidth")
                assert wide <= size[0], f"{kind} is {wide} pixels wide"
            page_, words = (
                window.execute_script(f"return getComputedStyle(document.body).{what}")
                for what in ("backgroundColor", "color")
            )
            light = [sum(map(int, re.findall(r"\d+", c)[:3])) for c in (page_, words)]
            assert (light[0] > light[1]) == (theme == "light")
        chromium.as_opened(window)
        choose(window, "show", "Versions")
        choose(window, "versions", "v2")
        until(lambda: "fused operations" not in text(window, "thead"), "without v2")
        # By the keyboard alone: the arrows choose, and the choice keeps the focus.
        from selenium.webdriver.common.keys import Keys

        window.find_element("css selector", "#size input:checked").send_keys(Keys.ARROW_RIGHT)
        until(lambda: "small: 8 x 128" in text(window, "main")
              and "medium: 16 x 512" not in text(window, "main"), "an arrow")  # fmt: skip
        window.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
        until(lambda: "small: 8 x 128" not in text(window, "main"), "another")
        assert chromium.complaints(window) == []
        assert {url for url in chromium.requested(window) if not url.startswith(address)} == set()


def test_new_files_appear_and_broken_ones_are_named(window, tmp_path) -> None:
    with served(tmp_path) as address:
        open_page(window, address)
        until(lambda: "No results yet" in text(window), "an empty page")
        written = write(tmp_path, reference())
        until(lambda: "859" in text(window, "main"), "a first result")
        write(tmp_path, reference("v2"))
        written.with_name("cut.jsonl").write_text(written.read_text()[:500])
        until(lambda: "cut.jsonl" in text(window, ".broken"), "a broken file")
        until(lambda: "758" in text(window, "main"), "a second result")
        written.with_name("cut.jsonl").unlink()
        until(lambda: "cut.jsonl" not in text(window), "it is removed")
        assert chromium.complaints(window) == []

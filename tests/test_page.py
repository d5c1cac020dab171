"""The page of all results, as report_generator.py writes it and performance_dashboard.py serves it:
its numbers are the result files', and no file can break or fool it."""

import contextlib
import dataclasses
import json
import re
import socket
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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
SIZES = [("small", "bf16"), ("small", "fp16"), ("small", "fp32"), ("small", "tf32"),
         ("medium", "bf16"), ("large", "bf16")]  # fmt: skip
"""In the page's order."""
EVIL = (
    "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>\x1b[31m`| [x](javascript:alert(3))"
)
VOID = {"meta", "link", "img", "br", "input", "hr"}
WAIT_S = 60
"""For a page to change: by then it never will."""


@dataclass
class Parsed(HTMLParser):
    """The content of a page: tables by heading of their section and caption, links, elements."""

    tables: dict[tuple[str, str], list[list[str]]] = field(default_factory=dict)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    attributes: set[str] = field(default_factory=set)
    headings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._open: list[str] = []
        self._caption, self._text = "", ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        self.attributes |= set(values)
        self.ids += [values["id"]] if "id" in values else []
        self.links += [values["href"]] if tag == "a" else []
        self.loads += [values[n] for n in ("src", "data") if n in values]
        self.loads += [values["href"]] if tag == "link" else []
        if tag not in VOID:
            self._open.append(tag)
        if tag == "tr":
            self.tables[self.headings[-1], self._caption].append([])
        if tag in ("caption", "th", "td", "h1", "h2", "h3", "h4"):
            self._text = ""

    def handle_data(self, data: str) -> None:
        self._text += data

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        if tag in ("h1", "h2", "h3", "h4"):
            self.headings.append(self._text)
        if tag == "caption":
            self._caption = self._text
            self.tables[self.headings[-1], self._caption] = []
        if tag in ("th", "td"):
            self.tables[self.headings[-1], self._caption][-1].append(self._text.strip())

    def named(self, caption: str) -> list[list[list[str]]]:
        return [rows for (_, name), rows in self.tables.items() if name.startswith(caption)]


def parse(html: str) -> Parsed:
    parsed = Parsed()
    parsed.feed(html)
    parsed.close()
    assert parsed._open == []
    return parsed


def results_of(*folders: Path) -> server.Results:
    return server.Results(Collection(folders))


def make(*folders: Path, at: Path) -> str:
    """The page of some results, written for a folder."""
    return page.html_page(page.make(results_of(*folders).parts, title="Results"), at)


Written = tuple[str, Path]
"""A page and its folder."""


@pytest.fixture(scope="module")
def selection(tmp_path_factory) -> Path:
    return select(tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="module")
def written(selection, tmp_path_factory) -> Written:
    folder = tmp_path_factory.mktemp("a folder, with # and %")
    return make(selection, at=folder), folder


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
def test_a_ladders_numbers_are_its_result_files(written, size) -> None:
    parsed = parse(written[0])
    at = SIZES.index(size)
    fast, verdicts = (parsed.named(name)[at][1:] for name in ("How fast", "Verdict and cost"))
    (heading,) = (one for one, name in parsed.tables if name == "How fast"
                  if one.startswith(f"{size[0]}: ") and f", {size[1]}, " in one)  # fmt: skip
    table = parsed.tables.get((heading, "Saved of V1's step, in ms"), [])
    saved = {row[0]: row[1:] for row in table}
    (glance,) = parsed.named("Median step and speed-up over V1")
    (line,) = (row for row in glance if row[0] == f"{size[0]}, {size[1]}")
    in_a_word = dict(zip((title.split(":")[0] for title in glance[0]), line, strict=True))
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
        first = next(run for run in runs if run["gate"]["status"] == "pass")
        tensors = first["gradients"]["tensors_total"]
        losses = f"{runs[0]['losses'][0]:.3f} → {runs[0]['losses'][-1]:.3f}"
        audited = all(run.get("audit", {}).get("status") == "pass" for run in runs)
        gate = ("pass" if audited else "not audited") + (" *" if size[0] == "large" else "")
        assert checked[1:4] == [gate, f"{tensors}/{tensors}", losses]
        assert in_a_word[shown[0]].endswith("†") == (shown[0] != "v1" and not audited)
        assert checked[4] == f"{max(run['memory_mb']['peak'] for run in runs):,.0f}"
        worst = max(m["error"] / m["allowed"] for m in first["gate"]["measures"].values())
        assert checked[8] == f"{worst:.0%}"
        assert (shown[0] in saved) == (shown[0] != "v1" and not same and not once)
        if shown[0] in saved:
            less = [middle(baseline, name) - middle(runs, name) for name in (*names[1:], names[0])]
            assert [number(text) for text in saved[shown[0]]] == pytest.approx(less, abs=0.0051)


def test_each_kind_of_result_is_there(written) -> None:
    html, _ = written
    parsed = parse(html)
    runs = [run for size in SIZES for key in versions.ALL for run in runs_of(*size, key)]
    assert sum(int(row[-1]) for row in parsed.named("What was run")[0][1:]) == len(runs)
    commands = parsed.named("Command lines")[0][1:]
    assert len(commands) == 2 * 7 + 6 + 3 * 4
    assert all(re.match(r"python \w+/(tiny_llama_v|hugging_face_)", row[1]) for row in commands)
    run = runs_of("medium", "bf16", "v3")[0]
    for words in ("What each change is worth", "Cost as work grows", "inference_benchmark: ",
                  "of ceiling", "What the harness costs", "torch.profiler, ", run["git_commit"],
                  f"torch {run['software']['torch']}"):  # fmt: skip
        assert words in html, words
    # The first, all speed-ups; rows and losses of each size; categories of each tool and device.
    assert parsed.tags.count("svg") == 2 + 2 * len(SIZES) + 4
    benchmarks = records.files_in(H200 / "kernels")
    # Rooflines of those, of a profile and of each size; two waterfalls, a sweep.
    assert parsed.tags.count("img") == len(benchmarks) + 1 + len(SIZES) + 3


def test_every_link_leads_somewhere_and_nothing_is_loaded(selection, written) -> None:
    html, folder = written
    parsed = parse(html)
    assert len(parsed.ids) == len(set(parsed.ids))
    assert {link[1:] for link in parsed.links if link[0] == "#"} <= set(parsed.ids)
    files = (folder / urllib.parse.unquote(link) for link in parsed.links if link[0] != "#")
    linked = {file.resolve(strict=True) for file in files}
    assert linked >= set(selection.glob("*/runs/*.jsonl"))
    assert linked >= set(selection.glob("*/profiles/*/*/kernels.json"))
    assert all(address.startswith("data:") for address in parsed.loads)
    assert "script" not in parsed.tags and "http://" not in re.sub(r'xmlns\S*="[^"]*"', "", html)
    referred = {*re.findall(r"url\(#([^)]+)\)", html), *re.findall(r'href="#(m[^"]+)"', html)}
    assert len(referred) > 20 and referred <= set(parsed.ids)


# --- what comes first ----------------------------------------------------------------------------


def test_ones_own_results_come_first_and_others_failures_are_no_warning_above_them(
    tmp_path,
) -> None:
    theirs, own = reference("v2"), reference("v1")
    red = theirs["gate"] | {"status": "fail", "failures": ["norm.weight is missing"]}
    changes: dict[str, Any] = {"gate": red, "step_ms": [], "status": "gate failed"}
    write(tmp_path / "reference", theirs, **changes)
    write(tmp_path, own, device=own["device"] | {"name": "My GPU"})
    html = make(tmp_path, at=tmp_path)
    words = page.OWN, "My GPU", "How fast", page.OTHERS, "norm.weight is missing"
    places = [html.rindex(one) for one in words]
    assert places[0] < places[1] < places[3] < places[4] and places[2] > places[0]
    assert "to look into" not in html and '"alarm"' not in html
    here, says, then = results_of(tmp_path).page(Choice()).sentences
    assert here.startswith(f"{page.OWN}: 1 run; {page.OTHERS}: 1 run") and "on My GPU" in says
    assert then == "make profile shows what bounds your versions; its profiles will be below."
    assert "that leaves out" not in html
    # Now it is one's own.
    write(tmp_path, theirs, "red", **changes)
    write(tmp_path, own, "fast", plausibility=["faster than light"])
    write(tmp_path, own, "older", session="20200101-000000-aaaaaa")
    html = make(tmp_path, at=tmp_path)
    begin = html[html.index("2 to look into") :]
    assert "that leaves out 1 run." in html
    words = ("FAIL", "norm.weight is missing", "IMPLAUSIBLE", "faster than light")
    assert all(begin.index(word) < begin.index("median over all steps") for word in words)
    assert '<td class="number">FAIL</td>' in html[: html.index(f"<h2>{page.OTHERS}")]
    assert 'class="verdict good"' not in html[: html.index(f"<h2>{page.OTHERS}")]


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
    html = make(tmp_path, at=tmp_path)
    parsed = parse(html)
    assert not {"script", "iframe", "object", "embed"} & set(parsed.tags)
    assert not [name for name in parsed.attributes if name.startswith("on")]
    assert all(link[0] in "#." or "://" not in link for link in parsed.links)
    assert not [link for link in parsed.links if link.lower().startswith("javascript")]
    assert html.count("&lt;script&gt;alert(1)") >= 10 and "img" in parsed.tags
    assert "\x1b" not in html


@pytest.mark.parametrize("broken", [
    {"losses": [1e308, -1e308] * 40,
     "memory_mb": {"peak": 1e15, "weights": 1e308, "gradients": -1e308}},
    {"device": {}, "data": {}, "command": [], "created": "", "software": {}, "options": {}},
    {"device": {"type": "cuda", "name": "\ud800 $\\frac$"}},  # can't be encoded, and is no formula
])  # fmt: skip
def test_odd_values_do_no_harm(tmp_path, broken, recwarn) -> None:
    write(tmp_path, reference("v1"))
    write(tmp_path, reference("v2"))
    write(tmp_path, reference("v3"), **broken)
    write(tmp_path, reference("v1"), "odd", **broken)
    html = make(tmp_path, at=tmp_path)
    assert html.encode()  # as it is written to a file
    assert any(row[0] == "v2" for rows in parse(html).named("How fast") for row in rows)
    assert [str(warning.message) for warning in recwarn] == []


def test_broken_files_are_named_and_do_no_harm(tmp_path) -> None:
    write(tmp_path, reference("v1"))
    cut = write(tmp_path, reference("v2"), "cut")
    cut.write_text(cut.read_text()[:300])
    write(tmp_path, reference("v2"), "typed", step_ms="fast")
    benchmark = next(iter(records.files_in(H200 / "kernels")))
    for name, text in (
        ("profiles/v1/ncu/kernels.json", '{"schema_version": 1, "kernel_table": 3}'),
        ("other/kernels.json", '{"schema_version": 1, "kernel_table": "ncu", "kernels": [3]}'),
        ("kernels/runs/a.jsonl", benchmark.read_text().replace('"phase_ms": {', '"phase": {', 1)),
        ("harness/harness_v1.json", '{"version": "v1"}'),
        ("ceilings/other.json", '{"schema_version": 1,'),  # of another machine
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    html = make(tmp_path, at=tmp_path)
    parsed = parse(html)
    assert len(parsed.named("How fast")[0]) == 2
    for words in ("v2_cut.jsonl", "truncated", "step_ms: expected", "phase is unknown",
                  "ncu/kernels.json", "other/kernels.json", "a.jsonl", "harness"):  # fmt: skip
        assert words in html[html.index("Broken files") :], words
    assert "other.json" in html  # it takes no roofline
    assert parsed.tags.count("img") == 1


# --- the command lines ---------------------------------------------------------------------------


def test_the_report_is_one_file_of_all_folders(tmp_path, capsys) -> None:
    write(tmp_path / "theirs", reference("v1"))
    own = reference("v1", "medium")
    write(tmp_path / "own", own, device=own["device"] | {"name": "My GPU"}, session="2027-01")
    folder = tmp_path / "out" / "deeper"
    words = ["--results", tmp_path / "theirs", "--results", tmp_path / "own",
             "--output-dir", folder]  # fmt: skip
    assert report_generator.main(list(map(str, words))) == 0
    assert capsys.readouterr().err == ""
    assert [path.name for path in folder.iterdir()] == ["report.html"]
    written = (folder / "report.html").read_text(encoding="utf-8")
    parts = results_of(tmp_path / "theirs", tmp_path / "own").parts
    drawn_here = page.html_page(page.make(parts, title="Training results"), folder)
    assert written == drawn_here and written.count("<svg") > 4  # from several processes
    headings = parse(written).headings
    assert headings[0] == "Training results"
    assert headings.index("My GPU") < headings.index("NVIDIA H200")  # the newest run's is first
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
    Progress(results).checked("text_1_floor", 1, 4)
    write_lab(results, lab_run("mine"))
    assert report_generator.main(command) == 0
    path = tmp_path / "my_results.html"
    found = path.read_text(encoding="utf-8")
    assert "Theirs" not in found and "333" not in found and "444" not in found and "My GPU" in found
    assert f"{median(own['step_ms']):,.2f} ±" in found and own["software"]["torch"] in found
    assert "passed 20" in found and "1 of 4" in found and "mine" in found
    path.write_text("my notes")
    assert report_generator.main(command) == 2
    assert "your notes may be in it" in capsys.readouterr().err
    assert path.read_text() == "my notes"


def test_a_port_in_use_is_one_line(capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for port in (str(taken.getsockname()[1]), "65536"):
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
    assert picture is not None and "median: v1 " in picture.alt and "v2" not in picture.alt
    for kind in ("Labs", "Profiles", "V3's kernels", "Waterfalls and sweeps"):
        devices = found.page(Choice(show=kind)).shelves[0].devices
        assert {s.kind for device in devices for s in device.sections} == {kind}
    assert found.page(Choice(device="none")).sentences[1] == "No timed run of a version is shown."


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
        # A chart of the page shown is asked for while another choice's page is on its way.
        window.execute_script("""history.replaceState(null, "", "?show=Labs")
            window.box = document.querySelector("main .later"); box.scrollIntoView()""")
        until(lambda: window.execute_script("return box.querySelector('svg')"), "the chart")
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
        from selenium.common.exceptions import WebDriverException
        from selenium.webdriver.common.keys import Keys

        def right(find: Callable[[], Any]) -> bool:
            """Whether the key was taken: it is not while a new page takes the old one's place."""
            with contextlib.suppress(WebDriverException):
                find().send_keys(Keys.ARROW_RIGHT)
                return True
            return False

        checked = "css selector", "#size input:checked"
        until(lambda: right(lambda: window.find_element(*checked)), "the choice of a size")
        until(lambda: "small: 8 x 128" in text(window, "main")
              and "medium: 16 x 512" not in text(window, "main"), "an arrow")  # fmt: skip
        until(lambda: right(lambda: window.switch_to.active_element), "the focus")
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

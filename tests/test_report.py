"""report_generator.py: its figures are the result files', and no file can break or fool it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from browser import complaints, open_browser, requested, resize, wear
from conftest import HANGS_S
from stored_runs import REFERENCE, ROOT, reference, write

from workshop import versions
from workshop.compare.collection import Collection
from workshop.report import content, pages

H200 = REFERENCE / "nvidia_h200"
LADDERS = H200 / "runs", H200 / "once" / "runs"
TOOL = "analysis_tools/report_generator.py"
EVIL = (
    "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>\x1b[31m`| [x](javascript:alert(3))"
)
VOID = {"meta", "link", "img", "br", "input", "hr"}


@dataclass
class Page(HTMLParser):
    """What a browser would find in a page: tables by the section they stand in, links, elements."""

    tables: dict[tuple[str, str], list[list[str]]] = field(default_factory=dict)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    attributes: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()
        self._open: list[str] = []
        self._section, self._caption, self._text = "", "", ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        self.attributes |= set(values)
        if "id" in values:
            self.ids.append(values["id"])
            self._section = values["id"] if tag == "section" else self._section
        if tag == "a":
            self.links.append(values["href"])
        self.loads += [values[name] for name in ("src", "data") if name in values]
        if tag == "link":
            self.loads.append(values["href"])
        if tag not in VOID:
            self._open.append(tag)
        if tag == "tr":
            self.tables[self._section, self._caption].append([])
        if tag in ("caption", "th", "td"):
            self._text = ""

    def handle_data(self, data: str) -> None:
        self._text += data

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        if tag == "caption":
            self._caption = self._text
            self.tables[self._section, self._caption] = []
        if tag in ("th", "td"):
            self.tables[self._section, self._caption][-1].append(self._text.strip())

    def close(self) -> None:
        super().close()
        assert self._open == []


def read(html: str) -> Page:
    page = Page()
    page.feed(html)
    page.close()
    return page


def make(*folders: Path, at: Path) -> tuple[str, str]:
    """The page and the Markdown of some results, for a folder where they would lie."""
    collection = Collection(folders)
    collection.refresh()
    report = content.build(collection, title="Results")
    return pages.html_page(report, at), pages.markdown_page(report, at)


@pytest.fixture(scope="module")
def from_reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, Path]:
    folder = tmp_path_factory.mktemp("a folder, with # and %")
    return *make(REFERENCE, at=folder), folder


def runs_of(preset: str, precision: str, version: str) -> list[dict[str, Any]]:
    name = f"{version}_{preset}_{precision}_*.json"
    paths = [path for folder in LADDERS for path in sorted(folder.glob(f"*/{name}"))]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def middle(runs: list[dict[str, Any]], name: str) -> float:
    return median(value for run in runs for value in run[name])


def figure(text: str) -> float:
    return float(text.split()[0].replace(",", ""))


# --- figures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("number, size", [
    (1, ("small", "bf16")), (3, ("small", "fp32")), (5, ("medium", "bf16")),
    (8, ("medium", "tf32")), (9, ("large", "bf16")),
])  # fmt: skip
def test_a_ladders_figures_are_its_result_files(
    from_reference: tuple[str, str, Path], number: int, size: tuple[str, str]
) -> None:
    page = read(from_reference[0])
    fast = page.tables[f"size-{number}", "How fast"][1:]
    proof = page.tables[f"size-{number}", "The same model? And at what cost"][1:]
    table = page.tables.get((f"size-{number}", "Saved of V1's step, in ms"), [])
    saved = {row[0]: row[1:] for row in table}
    ran = [key for key in versions.ALL if runs_of(*size, key)]
    assert [row[0] for row in fast] == [row[0] for row in proof] == ran and len(ran) >= 4
    baseline = runs_of(*size, "v1")
    for shown, checked in zip(fast, proof, strict=True):
        runs = runs_of(*size, shown[0])
        names = ("step_ms", "forward_ms", "backward_ms", "optimizer_ms")
        times = [middle(runs, name) for name in names]
        tokens = runs[0]["batch_size"] * runs[0]["seq_len"] / times[0] * 1e3
        assert shown[2] == f"{tokens:,.0f}"
        assert [figure(text) for text in shown[3:7]] == pytest.approx(times, abs=0.0051)
        ratio = middle(baseline, "step_ms") / times[0]
        same = shown[7].startswith("no significant difference [")
        once = len(runs) == 1  # then no verdict: it is not said to save anything
        told = f"{ratio:.2f}x (1 process)" if once else f"{ratio:.2f}x ["
        assert same or shown[7] == "baseline" or shown[7].startswith(told)
        first = next(run for run in runs if run["parity"]["status"] == "pass")
        tensors = first["gradients"]["tensors_total"]
        losses = f"{runs[0]['losses'][0]:.3f} → {runs[0]['losses'][-1]:.3f}"
        audited = all(run.get("audit", {}).get("status") == "pass" for run in runs)
        gate = ("pass" if audited else "gate only") + (" *" if size[0] == "large" else "")
        assert checked[1:4] == [gate, f"{tensors}/{tensors}", losses]
        peak = max(run["memory_mb"]["peak"] for run in runs)
        assert checked[4] == f"{peak:,.0f}"
        worst = max(m["error"] / m["allowed"] for m in first["parity"]["measures"].values())
        assert checked[8] == f"{worst:.0%}"
        assert (shown[0] in saved) == (shown[0] != "v1" and not same and not once)
        if shown[0] in saved:
            less = [middle(baseline, name) - middle(runs, name) for name in (*names[1:], names[0])]
            assert [figure(text) for text in saved[shown[0]]] == pytest.approx(less, abs=0.0051)


def test_hot_lists_are_the_kernel_tables(from_reference: tuple[str, str, Path]) -> None:
    tables = read(from_reference[0]).tables
    found = [rows for (_, caption), rows in tables.items() if caption.startswith("The longest")]
    files = sorted(REFERENCE.glob("*/profiles/*/*/kernels.json"))
    assert len(found) == len(files) >= 3
    heads = []
    for path in files:
        table = json.loads(path.read_text(encoding="utf-8"))
        kernel, steps = table["kernels"][0], table["steps"] or 1
        times = f"{kernel['calls'] / steps:,.0f}", f"{kernel['total_ns'] / steps / 1e6:,.3f}"
        heads.append([kernel["category"], *times, f"{kernel['share']:.1%}"])
    assert sorted(rows[1][1:] for rows in found) == sorted(heads)


def test_what_bounds_it_what_was_run_and_by_what(from_reference: tuple[str, str, Path]) -> None:
    html, markdown, _ = from_reference
    page = read(html)
    sessions = page.tables["device-1", "What was run"][1:]
    stored = [path for folder in LADDERS for path in folder.glob("*/*.json")]
    assert sum(int(row[-1]) for row in sessions) == len(stored)
    run = runs_of("medium", "bf16", "v3")[0]
    for text in (html, markdown):
        assert f"torch {run['software']['torch']}" in text and run["git_commit"] in text
        assert "GEMM-bound: matrix products take" in text  # the advisor
        assert re.search(r"v3: compute-bound: 47\d of 989 TFLOP/s \(bf16\), 48% of its roof", text)
        assert "Largest difference from V1 at any step" in text  # the loss curves, in words
        assert "fp16 scales the loss, by 65,536 at first" in text
    commands = page.tables["device-1", "Command lines"][1:]
    assert len(commands) == 3 * 6 + 9 * 4
    assert all(re.search(r"tiny_llama_v|hugging_face_l", row[1]) for row in commands)
    assert page.tags.count("svg") >= 13 and page.tags.count("img") >= 5
    assert markdown.count("scales the loss") == 3  # of three sizes, and of no other precision


def test_a_version_that_makes_no_difference_saves_nothing(tmp_path: Path) -> None:
    run = reference("v2")
    for name in ("a", "b"):
        write(tmp_path, reference("v1"), name)
        write(tmp_path, run, name, step_ms=reference("v1")["step_ms"])
    page = read(make(tmp_path, at=tmp_path)[0])
    assert "no significant difference" in page.tables["size-1", "How fast"][2][7]
    assert ("size-1", "Saved of V1's step, in ms") not in page.tables


# --- links ---------------------------------------------------------------------------------------


def test_every_link_leads_somewhere_and_nothing_is_loaded(
    from_reference: tuple[str, str, Path],
) -> None:
    html, markdown, folder = from_reference
    page = read(html)
    assert len(page.ids) == len(set(page.ids))
    linked = set()
    for link in page.links:
        if link.startswith("#"):
            assert link[1:] in page.ids
        else:
            linked.add((folder / urllib.parse.unquote(link)).resolve(strict=True))
    assert linked >= set(REFERENCE.glob("*/runs/*/*.json"))
    assert linked >= set(REFERENCE.glob("*/profiles/*/*/kernels.json"))
    assert all(address.startswith("data:") for address in page.loads)
    assert "script" not in page.tags and "http://" not in re.sub(r'xmlns\S*="[^"]*"', "", html)
    names = set(re.findall(r"\]\[(f\d+)\]", markdown))
    defined = dict(re.findall(r"^\[(f\d+)\]: (\S+)$", markdown, re.MULTILINE))
    assert names == set(defined)
    assert all((folder / urllib.parse.unquote(target)).is_file() for target in defined.values())
    anchors = re.findall(r'<a id="([^"]+)"', markdown)
    assert set(re.findall(r"\]\(#([^)]+)\)", markdown)) <= set(anchors)


# --- what files may hold -------------------------------------------------------------------------


def write_evil(folder: Path) -> None:
    run = reference("v1")
    write(
        folder,
        run,
        "evil",
        config_name=EVIL,
        device=run["device"] | {"name": EVIL},
        software={EVIL: EVIL},
        git_commit=EVIL,
        command=[EVIL],
        data={"name": EVIL},
        parity=run["parity"] | {"status": "fail", "failures": [EVIL]},
        plausibility=[EVIL],
    )
    write(folder, run, "plain", config_name=EVIL, plausibility=[EVIL])
    profile = folder / "profiles" / EVIL.replace("/", "∕") / "tool"
    profile.mkdir(parents=True)
    source = next(REFERENCE.glob("*/profiles/v1/*/kernels.json"))
    table = json.loads(source.read_text(encoding="utf-8"))
    for kernel in table["kernels"][:2]:  # with counters they are points of a roofline
        name = f'"><script>alert(1)</script>{kernel["name"]}'
        kernel |= {"name": name, "bytes": 1e9, "flops": 1e9}
    table |= {"tool": EVIL, "device": "NVIDIA H200", "warnings": [EVIL]}
    (profile / "kernels.json").write_text(json.dumps(table), encoding="utf-8")


def test_names_from_files_are_text(tmp_path: Path) -> None:
    write_evil(tmp_path)
    html, markdown = make(tmp_path, at=tmp_path)
    page = read(html)
    assert not {"script", "iframe", "object", "embed"} & set(page.tags)
    assert not [name for name in page.attributes if name.startswith("on")]
    assert all(link[0] in "#." or "://" not in link for link in page.links)
    assert not [link for link in page.links if link.lower().startswith("javascript")]
    assert html.count("&lt;script&gt;alert(1)") >= 10 and "img" in page.tags
    assert "\x1b" not in html + markdown
    tokens = list(parts_of(markdown))
    raw = {token.content for token in tokens if token.type.startswith("html")}
    assert all(re.fullmatch(r'<a id="[-a-z0-9]+">|</a>', text.strip()) for text in raw), raw
    targets = [str(token.attrs["href"]) for token in tokens if token.type == "link_open"]
    assert targets and all(target.startswith(("runs/", "profiles/", "#")) for target in targets)
    assert "image" not in {token.type for token in tokens}
    told = [token.content for token in tokens if token.type == "text"]
    assert sum("<script>alert(1)</script>" in text for text in told) >= 10


def test_a_device_may_have_any_name(tmp_path: Path) -> None:
    name = {"name": "\ud800 $\\frac$"}  # can't be encoded, and is no formula
    for version, changes in (("v1", {}), ("v2", {"fuse_optimizer": False})):  # of a waterfall
        run = reference(version, precision="fp32")
        options = run["options"] | changes
        rung = {"options": options, "session": "1", "kind": "waterfall rung"}
        write(tmp_path, run, device=run["device"] | name, **rung)
        run = reference(version)
        write(tmp_path, run, device=run["device"] | name)
    html, markdown = make(tmp_path, at=tmp_path)
    assert {"waterfall-1", "size-1"} <= set(read(html).ids)
    for text in (html, markdown):
        assert b"frac" in text.encode()  # as a file is written


def parts_of(markdown: str) -> Iterator[Any]:
    """Tokens of a document, those inside of lines among them."""
    from markdown_it import MarkdownIt

    for token in MarkdownIt("commonmark").enable("table").parse(markdown):
        yield from token.children or [token]


def test_an_error_that_is_no_number_is_the_worst(tmp_path: Path) -> None:
    run = reference("v2")
    measures = {"logits": {"error": None, "allowed": 1.0}, "loss": {"error": 0.1, "allowed": 1.0}}
    red = run["parity"] | {"status": "fail", "failures": ["x"], "measures": measures}
    write(tmp_path, run, parity=red, step_ms=[], status="gate failed")
    assert "not finite" in make(tmp_path, at=tmp_path)[1]


def test_a_profile_of_an_unnamed_tool_is_shown(tmp_path: Path) -> None:
    source = REFERENCE / "cpu_amd_epyc" / "profiles" / "v1" / "pytorch_profiler" / "kernels.json"
    folder = tmp_path / "profiles" / "somewhere" / "else"
    folder.mkdir(parents=True)
    table = json.loads(source.read_text()) | {"tool": "", "kernel_table": ""}
    (folder / "kernels.json").write_text(json.dumps(table))
    assert "an unnamed tool" in make(tmp_path, at=tmp_path)[1]


def test_a_red_gate_and_implausible_figures_come_first(tmp_path: Path) -> None:
    run = reference("v2")
    red = run["parity"] | {"status": "fail", "failures": ["gradient of norm.weight is missing"]}
    write(tmp_path, reference("v1"), "a", plausibility=["faster than light"])
    write(tmp_path, run, "a", parity=red, step_ms=[], status="gate failed")
    html, markdown = make(tmp_path, at=tmp_path)
    for text in (html, markdown):
        begin = text[text.index("2 to look into") :]
        told = (
            "GATE RED",
            "gradient of norm.weight is missing",
            "IMPLAUSIBLE",
            "faster than light",
        )
        assert all(begin.index(word) < begin.index("at a glance") for word in told)
    glance = read(html).tables["", "Step time of V1, and each version's speed-up over it"]
    assert glance[1][2] == "gate red"
    assert 'class="verdict good"' not in html


@pytest.mark.parametrize("broken", [
    {"losses": [1e308, -1e308] * 40},
    {"losses": [None] * 40},
    {"forward_ms": [1e308], "backward_ms": [-1e308], "optimizer_ms": [0.0]},
    {"memory_mb": {"peak": 1e15, "weights": 1e308, "gradients": -1e308}},
    {"device": {}, "data": {}, "command": [], "created": "", "software": {}, "options": {}},
    {"config_name": "$x_{1}$ 中文 😀 _a", "step_ms": [1e-9] * 3},
])  # fmt: skip
def test_odd_figures_do_no_harm(
    tmp_path: Path, broken: dict[str, Any], recwarn: pytest.WarningsRecorder
) -> None:
    write(tmp_path, reference("v1"))
    write(tmp_path, reference("v2"))
    write(tmp_path, reference("v3"), **broken)
    write(tmp_path, reference("v1"), "odd", **broken)
    tables = read(make(tmp_path, at=tmp_path)[0]).tables
    assert any(row[0] == "v2" for (_, name), rows in tables.items() if name == "How fast"
               for row in rows)  # fmt: skip
    assert [str(warning.message) for warning in recwarn] == []


def test_broken_files_are_named_and_do_no_harm(tmp_path: Path) -> None:
    write(tmp_path, reference("v1"))
    cut = write(tmp_path, reference("v2"), "cut")
    cut.write_text(cut.read_text()[:300])
    write(tmp_path, reference("v2"), "typed", step_ms="fast")
    kernels = tmp_path / "profiles" / "v1" / "ncu" / "kernels.json"
    kernels.parent.mkdir(parents=True)
    kernels.write_text('{"schema_version": 1, "kernel_table": 3}')
    benchmark = json.loads((H200 / "kernels" / "kernels.json").read_text())
    benchmark["rows"][0]["samples"] = "none"
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "kernels.json").write_text(json.dumps(benchmark))
    (tmp_path / "harness").mkdir()
    (tmp_path / "harness" / "harness_v1.json").write_text('{"version": "v1"}')
    html, markdown = make(tmp_path, at=tmp_path)
    page = read(html)
    assert len(page.tables["size-1", "How fast"]) == 2
    named = html[html.index('id="broken"') :], markdown[markdown.index("Broken files") :]
    for text in named:
        assert "v2_cut.json" in text.replace("\\", "") and "is the file truncated?" in text
        assert "step_ms should be" in text.replace("\\", "") and "samples" in text
        assert text.count("kernels.json") >= 2 and "harness" in text
    assert "5 broken files" in html


def test_a_broken_ceiling_of_another_machine_takes_no_roofline_away(tmp_path: Path) -> None:
    write(tmp_path, reference("v1"))
    (tmp_path / "ceilings").mkdir()
    (tmp_path / "ceilings" / "other.json").write_text('{"schema_version": 1,')
    html, markdown = make(tmp_path, at=tmp_path)
    assert "Roofline" in html and "other.json" in html and "other.json" in markdown
    assert read(html).tags.count("img") == 1


def test_what_is_missing_is_left_out(tmp_path: Path) -> None:
    run = reference("v1") | {"forward_ms": [], "backward_ms": [], "optimizer_ms": []}
    write(tmp_path, run, memory_mb={}, status="interrupted", losses=run["losses"])
    page = read(make(tmp_path, at=tmp_path)[0])
    assert page.tags.count("svg") == 1  # the losses alone
    profiles = REFERENCE / "cpu_amd_epyc"
    html, markdown = make(profiles, at=tmp_path)
    assert "No timed runs here" in html and "No timed runs here" in markdown
    assert len([caption for _, caption in read(html).tables if "longest" in caption]) >= 3


# --- the command line ----------------------------------------------------------------------------


def test_the_report_is_two_files_of_all_folders(
    tmp_path: Path, type_command: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    own = reference("v1", "medium")
    write(tmp_path / "own", own, device=own["device"] | {"name": "My GPU"}, session="2027-01")
    folder = tmp_path / "out" / "deeper"
    answer = type_command("python", TOOL, "--results", REFERENCE, "--results", tmp_path / "own",
                          "--output-dir", folder, "--title", "Ours <b>", "--top", "3")  # fmt: skip
    assert answer.returncode == 0 and answer.stderr == ""
    assert sorted(path.name for path in folder.iterdir()) == ["report.html", "report.md"]
    html = (folder / "report.html").read_text(encoding="utf-8")
    headings = re.findall(r"<h[12]>([^<]*)</h[12]>", html)
    assert headings[0] == "Ours &lt;b&gt;"
    assert headings.index("My GPU") < headings.index("NVIDIA H200")  # who ran last is told first
    first = (folder / "report.md").read_text(encoding="utf-8").splitlines()[0]
    assert first == "# Ours \\<b\\>"


def test_a_participants_page_has_their_runs_alone(
    tmp_path: Path, type_command: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    results = tmp_path / "results"
    (results / "reference").mkdir(parents=True)
    write(results / "reference", reference("v1"), device={"type": "cuda", "name": "Theirs"})
    command = ("python", TOOL, "--results", results, "--output-dir", tmp_path, "--template")
    answer = type_command(*command)
    assert answer.returncode == 2 and "no runs of yours" in answer.stderr
    own = reference("v1")
    write(results, own, "own", device=own["device"] | {"name": "My GPU"})
    for length in (333, 444):  # a sweep, whose sizes nobody asks a participant for
        size = {"seq_len": length, "config_name": "custom", "kind": "sweep point"}
        write(results, own, f"{length}", session="1", **size)
    assert type_command(*command).returncode == 0
    page = tmp_path / "my_results.md"
    text = page.read_text(encoding="utf-8")
    assert "| name | |" in text and "| machine | My GPU |" in text and "Theirs" not in text
    assert "333" not in text and "444" not in text
    assert f"{median(own['step_ms']):,.2f} ±" in text and own["software"]["torch"] in text
    page.write_text("my notes")
    answer = type_command(*command)
    assert answer.returncode == 2 and "your notes may be in it" in answer.stderr
    assert page.read_text() == "my notes"


@pytest.mark.parametrize("words, told", [
    (("--results", "nowhere"), "results nowhere: no such folder"),
    (("--results", "docs"), "no result in it"),
    (("--top", "0"), "--top 0: it must lie between 1 and 50"),
    (("--output-dir", "README.md/x"), "can't be written"),
])  # fmt: skip
def test_wrong_input_gets_one_line(
    words: tuple[str, ...],
    told: str,
    type_command: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    answer = type_command("python", TOOL, *words)
    assert answer.returncode == 2 and answer.stdout == ""
    assert answer.stderr.count("\n") == 1 and told in answer.stderr


def test_help_waits_for_nothing(type_command: Callable[..., Any]) -> None:
    answer = type_command("python", "-X", "importtime", TOOL, "--help")
    assert answer.returncode == 0 and "--template" in answer.stdout
    assert not re.search(r"\| +(torch|matplotlib|jinja2|numpy|rich)\n", answer.stderr)


def test_ctrl_c_leaves_nothing_half_written(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, TOOL, "--results", REFERENCE, "--output-dir", folder],
        cwd=ROOT, env=os.environ | {"PYTHONUNBUFFERED": "1"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    while process.poll() is None and not folder.exists():  # from then on it draws
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=HANGS_S)
    assert process.returncode == 130 and told == "interrupted: what is written is whole\n"
    assert list(folder.iterdir()) == []


# --- in a browser --------------------------------------------------------------------------------


def test_a_browser_shows_it(from_reference: tuple[str, str, Path], tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(from_reference[0], encoding="utf-8")
    with open_browser(tmp_path / "profile") as browser:
        for theme, width in (("light", 1400), ("dark", 380)):
            wear(browser, theme)
            resize(browser, width, 900)
            browser.get(page.as_uri())
            wider = "return document.documentElement.scrollWidth - innerWidth"
            assert browser.execute_script(wider) <= 0
            drawn = "return [...document.images].every(i => i.naturalWidth >= 1600)"
            assert browser.execute_script(drawn)
            assert complaints(browser) == []
            ink = browser.execute_script(
                "return getComputedStyle(document.querySelector('svg text')).fill"
            )
            assert (int(re.findall(r"\d+", ink)[0]) > 128) == (theme == "dark")
        own = ("chrome:", "chrome-untrusted:")
        asked = {url for url in requested(browser) if not url.startswith(own)}
        assert asked == {page.as_uri()}  # beside what the browser's own first page asks for

"""report_generator.py: its numbers are the result files', and no file can break or fool it."""

import dataclasses
import json
import re
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from stored_runs import PARTS, REFERENCE, lab_run, reference, select, write, write_lab

from analysis_tools import report_generator
from workshop import records, versions
from workshop.collection import Collection
from workshop.exercises.progress import Progress
from workshop.report import content, pages
from workshop.results import Parity, RunResult

H200 = REFERENCE / "nvidia_h200"
TOOL = "analysis_tools/report_generator.py"
SIZES = [("small", "bf16"), ("small", "fp16"), ("small", "fp32"), ("small", "tf32"),
         ("medium", "bf16"), ("large", "bf16")]  # fmt: skip
"""In the report's order."""
EVIL = (
    "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>\x1b[31m`| [x](javascript:alert(3))"
)
VOID = {"meta", "link", "img", "br", "input", "hr"}


@dataclass
class Page(HTMLParser):
    """The content of a page: tables by section and caption, links, elements."""

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


def read(html: str) -> Page:
    page = Page()
    page.feed(html)
    page.close()
    assert page._open == []
    return page


def make(*folders: Path, at: Path) -> tuple[str, str]:
    """The page and the Markdown of some results, written for a folder."""
    collection = Collection(folders)
    collection.refresh()
    report = content.build(collection, title="Results")
    return pages.html_page(report, at), pages.markdown_page(report, at)


Written = tuple[str, str, Path]
"""A page, its Markdown, and their folder."""


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    return select(tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="module")
def written(results, tmp_path_factory) -> Written:
    folder = tmp_path_factory.mktemp("a folder, with # and %")
    return *make(results, at=folder), folder


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


def test_a_ladders_numbers_are_its_result_files(written) -> None:
    page = read(written[0])
    fast = page.tables["size-1", "How fast"]
    assert fast[-1][0] == "hf-liger" and "no significant difference" in fast[-1][7]
    for index, size in enumerate(SIZES, 1):
        check_ladder(page, f"size-{index}", size)


def check_ladder(page: Page, section: str, size: tuple[str, str]) -> None:
    fast = page.tables[section, "How fast"][1:]
    proof = page.tables[section, "Verdict and cost"][1:]
    table = page.tables.get((section, "Saved of V1's step, in ms"), [])
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
        peak = max(run["memory_mb"]["peak"] for run in runs)
        assert checked[4] == f"{peak:,.0f}"
        worst = max(m["error"] / m["allowed"] for m in first["gate"]["measures"].values())
        assert checked[8] == f"{worst:.0%}"
        assert (shown[0] in saved) == (shown[0] != "v1" and not same and not once)
        if shown[0] in saved:
            less = [middle(baseline, name) - middle(runs, name) for name in (*names[1:], names[0])]
            assert [number(text) for text in saved[shown[0]]] == pytest.approx(less, abs=0.0051)


def test_hot_lists_are_the_kernel_tables(results, written) -> None:
    tables = read(written[0]).tables
    found = [rows for (_, caption), rows in tables.items() if caption.startswith("The longest")]
    heads = []
    for path in results.glob("*/profiles/*/*/kernels.json"):
        table = json.loads(path.read_text(encoding="utf-8"))
        kernel, steps = table["kernels"][0], table["steps"] or 1
        times = f"{kernel['calls'] / steps:,.0f}", f"{kernel['total_ns'] / steps / 1e6:,.3f}"
        heads.append([kernel["category"], *times, f"{kernel['share']:.1%}"])
    assert sorted(rows[1][1:] for rows in found) == sorted(heads) and len(heads) == 5


def test_each_kind_of_result_is_in_both_forms(written) -> None:
    html, markdown, _ = written
    page = read(html)
    sessions = page.tables["device-1", "What was run"][1:]
    runs = [run for size in SIZES for key in versions.ALL for run in runs_of(*size, key)]
    assert sum(int(row[-1]) for row in sessions) == len(runs)
    run = runs_of("medium", "bf16", "v3")[0]
    for text in (html, markdown):
        assert f"torch {run['software']['torch']}" in text and run["git_commit"] in text
    commands = page.tables["device-1", "Command lines"][1:]
    assert len(commands) == 2 * 7 + 6 + 3 * 4
    assert all(re.search(r"tiny_llama_v|hugging_face_", row[1]) for row in commands)
    for part in (
        "waterfall-1",
        "sweep-1",
        "lab-1",
        "benchmark-1",
        "harness-2",
        "device-2-profile-1",
    ):
        assert part in page.ids and f'<a id="{part}">' in markdown
    # All speed-ups; phases, memory and losses of each size; categories of each tool and device.
    assert page.tags.count("svg") == 1 + 3 * len(SIZES) + 4
    assert page.tags.count("img") == len(SIZES) + 2 + 3  # rooflines; two waterfalls, a sweep


def test_every_link_leads_somewhere_and_nothing_is_loaded(results, written) -> None:
    html, markdown, folder = written
    page = read(html)
    assert len(page.ids) == len(set(page.ids))
    assert {link[1:] for link in page.links if link[0] == "#"} <= set(page.ids)
    files = (folder / urllib.parse.unquote(link) for link in page.links if link[0] != "#")
    linked = {file.resolve(strict=True) for file in files}
    assert linked >= set(results.glob("*/runs/*.jsonl"))
    assert linked >= set(results.glob("*/profiles/*/*/kernels.json"))
    assert all(address.startswith("data:") for address in page.loads)
    assert "script" not in page.tags and "http://" not in re.sub(r'xmlns\S*="[^"]*"', "", html)
    referred = {*re.findall(r"url\(#([^)]+)\)", html), *re.findall(r'href="#(m[^"]+)"', html)}
    assert len(referred) > 20 and referred <= set(page.ids) | {"main"}
    names = set(re.findall(r"\]\[(f\d+)\]", markdown))
    defined = dict(re.findall(r"^\[(f\d+)\]: (\S+)$", markdown, re.MULTILINE))
    assert names == set(defined)
    assert all((folder / urllib.parse.unquote(target)).is_file() for target in defined.values())
    anchors = re.findall(r'<a id="([^"]+)"', markdown)
    assert set(re.findall(r"\]\(#([^)]+)\)", markdown)) <= set(anchors)


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
    texts = [token.content for token in tokens if token.type == "text"]
    assert sum("<script>alert(1)</script>" in text for text in texts) >= 10


def test_a_red_gate_and_implausible_numbers_come_first(tmp_path) -> None:
    run = reference("v2")
    red = run["gate"] | {"status": "fail", "failures": ["gradient of norm.weight is missing"]}
    write(tmp_path, reference("v1"), "a", plausibility=["faster than light"])
    write(tmp_path, run, "a", gate=red, step_ms=[], status="gate failed")
    html, markdown = make(tmp_path, at=tmp_path)
    for text in (html, markdown):
        begin = text[text.index("2 to look into") :]
        words = ("FAIL", "norm.weight is missing", "IMPLAUSIBLE", "faster than light")
        assert all(begin.index(word) < begin.index("at a glance") for word in words)
    tables = read(html).tables.items()
    (glance,) = (table for (_, caption), table in tables if "and speed-up over V1" in str(caption))
    assert glance[1][2] == "FAIL"
    assert 'class="verdict good"' not in html


@pytest.mark.parametrize("broken", [
    {"losses": [1e308, -1e308] * 40,
     "memory_mb": {"peak": 1e15, "weights": 1e308, "gradients": -1e308}},
    {"losses": [None] * 40,
     "forward_ms": [1e308], "backward_ms": [-1e308], "optimizer_ms": [0.0]},
    {"device": {}, "data": {}, "command": [], "created": "", "software": {}, "options": {}},
    {"config_name": "$x_{1}$ 中文 😀 _a", "step_ms": [1e-9] * 3},
    {"device": {"type": "cuda", "name": "\ud800 $\\frac$"}},  # can't be encoded, and is no formula
])  # fmt: skip
def test_odd_values_do_no_harm(tmp_path, broken, recwarn) -> None:
    write(tmp_path, reference("v1"))
    write(tmp_path, reference("v2"))
    write(tmp_path, reference("v3"), **broken)
    write(tmp_path, reference("v1"), "odd", **broken)
    html, markdown = make(tmp_path, at=tmp_path)
    assert html.encode() and markdown.encode()  # as they are written to files
    tables = read(html).tables
    assert any(row[0] == "v2" for (_, name), rows in tables.items() if name == "How fast"
               for row in rows)  # fmt: skip
    assert [str(warning.message) for warning in recwarn] == []


def parts_of(markdown: str) -> Iterator[Any]:
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
    broken = benchmark.read_text().replace('"phase_ms": {', '"phase": {', 1)
    for name, text in (
        ("profiles/v1/ncu/kernels.json", '{"schema_version": 1, "kernel_table": 3}'),
        ("kernels/runs/a.jsonl", broken),
        ("harness/harness_v1.json", '{"version": "v1"}'),
        (
            "ceilings/other.json",
            '{"schema_version": 1,',
        ),  # of another machine: it takes no roofline
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    html, markdown = make(tmp_path, at=tmp_path)
    page = read(html)
    assert len(page.tables["size-1", "How fast"]) == 2
    named = html[html.index('id="broken"') :], markdown[markdown.index("Broken files") :]
    for text in named:
        assert "v2_cut.jsonl" in text.replace("\\", "") and "truncated" in text
        assert "step_ms: expected" in text.replace("\\", "") and "phase is unknown" in text
        assert "kernels.json" in text and "a.jsonl" in text and "harness" in text
    assert "5 broken files" in html and "other.json" in html and "other.json" in markdown
    assert page.tags.count("img") == 1


def test_the_report_is_two_files_of_all_folders(tmp_path, capsys) -> None:
    write(tmp_path / "theirs", reference("v1"))
    own = reference("v1", "medium")
    write(tmp_path / "own", own, device=own["device"] | {"name": "My GPU"}, session="2027-01")
    folder = tmp_path / "out" / "deeper"
    words = ["--results", tmp_path / "theirs", "--results", tmp_path / "own",
             "--output-dir", folder, "--title", "Ours <b>", "--top", "3"]  # fmt: skip
    assert report_generator.main(list(map(str, words))) == 0
    assert capsys.readouterr().err == ""
    assert sorted(path.name for path in folder.iterdir()) == ["report.html", "report.md"]
    html = (folder / "report.html").read_text(encoding="utf-8")
    headings = re.findall(r"<h[12]>([^<]*)</h[12]>", html)
    assert headings[0] == "Ours &lt;b&gt;"
    assert headings.index("My GPU") < headings.index("NVIDIA H200")  # the newest run's is first
    first = (folder / "report.md").read_text(encoding="utf-8").splitlines()[0]
    assert first == "# Ours \\<b\\>"
    (tmp_path / "empty").mkdir()
    assert report_generator.main(["--results", str(tmp_path / "empty")]) == 2
    assert "no result in it" in capsys.readouterr().err


def test_a_participants_page_has_their_runs_alone(tmp_path, capsys) -> None:
    results = tmp_path / "results"
    (results / "reference").mkdir(parents=True)
    write(results / "reference", reference("v1"), device={"type": "cuda", "name": "Theirs"})
    command = ["--results", str(results), "--output-dir", str(tmp_path), "--sheet"]
    assert report_generator.main(command) == 2
    assert "no runs of yours" in capsys.readouterr().err
    own = reference("v1")
    write(results, own, "own", device=own["device"] | {"name": "My GPU"})
    for length in (333, 444):  # a sweep, which is no part of the page
        write(results, own, f"{length}", seq_len=length, session="1", kind="sweep point")
    Progress(results).checked("triton_basics", 3, 3)
    Progress(results).checked("text_1_floor", 1, 4)
    write_lab(results, lab_run("mine"))
    assert report_generator.main(command) == 0
    page = tmp_path / "my_results.md"
    text, html = page.read_text(encoding="utf-8"), page.with_suffix(".html").read_text("utf-8")
    assert "| name | |" in text and "| machine | My GPU; " in text
    for found in (text, html):
        assert "Theirs" not in found and "333" not in found and "444" not in found
        assert f"{median(own['step_ms']):,.2f} ±" in found and own["software"]["torch"] in found
        assert "passed 20" in found and "1 of 4" in found
        assert "mine" in found
    page.write_text("my notes")
    assert report_generator.main(command) == 2
    assert "your notes may be in it" in capsys.readouterr().err
    assert page.read_text() == "my notes"


def test_help_imports_nothing_large(type_command) -> None:
    answer = type_command("python", "-X", "importtime", TOOL, "--help")
    assert answer.returncode == 0 and "--sheet" in answer.stdout
    assert not re.search(r"\| +(torch|matplotlib|jinja2|numpy|rich)\n", answer.stderr)

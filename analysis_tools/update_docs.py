"""Writes the documentation's tables and pictures: what was measured from the result files in
results/reference/, and the exercises from their sheets.

PERFORMANCE_RESULTS.md is written whole; of the other documents the parts between markers are. No
figure there is typed by hand. Pictures of pages take Chromium; without it they are left, and named.
`--check` changes nothing and exits 1 if something is stale; it needs no browser.
"""

import argparse
import itertools
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

if __name__ == "__main__":  # PyTorch is not everywhere, and takes seconds to import
    from workshop.needed import import_torch

    import_torch()

from labs.cifar10_roofline import documents as training_documents  # noqa: E402
from labs.data_pipeline import documents as pipeline_documents  # noqa: E402
from labs.inference_benchmark import documents as lab_documents  # noqa: E402
from labs.scale_out import documents as scaling_documents  # noqa: E402
from labs.text_generation import documents as text_documents  # noqa: E402
from workshop import (  # noqa: E402
    errors,
    records,
    results,
    tables,
)
from workshop.arguments import parse  # noqa: E402
from workshop.classroom import courses, instructor  # noqa: E402
from workshop.collection import Collection  # noqa: E402
from workshop.compare import sweep, waterfall  # noqa: E402
from workshop.compare.rows import (  # noqa: E402
    Row,
    build_row,
    build_rows,
    ordinary,
    size_name,
    size_of,
    variant,
)
from workshop.compare.waterfall import Waterfall  # noqa: E402
from workshop.errors import NotOnThisMachine, WorkshopError  # noqa: E402
from workshop.exercises import sheet  # noqa: E402
from workshop.kernels import rows as kernel_rows  # noqa: E402
from workshop.profilers import advisor, show  # noqa: E402
from workshop.profilers.load import load, recorded_run  # noqa: E402
from workshop.results import RunResult  # noqa: E402
from workshop.run import chips, float8_cost, presets  # noqa: E402
from workshop.run import precision as precisions  # noqa: E402
from workshop.show import comparisons, doc_images, ladders, page, sections  # noqa: E402
from workshop.tables import fill_last_column  # noqa: E402
from workshop.tables import markdown_rows as markdown_table  # noqa: E402
from workshop.versions import ALL, BASELINE, PEERS, VERSIONS  # noqa: E402

REFERENCE = ROOT / "results" / "reference"
WORTH = ROOT / "docs" / "what_each_idea_is_worth.md"
FP8 = ROOT / "docs" / "fp8.md"
FP8_CHIPS = ("H200 SXM", "B200", "MI300X")
LADDER_CONFIGS = ("small", "medium")
LADDER_PRECISION = "bf16"
LADDER, PROFILES, EXERCISES, IDEAS, TEXT = "ladder", "profiles", "exercises", "ideas", "text"
PREDICTIONS, FLOAT8 = "predictions", "float8"
WATERFALLS, SWEEPS, STARTUP = "waterfalls", "sweeps", "startup"
"""Parts of documents between two markers that name them."""
SHOWN_PROFILES = "*/profiles/{version}/pytorch_profiler"
"""The profiles that the versions' READMEs show."""
HOT_KERNELS = 6
INTRODUCTION = """Written by `make docs` from the result files under
[results/reference/](results/reference/), which hold every step's time, the losses, the gate's
verdict and the command of each run. All tables and pictures (phases, memory, sweeps, profiles,
kernels, labs, command lines) as one page, without a GPU:

```bash
python analysis_tools/report_generator.py --results results/reference
```

Not measured by us: AMD hardware.
"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="exit 1 if a file is not up to date")
    arguments = parse(parser, argv)
    return errors.exit_status(
        lambda: _update(check=arguments.check), interrupted="interrupted: what is written is whole"
    )


def _update(*, check: bool) -> int:
    collection = Collection([REFERENCE])
    collection.refresh()
    documents = render(collection)
    stale = [path for path, text in documents.items() if _read(path) != text]
    images = doc_images.find(collection)
    images = [image for image in images if image.stale]
    if check:
        for path in (*stale, *(image.path for image in images)):
            print(f"{path.relative_to(ROOT)} is not what its result files say: run make docs")
        return errors.ANSWER_IS_NO if stale or images else errors.DONE
    for path in stale:
        results.write_text(path, documents[path])
        print(f"Written: {path.relative_to(ROOT)}")
    for image in images:
        name = image.path.relative_to(ROOT)
        try:
            doc_images.make(image)
            print(f"Written: {name}")
        except NotOnThisMachine as error:
            print(f"{name} is left as it was: {error}")
    return errors.DONE


def render(collection: Collection) -> dict[Path, str]:
    """The documents as the result files would have them."""
    sheets, problems = sheet.read_all()
    if problems:
        raise WorkshopError(problems[0])
    documents = _performance(collection)
    folders = sorted(path for path in REFERENCE.iterdir() if (path / "runs").is_dir())
    devices = [records.load_folder(folder, RunResult) for folder in folders]
    runs = [run for its in devices for run in its]
    falls = waterfall.build(runs)
    ladders = [build_rows(ordinary(its)) for its in devices]
    shown = [_ladder(*pair) for pair in zip(ladders, devices, strict=True) if pair[0]]
    parts = {
        ROOT / "README.md": {
            LADDER: "\n\n".join(shown),
            TEXT: text_documents.sample(REFERENCE),
        },
        WORTH: _worth(runs, ladders),
        FP8: {PREDICTIONS: _fp8_predictions(), FLOAT8: _fp8_times(devices)},
        ROOT / "exercises" / "README.md": {EXERCISES: sheet.index(sheets, ROOT / "exercises")},
        instructor.GUIDE: instructor.parts(collection) | {"courses": courses.tables(sheets)},
    }
    for key, version in VERSIONS.items():
        folder = version.path.parent
        its = [one for one in sheets if folder in one.folder.parents]
        profiles = sorted(REFERENCE.glob(SHOWN_PROFILES.format(version=key)))
        parts[folder / "README.md"] = {
            PROFILES: "\n\n".join(map(_profile, profiles)),
            EXERCISES: sheet.index_of_version(its, folder),
        }
        if version.key != BASELINE:
            parts[folder / "README.md"][IDEAS] = _ideas(folder / "README.md", key, falls)
    _, techniques, _ = _split(
        _read(lab_documents.CHECKLIST), lab_documents.TECHNIQUES, lab_documents.CHECKLIST
    )
    lab_runs = [one.run for one in collection.lab_runs]
    parts |= lab_documents.parts(lab_runs, techniques)
    parts |= training_documents.parts(lab_runs) | pipeline_documents.parts(lab_runs)
    parts |= text_documents.parts(lab_runs)
    parts |= scaling_documents.parts(lab_runs)
    return documents | {path: with_parts(path, its) for path, its in parts.items()}


def with_parts(document: Path, parts: Mapping[str, str]) -> str:
    """A document's text, with what is given for each part between its markers.

    Raises:
        WorkshopError: a pair of markers is not there once.
    """
    text = _read(document)
    for part, filling in parts.items():
        head, _, tail = _split(text, part, document)
        text = f"{head}\n{filling}\n{tail}"
    return text


def _split(text: str, part: str, document: Path) -> tuple[str, str, str]:
    """The text before, between and after a part's markers."""
    begin, end = f"<!-- {part}: begin, written by make docs -->", f"<!-- {part}: end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        name = document.relative_to(ROOT)
        raise WorkshopError(f"{name}: expected one line {begin!r} and one {end!r}")
    head, rest = text.split(begin)
    filling, tail = rest.split(end)
    return head + begin, filling, end + tail


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


# --- the ladder ----------------------------------------------------------------------------------


def _ladder(rows: list[Row], runs: list[RunResult]) -> str:
    """One device's ladder: a line a version or peer, step time and speed-up at two sizes; V3 and
    V4 beside the fastest peer at all sizes."""
    chosen = {
        (row.version, row.config): row
        for row in rows
        if row.precision == LADDER_PRECISION and not row.variant
    }
    # Only rows that were compared with each other.
    of_first = {config: row.session for (key, config), row in chosen.items() if key == BASELINE}
    chosen = {
        (key, config): row
        for (key, config), row in chosen.items()
        if row.session == of_first.get(config, row.session)
    }
    configs = [c for c in LADDER_CONFIGS if any(config == c for _, config in chosen)]
    header = ["version", "what"]
    for config in configs:
        header += [f"{config}: step", "speed-up", "peak memory"]
    lines = []
    for key, version in ALL.items():
        found = [chosen.get((key, config)) for config in configs]
        if any(found):
            name = key if key in PEERS else key.upper()
            cells = [cell for row in found for cell in _ladder_cells(row)]
            lines.append([f"[{name}]({version.folder}/)", version.title, *cells])
    beside = {
        config: _beside_peers([row for (_, c), row in chosen.items() if c == config], runs)
        for config in sorted({c for _, c in chosen}, key=presets.rank)
    }
    told = [config for config in beside if config in configs or beside[config]]
    sizes = [next(row for (_, c), row in chosen.items() if c == config) for config in told]
    commits = {run.session: run.git_commit[:7] for run in runs if run.git_commit}
    shapes = ", ".join(
        f"{row.config} is {row.batch_size} x {row.seq_len} tokens a step "
        f"(commit {commits.get(row.session, 'unknown')})"
        for row in sizes
    )
    caption = f"One {rows[0].device}, {LADDER_PRECISION}, real text; {shapes}."
    table = markdown_table(header, lines, (0, 1))
    texts = [" ".join(filter(None, beside.values())), *_spreads(runs, configs)]
    return "\n\n".join([caption, table, *filter(None, texts)])


def _beside_peers(rows: list[Row], runs: list[RunResult]) -> str:
    """V3 and V4 against the fastest peer of their session, at one size. Empty where no peer has a
    graph: one without it may wait for the host, and a ratio would say little about the code."""
    peers = [row for row in rows if row.version in PEERS and row.step_ms]
    if not any(PEERS[row.version].cuda_graph for row in peers):
        return ""
    best = min(peers, key=lambda row: row.step_ms or math.inf)

    def of(row: Row) -> list[RunResult]:
        key = (row.version, best.session, row.config, row.precision)
        same = [r for r in runs if (r.version, r.session, r.config_name, r.precision) == key]
        return [run for run in ordinary(same) if not variant(run)]

    ratios = [
        f"{row.version.upper()} {build_row(of(row), of(best)).speedup_text()}"
        for row in rows
        if row.version in ("v3", "v4") and row.session == best.session
    ]
    return f"Beside the fastest peer at {best.config}, {best.version}: {', '.join(ratios)}."


def _ladder_cells(row: Row | None) -> list[str]:
    if row is None or row.step_ms is None:
        return ["-", "-", "-"]
    memory = f"{row.peak_memory_mb:,.0f} MB"
    return [f"{row.step_ms:.2f} ms", row.speedup_text(), memory]


def _spreads(runs: list[RunResult], configs: list[str]) -> list[str]:
    """How far the sessions that measured the ladder lie apart, if there are several of a size."""
    sessions: dict[str, list[RunResult]] = {}
    for run in ordinary(runs):
        if run.precision == LADDER_PRECISION:
            sessions.setdefault(run.session, []).append(run)
    rows = [row for session in sessions.values() for row in build_rows(session)]
    spreads = [_spread([row for row in rows if row.config == config]) for config in configs]
    return [" ".join(filter(None, spreads))] if any(spreads) else []


def _spread(rows: list[Row]) -> str:
    """V1's step and the fastest version's, at one size, over all sessions."""
    timed = [
        (row.step_ms, row.speedup, row.version)
        for row in rows
        if row.step_ms and row.speedup and not row.variant
    ]
    first = [row.step_ms for row in rows if row.version == BASELINE and row.step_ms]
    if len(first) < 2 or not timed:
        return ""
    *_, fastest = min(timed)
    steps, ratios, _ = zip(*(one for one in timed if one[2] == fastest), strict=True)
    return (
        f"In {len(first)} comparisons at {rows[0].config}, {fastest.upper()}'s speed-up was "
        f"{_range(ratios, 'x')} ({BASELINE.upper()} {_range(first, ' ms')}, "
        f"{fastest.upper()} {_range(steps, ' ms')})."
    )


def _range(values: Sequence[float], unit: str) -> str:
    low, high = f"{min(values):.2f}{unit}", f"{max(values):.2f}{unit}"
    return low if low == high else f"{low} to {high}"


# --- what each idea is worth ---------------------------------------------------------------------


def _worth(runs: list[RunResult], ladders: list[list[Row]]) -> dict[str, str]:
    """The parts of WORTH; empty where nothing of their kind was measured."""
    falls = waterfall.build(runs)
    sweeps = [one for axis in sweep.AXES.values() for one in sweep.build(runs, axis)]
    return {
        WATERFALLS: _study("waterfall", map(comparisons.waterfall_table, falls)) if falls else "",
        SWEEPS: _study("sweep*", map(comparisons.sweep_table, sweeps)) if sweeps else "",
        STARTUP: _startup([row for rows in ladders for row in rows if row.startup_s]),
    }


def _study(pattern: str, found: Iterable[tables.Table]) -> str:
    """The pictures that compare_versions.py wrote beside the runs, and tables."""
    pictures = "\n\n".join(
        f"![{path.parent.name}, {path.stem}](../{path.relative_to(ROOT).as_posix()})"
        for path in sorted(REFERENCE.rglob(f"{pattern}.png"))
    )
    return f"{pictures}\n\n{tables.markdown(found)}"


def _startup(rows: list[Row]) -> str:
    """A line for each version and size that is compiled or captured; without rows, nothing."""
    if not rows:
        return ""
    header = ["version and size", "compile", "capture", "with filled caches", "break-even"]
    lines = []
    for row in rows:
        what = f"{row.label}, {row.config}, {row.precision}, {row.device}"
        cells = [f"{row.setup_s[name]:.1f} s" for name in ("compile", "capture")]
        if row.prepared_beside:
            cells[0] += f", beside {row.prepared_beside} other{'s' * (row.prepared_beside > 1)}"
        # A later process finds the caches filled.
        cells.append(f"{row.startup_least_s:.1f} s" if row.runs > 1 else "-")
        lines.append([what, *cells, row.break_even or "-"])
    return markdown_table(header, lines)


# --- the gain of each idea -----------------------------------------------------------------------


def _ideas(document: Path, version: str, falls: Sequence[Waterfall]) -> str:
    """The table of a version's README, its last column filled in: what each idea gained in the
    waterfalls, found by the flag in its line that switches it off. Empty without a table."""
    _, old, _ = _split(_read(document), IDEAS, document)
    filled = fill_last_column(old, lambda row: _gains(row, version, falls))
    places = dict.fromkeys(f"{one.precision}, {one.device}" for one in falls)
    where = "; ".join(places)
    note = f"Measured: times as fast as without it, {where}; ~1: no significant difference."
    return f"{filled}\n\n{note}" if filled else ""


def _gains(row: str, version: str, falls: Sequence[Waterfall]) -> str:
    flag = re.search(r"--no-(fuse[a-z-]+|cuda-graph)|--(compile) none", row)
    idea = (flag[1] or flag[2]).replace("-", "_") if flag else ""
    rungs = {rung for one in VERSIONS.values() for rung in one.rungs}
    titles = {title for code, what, title in rungs if (code, what) == (version, idea)}
    # A gain over an earlier rung, where the one before was not timed, is that of several ideas.
    found = {
        one.config: comparisons.ratio(step.gain, step.gain_ci, tables.SAME)
        for one in falls
        for last, step in itertools.pairwise(one.steps)
        if step.rung.version == version and step.rung.title in titles
        if step.before == last.rung.title
    }
    return "; ".join(f"{config} {gain}" for config, gain in found.items()) or "-"


# --- fp8 -----------------------------------------------------------------------------------------


def _fp8_predictions() -> str:
    """A line for each preset and recipe: of its up projection."""
    header = ["preset", "tokens", "precision"]
    header += [f"{chip}, {how}" for chip in FP8_CHIPS for how in ("V1, V2", "V3", "V4")]
    lines = []
    for name, sizes in presets.PRESETS.items():
        tokens, width = sizes.batch_size * sizes.seq_len, sizes.hidden_dim
        for precision, known in precisions.FLOAT8.items():
            ratios = [
                float8_cost.speed_up(how[known.float8_recipe], chip, tokens, width, 4 * width)
                for chip in filter(None, map(chips.find_peaks, FP8_CHIPS))
                for how in (float8_cost.EAGER, float8_cost.KERNELS, float8_cost.COMPILED)
            ]
            lines.append([name, f"{tokens:,}", precision, *(f"{ratio:.2f}x" for ratio in ratios)])
    return markdown_table(header, lines, (0, 2))


def _fp8_times(devices: Iterable[Sequence[RunResult]]) -> str:
    """A line for each version and size of which a session has timed fp8 and bf16."""
    sessions = defaultdict(list)
    for run in (run for its in devices for run in ordinary(its)):
        sessions[run.session, size_of(run)].append(run)
    lines = {}
    for _, its in sorted(sessions.items(), key=lambda item: item[0][0]):
        rows = [(row, row.step_ms) for row in build_rows(its) if row.step_ms and not row.variant]
        bf16 = {row.version: ms for row, ms in rows if row.precision == "bf16"}
        for row, ms in rows:
            before = bf16.get(row.version)
            if row.precision in precisions.FLOAT8 and before:
                what = row.device, size_name(its[0]), row.precision, row.version
                times = f"{before:.2f} ms", f"{ms:.2f} ms", f"{before / ms:.2f}x"
                lines[what] = [*what, *times, (its[0].git_commit or "-")[:7]]
    if not lines:
        return "Not measured yet."
    header = ["device", "config", "precision", "version", "step in bf16", "in fp8", "as fast"]
    by_size = sorted(lines, key=lambda what: (what[0], presets.rank(what[1]), *what[2:]))
    return markdown_table([*header, "commit"], [lines[what] for what in by_size], (0, 1, 2, 3, 7))


# --- the profiles --------------------------------------------------------------------------------


def _profile(folder: Path) -> str:
    """The head of a profile's hot list, a step each, and its summary."""
    table, run = load(folder), recorded_run(folder)
    if run is None or not table.steps:
        raise WorkshopError(f"{folder}: no run.jsonl beside the profile, or no steps in it")
    # Later commits may launch other kernels.
    source = f"{table.tool}, commit {run.git_commit[:7]}" if run.git_commit else table.tool
    lines = [
        f"`{run.config_name}`, {run.precision}, {run.device['name']} ({source}):",
        "",
        tables.markdown_body(sections.hot_list(table, HOT_KERNELS)),
        "",
        *(f"- {line}" for line in show.summary(table)),
    ]
    bound = advisor.headline(advisor.advise(table, run))
    if bound:
        lines.append(f"- `advise` says: {bound.sentence}")
    return "\n".join(lines)


# --- PERFORMANCE_RESULTS.md ----------------------------------------------------------------------


def _performance(collection: Collection) -> dict[Path, str]:
    """The summary of all reference results.

    Raises:
        WorkshopError: one of them is broken.
    """
    (reference,) = page.read(collection)
    for path, reason in reference.broken:
        raise WorkshopError(f"{path}: {reason}")
    pictures = (path.relative_to(ROOT).as_posix() for path in REFERENCE.glob("*/comparison.png"))
    parts = [
        f"# Performance results\n\n{INTRODUCTION}",
        *(f"![Throughput, time and memory]({path})" for path in sorted(pictures)),
        f"**{reference.verdicts()}**",
        "## How to read the tables",
        # The columns after the third are in the report alone.
        "\n".join(f"- **{what}** {text}" for what, text in page.HOW_TO_READ[:3]),
    ]
    if glance := ladders.at_a_glance(reference.groups):
        table = tables.markdown_body(glance)
        parts += ["## The ladder at a glance", f"{glance.title}:", table]
    parts += map(_best_kernels, sorted(REFERENCE.glob("*/kernels")))
    parts += map(_drawn_kernels, sorted(REFERENCE.glob("*/kernels_drawn")))
    return {ROOT / "PERFORMANCE_RESULTS.md": "\n\n".join(parts) + "\n"}


def _best_kernels(folder: Path) -> str:
    """V3's operators at the largest size of each against the fastest right implementation there."""
    rows = kernel_rows.load(folder)
    header = ["operator", "size", "V3's kernel", "fastest other", "its time", "V3 is"]
    lines = [
        [f"`{best.ours.op}`", best.ours.size, f"{best.ours.step_ms:.3f} ms",
         best.other.implementation, f"{best.other.step_ms:.3f} ms", f"{best.gain:.2f}x as fast"]
        for best in kernel_rows.against_fastest(rows)
    ]  # fmt: skip
    caption = (
        f"Forward and backward pass together, {rows[0].precision}, "
        f"{rows[0].first.device['name']}, at the largest size of each operator, replayed from "
        "graphs, on data that the cache does not hold. Only implementations whose results and "
        "gradients are right have a time."
    )
    parts = [
        "## V3's kernels against the fastest other",
        caption,
        markdown_table(header, lines, (0, 1, 3)),
    ]
    return "\n\n".join(parts)


def _drawn_kernels(folder: Path) -> str:
    """At how many sizes drawn at random V3's operator is the fastest, and where not."""
    rows = kernel_rows.load(folder)
    head, *others = (line.strip() for line in kernel_rows.behind(rows))
    run = rows[0].first
    where = f"{run.device['name']}, {rows[0].precision}"
    where += f", sizes drawn by seed {run.options['seed']}"
    sentence = f"At sizes that no tile was tuned for ({where}) {head}{':' if others else '.'}"
    return "\n".join([sentence, *([""] if others else []), *(f"- {other}" for other in others)])


if __name__ == "__main__":
    sys.exit(main())

"""The texts of documents that are made of results: a function for each pair of markers.

`analysis_tools/update_docs.py` writes those of results/reference/; the labs' are in their folders.
"""

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from workshop import determinism, records, tables
from workshop.collection import Collection
from workshop.compare import waterfall as falls
from workshop.compare.rows import Row, build_row, build_rows, ordinary, ratio, size_name, size_of
from workshop.compare.rows import variant as variant_of
from workshop.errors import WorkshopError
from workshop.gate import plausibility
from workshop.kernels import rows as kernel_rows
from workshop.labs import LabRun
from workshop.profilers import advisor, show
from workshop.profilers.load import load, recorded_run
from workshop.results import RunResult, read_json
from workshop.run import chips, float8_cost, flops, precision, presets
from workshop.show import ladders, page
from workshop.tables import SAME, fill_last_column, markdown_rows, number
from workshop.versions import ALL, BASELINE, PEERS, ROOT, VERSIONS

PUBLISHED = [
    ROOT / "tests" / "fixtures" / f"published_{name}.json" for name in ("mi300a", "tables")
]
PUBLISHED_TEXT = """\
## Published, not ours

No row here was measured by us, and none is compared with ours: other chips, other software,
another clock. The first three are AMD's, of its TinyTransformer folder (amd/HPCTrainingExamples,
V2's README of June 2026: MI300A, ROCm 7.2.0, PyTorch 2.9.1, 8 x 128 tokens). The program
synchronises three times a step and adds up the parts, over 30 steps; its backward pass reaches
every weight. Not known: losses, spread, partition mode, clocks. The line `small, fp32` above is
the same model and batch on an H200. The others are the tables of the workshop's main README
(MI325X; for `medium` no machine is named): those of V3 and V4 come from a backward pass that is
cut off, as `python -m workshop.gate.plausibility tests/fixtures/published_tables.json` says in
detail."""
STUDIES_TEXT = """\
## What each idea is worth

One change at a time (waterfalls), and one size that grows (sweeps);
[how to read them](docs/what_each_idea_is_worth.md). A picture leads to its table."""
STARTUP_TEXT = """\
## The first step

Seconds to compile and capture, and the number of steps after which they are paid back against V1.
"beside 6 others": six other processes compiled at the same time. "-": of a single process, or
without V1; "unknown": the speed-up is not significant or has no interval. `make report` has the
other precisions."""
LADDER_CONFIGS, LADDER_PRECISION = ("small", "medium"), "bf16"
FP8_CHIPS = ("H200 SXM", "B200", "MI300X")
HOT_KERNELS = 6
INTRODUCTION = """# Performance results

Written by `make docs` from the result files under
[results/reference/](results/reference/), which hold every step's time, the losses, the gate's
verdict and the command of each run. All tables and pictures (phases, memory, sweeps, profiles,
kernels, labs, command lines) as one page, without a GPU:

```bash
python analysis_tools/report_generator.py --results results/reference
```

Not measured by us: AMD hardware.
"""


class Recorded:
    """The reference results: those of each device, and all of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.collection = Collection([folder])
        self.collection.refresh()
        devices = sorted(path for path in folder.iterdir() if (path / "runs").is_dir())
        self.devices = [records.load_folder(device, RunResult) for device in devices]
        self.runs = [run for its in self.devices for run in its]
        self.rows = [build_rows(ordinary(its)) for its in self.devices]
        self.falls = falls.build(self.runs)

    @property
    def lab_runs(self) -> list[LabRun]:
        return [one.run for one in self.collection.lab_runs]


# --- docs/trust.md -------------------------------------------------------------------------------


def same_seed(recorded: Recorded) -> str:
    """The tables of `python -m workshop.determinism`, and what each says below it."""
    found = sorted(recorded.folder.glob(f"*/{determinism.FILE}"))
    shown = (determinism.shown(read_json(path)) for path in found)
    return tables.markdown(itertools.chain(*shown))


# --- README.md: the ladder -----------------------------------------------------------------------


def ladder(recorded: Recorded) -> str:
    pairs = zip(recorded.rows, recorded.devices, strict=True)
    return "\n\n".join(_ladder(rows, runs) for rows, runs in pairs if rows)


def _ladder(rows: list[Row], runs: list[RunResult]) -> str:
    """One device's ladder: a line a version or peer, a column a size; below, V3 and V4 beside the
    fastest peer."""
    by_config: dict[str, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        if row.precision == LADDER_PRECISION and not row.variant:
            by_config[row.config][row.version] = row
    sizes = {
        config: {key: row for key, row in its.items() if row.session == its[BASELINE].session}
        for config, its in sorted(by_config.items(), key=lambda item: presets.rank(item[0]))
        if BASELINE in its
    }
    firsts = [its[BASELINE] for its in sizes.values()]
    header = ["version", "what"]
    header += [f"{row.config}: {row.batch_size} x {row.seq_len} tokens a step" for row in firsts]
    lines = []
    for key, version in ALL.items():
        if any(key in its for its in sizes.values()):
            name = f"[{key if key in PEERS else key.upper()}]({version.folder}/)"
            cells = [_ladder_cell(its.get(key)) for its in sizes.values()]
            lines.append([name, version.title, *cells])
    for key in ("v3", "v4"):
        cells = [_beside_peers(key, its, runs) for its in sizes.values()]
        lines.append([key.upper(), "beside the fastest peer", *cells])
    sessions = {row.session for row in firsts}
    commits = sorted({(run.git_commit or "unknown")[:7] for run in runs if run.session in sessions})
    caption = (
        f"One {rows[0].device}, {LADDER_PRECISION}, real text, commit {', '.join(commits)}: the "
        "median step, its speed-up over V1 and peak memory."
    )
    blocks = [caption, markdown_rows(header, lines, (0, 1)), _spreads(runs)]
    return "\n\n".join(filter(None, blocks))


def _ladder_cell(row: Row | None) -> str:
    if row is None or row.step_ms is None:
        return "-"
    speedup = [] if row.version == BASELINE else [ratio(row.speedup, "not significant")]
    return ", ".join([f"{row.step_ms:.2f} ms", *speedup, f"{row.peak_memory_mb:,.0f} MB"])


def _beside_peers(version: str, rows: dict[str, Row], runs: list[RunResult]) -> str:
    """The version against the fastest peer of its session, at one size. A dash where no peer has a
    graph: one without it may wait for the host, and a ratio would say little about the code."""
    peers = [row for row in rows.values() if row.version in PEERS and row.step_ms]
    if version not in rows or not any(PEERS[row.version].cuda_graph for row in peers):
        return "-"
    best = min(peers, key=lambda row: row.step_ms or math.inf)

    def of(row: Row) -> list[RunResult]:
        key = (row.version, row.session, row.config, row.precision)
        same = [r for r in runs if (r.version, r.session, r.config_name, r.precision) == key]
        return [run for run in ordinary(same) if not variant_of(run)]

    beside = build_row(of(rows[version]), of(best)).speedup
    return f"{ratio(beside, 'not significant')}, {best.version}"


def _spreads(runs: list[RunResult]) -> str:
    """How far the sessions that measured LADDER_CONFIGS lie apart, if there are several."""
    sessions: dict[str, list[RunResult]] = defaultdict(list)
    for run in ordinary(runs):
        if run.precision == LADDER_PRECISION:
            sessions[run.session].append(run)
    rows = [row for session in sessions.values() for row in build_rows(session)]
    spreads = (_spread([row for row in rows if row.config == c]) for c in LADDER_CONFIGS)
    return " ".join(filter(None, spreads))


def _spread(rows: list[Row]) -> str:
    """V1's step and the fastest version's, at one size, over all sessions."""
    timed = [
        (row.step_ms, row.speedup.value, row.version)
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


# --- exercises/instructor_guide.md ----------------------------------------------------------------


def steps(collection: Collection) -> str:
    """A line for each version at LADDER_CONFIGS that passed the gate, with a file that has it."""
    header = ["version", "size", "step ms", "forward", "backward", "optimizer", "speed-up [95%]",
              "peak MB", "of it activations and rest", "of peak", "files"]  # fmt: skip
    lines = []
    for group in ladders.ladders(collection.runs):
        for row, stored in group.pairs():
            shown = row.version in VERSIONS and not row.variant and row.step_ms is not None
            if shown and row.config in LADDER_CONFIGS and row.precision == LADDER_PRECISION:
                times = (row.step_ms, row.forward_ms, row.backward_ms, row.optimizer_ms)
                rest, path = row.memory_mb.get("rest"), stored[0].path
                rest = rest if isinstance(rest, (int, float)) else None
                file = tables.href(path, ROOT / "exercises")
                lines.append([
                    row.label, f"{group.size}, {row.device}", *(number(ms, ",.2f") for ms in times),
                    row.speedup_text(), number(row.peak_memory_mb, ",.0f"), number(rest, ",.0f"),
                    number(row.peak_share, ".1%"), f"[{path.name}]({file})",
                ])  # fmt: skip
    return markdown_rows(header, lines, range(2))


# --- the versions' README.md ---------------------------------------------------------------------


def ideas(recorded: Recorded, version: str, old: str) -> str:
    """The table of a version's README, its last column filled in: what each idea gained in the
    waterfalls, found by the flag in its line that switches it off. Empty without a table."""
    filled = fill_last_column(old, lambda row: _gains(row, version, recorded.falls))
    places = dict.fromkeys(f"{one.precision}, {one.device}" for one in recorded.falls)
    where = "; ".join(places)
    note = f"Measured: times as fast as without it, {where}; {SAME}: no significant difference."
    return f"{filled}\n\n{note}" if filled else ""


def _gains(row: str, version: str, found: Sequence[falls.Waterfall]) -> str:
    flag = re.search(r"--no-(fuse[a-z-]+|cuda-graph)|--(compile) none", row)
    idea = (flag[1] or flag[2]).replace("-", "_") if flag else ""
    rungs = {rung for one in VERSIONS.values() for rung in one.rungs}
    titles = {title for code, what, title in rungs if (code, what) == (version, idea)}
    # A gain over an earlier rung, where the one before was not timed, is that of several ideas.
    gains = {
        one.config: ratio(step.gain, SAME)
        for one in found
        for last, step in itertools.pairwise(one.steps)
        if step.rung.version == version and step.rung.title in titles
        if step.before == last.rung.title
    }
    return "; ".join(f"{config} {gain}" for config, gain in gains.items()) or "-"


def profiles(recorded: Recorded, version: str) -> str:
    found = sorted(recorded.folder.glob(f"*/profiles/{version}/pytorch_profiler"))
    return "\n\n".join(map(_profile, found))


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
        tables.markdown_body(show.short_list(table, HOT_KERNELS)),
        "",
        *(f"- {line}" for line in show.summary(table)),
    ]
    if bound := advisor.headline(advisor.advise(table, run)):
        lines.append(f"- `advise` says: {bound.sentence}")
    return "\n".join(lines)


# --- experiments/fp8.md --------------------------------------------------------------------------


def fp8_predictions(recorded: Recorded) -> str:
    """A line for each preset and recipe: of its up projection."""
    header = ["preset", "tokens", "precision"]
    header += [f"{chip}, {how}" for chip in FP8_CHIPS for how in ("V1, V2", "V3", "V4")]
    lines = []
    for name, sizes in presets.PRESETS.items():
        tokens, width = sizes.batch_size * sizes.seq_len, sizes.hidden_dim
        for recipe, known in precision.FLOAT8.items():
            ratios = [
                float8_cost.speed_up(how[known.float8_recipe], chip, tokens, width, 4 * width)
                for chip in filter(None, map(chips.find_peaks, FP8_CHIPS))
                for how in (float8_cost.EAGER, float8_cost.KERNELS, float8_cost.COMPILED)
            ]
            lines.append([name, f"{tokens:,}", recipe, *(f"{value:.2f}x" for value in ratios)])
    return markdown_rows(header, lines, (0, 2))


def fp8_times(recorded: Recorded) -> str:
    """A line for each version and size of which a session has timed fp8 and bf16."""
    by_session = defaultdict(list)
    for run in ordinary(recorded.runs):
        by_session[run.session, size_of(run)].append(run)
    lines = {}
    for _, its in sorted(by_session.items(), key=lambda item: item[0][0]):
        rows = [(row, row.step_ms) for row in build_rows(its) if row.step_ms and not row.variant]
        bf16 = {row.version: ms for row, ms in rows if row.precision == "bf16"}
        for row, ms in rows:
            before = bf16.get(row.version)
            if row.precision in precision.FLOAT8 and before:
                what = row.device, size_name(its[0]), row.precision, row.version
                times = f"{before:.2f} ms", f"{ms:.2f} ms", f"{before / ms:.2f}x"
                lines[what] = [*what, *times, (its[0].git_commit or "-")[:7]]
    if not lines:
        return "Not measured yet."
    header = ["device", "config", "precision", "version", "step in bf16", "in fp8", "as fast"]
    by_size = sorted(lines, key=lambda what: (what[0], presets.rank(what[1]), *what[2:]))
    return markdown_rows([*header, "commit"], [lines[what] for what in by_size], (0, 1, 2, 3, 7))


# --- PERFORMANCE_RESULTS.md ----------------------------------------------------------------------


def performance(recorded: Recorded) -> str:
    """The summary of all reference results, a whole document.

    Raises:
        WorkshopError: one of them is broken.
    """
    (reference,) = page.read(recorded.collection)
    for path, reason in reference.broken:
        raise WorkshopError(f"{path}: {reason}")
    pictures = (path.relative_to(ROOT) for path in recorded.folder.glob("*/comparison.png"))
    parts = [
        INTRODUCTION,
        *(f"![Throughput, time and memory]({path.as_posix()})" for path in sorted(pictures)),
        f"**{reference.verdicts()}**",
        "\n".join(_failure(row.first) for row in reference.lab_rows if row.failed),
        "## How to read the tables",
        # The columns after the third are in the report alone.
        "\n".join(f"- **{what}** {text}" for what, text in page.HOW_TO_READ[:3]),
    ]
    if glance := ladders.at_a_glance(reference.groups):
        parts += ["## The ladder at a glance", f"{glance.title}:", tables.markdown_body(glance)]
        parts.append(precision.of_losses("fp16"))
    parts += [_studies(recorded.folder), _startup(recorded)]
    parts += map(_best_kernels, sorted(recorded.folder.glob("*/kernels")))
    parts += map(_drawn_kernels, sorted(recorded.folder.glob("*/kernels_drawn")))
    parts += [PUBLISHED_TEXT, _published()]
    return "\n\n".join(parts) + "\n"


def _failure(run: LabRun) -> str:
    why = run.error or "; ".join(run.gate.failures)
    return f"- FAIL: {run.lab} ({run.subject}): {run.variant}, on {run.device['name']}: {why}"


def _studies(folder: Path) -> str:
    """The waterfalls' and sweeps' pictures, each a link to its table."""
    found = [path.relative_to(ROOT) for kind in ("waterfall", "sweep")
             for path in sorted(folder.rglob(f"{kind}.png"))]  # fmt: skip
    links = (f"[![{one.parent.name}]({one})]({one.with_suffix('.md')})" for one in found)
    return "\n\n".join([STUDIES_TEXT, *links])


def _startup(recorded: Recorded) -> str:
    """A line for each version and size that is compiled or captured."""
    lines = []
    compiled = (row for rows in recorded.rows for row in rows if row.startup_s)
    for row in compiled:
        if row.precision != LADDER_PRECISION:
            continue
        what = f"{row.label}, {row.config}, {row.precision}, {row.device}"
        cells = [f"{row.setup_s[name]:.1f} s" for name in ("compile", "capture")]
        if row.prepared_beside:
            cells[0] += f", beside {row.prepared_beside} other{'s' * (row.prepared_beside > 1)}"
        # A later process finds the caches filled.
        cells.append(f"{row.startup_least_s:.1f} s" if row.runs > 1 else "-")
        lines.append([what, *cells, row.break_even or "-"])
    header = ["version and size", "compile", "capture", "with filled caches", "break-even"]
    return f"{STARTUP_TEXT}\n\n{markdown_rows(header, lines)}"


def _published() -> str:
    """Figures that others have published, each row checked for contradictions."""
    lines = []
    for claim in itertools.chain.from_iterable(map(plausibility.read_claims, PUBLISHED)):
        assert claim.step_ms and claim.peak_tflops
        work = flops.step_flops(claim.model, claim.batch_size, claim.seq_len).total
        rate, wrong = work / claim.step_ms / 1e9, plausibility.check(claim)
        verdict = f"no: {len(wrong)} contradictions" if wrong else "yes"
        size = f"{claim.batch_size} x {claim.seq_len}"
        times = f"{claim.step_ms:.1f} ms", f"{rate:.3g}", f"{rate / claim.peak_tflops:.1%}"
        lines.append([claim.name, size, *times, verdict])
    header = ["published row", "tokens", "step", "TFLOP/s", "of peak", "can be true"]
    return markdown_rows(header, lines, (0, 1, 5))


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
        f"{rows[0].first.device['name']}, {_commits(rows)}, at the largest size of "
        "each operator, replayed from graphs, on data that the cache does not hold. Only "
        "implementations whose results and gradients are right have a time."
    )
    table = markdown_rows(header, lines, (0, 1, 3))
    others = _behind("Smaller sizes included,", rows)
    return "\n\n".join(["## V3's kernels against the fastest other", caption, table, others])


def _drawn_kernels(folder: Path) -> str:
    rows = kernel_rows.load(folder)
    run = rows[0].first
    where = f"{run.device['name']}, {rows[0].precision}, {_commits(rows)}"
    operators = ", ".join({row.op: None for row in rows})
    where += f", drawn by seed {run.options['seed']}, of {operators}"
    return _behind(f"At sizes that no tile was tuned for ({where})", rows)


def _commits(rows: list[kernel_rows.Row]) -> str:
    return "commit " + ", ".join(sorted({(row.first.git_commit or "?")[:7] for row in rows}))


def _behind(beginning: str, rows: list[kernel_rows.Row]) -> str:
    """At how many of the sizes V3's operator is the fastest, and where not."""
    head, *others = (line.strip() for line in kernel_rows.behind(rows))
    sentence = f"{beginning} {head}{':' if others else '.'}"
    return "\n".join([sentence, *([""] if others else []), *(f"- {other}" for other in others)])

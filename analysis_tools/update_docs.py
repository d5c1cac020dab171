"""Writes the measured tables of the documentation from the result files in results/reference/.

PERFORMANCE_RESULTS.md is written whole; of README.md the part between the ladder's markers is, and
of a version's README the part between those of its profiles. No figure there is typed by hand.
`--check` changes nothing and exits 1 if they are stale.
"""

import argparse
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from analysis_tools import compare_versions  # noqa: E402
from version3_triton import benchmark_kernels  # noqa: E402
from workshop import comparison, errors, results  # noqa: E402
from workshop.comparison import Row  # noqa: E402
from workshop.errors import WorkshopError  # noqa: E402
from workshop.profilers import advisor, show  # noqa: E402
from workshop.profilers.load import load, recorded_run  # noqa: E402
from workshop.profilers.names import display_name  # noqa: E402
from workshop.results import RunResult  # noqa: E402
from workshop.versions import VERSIONS  # noqa: E402

REFERENCE = ROOT / "results" / "reference"
LADDER_CONFIGS = ("small", "medium")
LADDER_PRECISION = "bf16"
LADDER, PROFILES = "ladder", "profiles"
"""Parts of documents between two markers that name them."""
HOT_KERNELS = 6


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="exit 1 if a file is not up to date")
    arguments = parser.parse_args(argv)
    try:
        documents = render()
    except WorkshopError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    stale = [path for path, text in documents.items() if _read(path) != text]
    for path in stale:
        if arguments.check:
            print(f"{path.relative_to(ROOT)} is not what its result files say: run make docs")
        else:
            results.write_text(path, documents[path])
            print(f"Written: {path.relative_to(ROOT)}")
    return errors.ANSWER_IS_NO if arguments.check and stale else errors.DONE


def render() -> dict[Path, str]:
    """The documents as the result files would have them."""
    folders = sorted(path for path in REFERENCE.iterdir() if path.is_dir())
    devices = [(path, results.load_folder(path)) for path in folders if (path / "runs").is_dir()]
    ladder = "\n\n".join(_ladder(comparison.build_rows(runs)) for _, runs in devices)
    documents = {
        ROOT / "README.md": _with_part(ROOT / "README.md", LADDER, ladder),
        ROOT / "PERFORMANCE_RESULTS.md": _performance(devices),
    }
    for key, version in VERSIONS.items():
        profiles = [path for folder in folders for path in sorted(folder.glob(f"profiles/{key}/*"))]
        if profiles:
            readme = version.path.parent / "README.md"
            documents[readme] = _with_part(readme, PROFILES, "\n\n".join(map(_profile, profiles)))
    return documents


def _with_part(document: Path, part: str, content: str) -> str:
    """A document's text, with `content` between the markers of a part.

    Raises:
        WorkshopError: the markers are not there, once each.
    """
    begin, end = f"<!-- {part}: begin, written by make docs -->", f"<!-- {part}: end -->"
    text = _read(document)
    if text.count(begin) != 1 or text.count(end) != 1:
        name = document.relative_to(ROOT)
        raise WorkshopError(f"{name}: expected one line {begin!r} and one {end!r}")
    head, rest = text.split(begin)
    return f"{head}{begin}\n{content}\n{end}{rest.split(end)[1]}"


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


# --- the ladder ----------------------------------------------------------------------------------


def _ladder(rows: list[Row]) -> str:
    """One device's ladder: a line a version, step time and speed-up at two sizes."""
    chosen = {
        (row.version, row.config): row
        for row in rows
        if row.precision == LADDER_PRECISION and not row.variant
    }
    configs = [c for c in LADDER_CONFIGS if any(config == c for _, config in chosen)]
    header = ["version", "what"]
    for config in configs:
        header += [f"{config}: step", "speed-up", "peak memory"]
    lines = [_line(header), "|" + " --- |" * 2 + " ---: |" * (3 * len(configs))]
    for key, version in VERSIONS.items():
        found = [chosen.get((key, config)) for config in configs]
        if not any(found):
            continue
        cells = [f"[{key.upper()}]({version.folder}/)", version.title]
        for row in found:
            cells += _ladder_cells(row)
        lines.append(_line(cells))
    sizes = [next(row for (_, c), row in chosen.items() if c == config) for config in configs]
    shapes = ", ".join(f"{r.config} is {r.batch_size} x {r.seq_len} tokens a step" for r in sizes)
    caption = f"One {rows[0].device}, {LADDER_PRECISION}, real text; {shapes}."
    return caption + "\n\n" + "\n".join(lines)


def _ladder_cells(row: Row | None) -> list[str]:
    if row is None or row.step_ms is None:
        return ["-", "-", "-"]
    memory = f"{row.peak_memory_mb:,.0f} MB"
    return [f"{row.step_ms:.2f} ms", row.verdict(), memory]


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


# --- the profiles --------------------------------------------------------------------------------


def _profile(folder: Path) -> str:
    """The head of a profile's hot list, a step each, and what is said of it."""
    table, run = load(folder), recorded_run(folder)
    if run is None or not table.steps:
        raise WorkshopError(f"{folder}: no run.json beside the profile, or no steps in it")
    header = [table.what, "category", "calls a step", "ms a step", "share"]
    lines = [
        f"`{run.config_name}`, {run.precision}, {run.device['name']} ({table.tool}):",
        "",
        _line(header),
        "| --- | --- |" + " ---: |" * 3,
    ]
    for kernel in table.kernels[:HOT_KERNELS]:
        cells = [
            f"`{display_name(kernel.name, 60)}`",
            kernel.category,
            f"{kernel.calls / table.steps:,.0f}",
            f"{kernel.total_ns / table.steps / 1e6:,.3f}",
            f"{table.share(kernel):.1%}",
        ]
        lines.append(_line(cells))
    lines += ["", *(f"- {line}" for line in show.summary(table))]
    bound = advisor.headline(advisor.advise(table, run))
    if bound:
        lines.append(f"- `advise` says: {bound.sentence}")
    return "\n".join(lines)


# --- PERFORMANCE_RESULTS.md ----------------------------------------------------------------------


INTRODUCTION = """# Performance results

Written by `make docs` from the result files under [results/reference/](results/reference/), which
hold every step's time, the losses, the gate's verdict and the command of each run. To see them
again, without a GPU:

```bash
python analysis_tools/compare_versions.py --from-results results/reference
```

How to read the tables:

- **step ms** is the median over all steps of all processes, ± half of the interquartile range.
  Forward, backward and optimizer come from a separate pass with marks between them.
- **speed-up** is V1's median step over this version's, from the same session, with the 95%
  interval of a bootstrap over processes and steps.
- **gate** says whether the version's first process showed, before any clock was started, that it
  trains V1's model: logits, loss, each gradient and a short training run, within twice what the
  precision costs V1 itself. **gradients** counts the tensors, under V1's names, that the timed
  run's backward pass reached.
- **peak MB** (10^6 bytes) is the true peak of the timed steps, a captured graph's memory included.
- **of peak** compares the useful operations (causal attention counts half) with the data sheet.

Not measured by us: AMD hardware.
"""


KERNELS = """Written by `version3_triton/benchmark_kernels.py`, commit {commit}. A rate at the
median, ± half of the interquartile range; replayed from graphs, so that nobody's launches count; on
data that the cache does not hold. **of ceiling** compares with what a large copy or product reached
in the same run, forward / backward. The error is the worst of results and gradients against fp64,
with what the precision explains in brackets."""


def _performance(devices: list[tuple[Path, list[RunResult]]]) -> str:
    parts = [INTRODUCTION]
    for folder, runs in devices:
        parts.append(_device_section(folder, runs))
    return "\n".join(parts).rstrip() + "\n"


def _device_section(folder: Path, runs: list[RunResult]) -> str:
    rows = comparison.build_rows(runs)
    software = {
        ", ".join(f"{name} {version}" for name, version in run.software.items() if version)
        for run in runs
    }
    commits = sorted({str(run.git_commit) for run in runs})
    lines = [
        f"## {rows[0].device}",
        "",
        f"{'; '.join(sorted(software))}. Commit {', '.join(commits)}.",
        "",
        compare_versions.as_markdown(rows),
        "",
    ]
    picture = folder / "comparison.png"
    if picture.is_file():
        lines += [f"![Throughput, time and memory]({picture.relative_to(ROOT).as_posix()})", ""]
    return "\n".join([*lines, *_kernel_section(folder), *_harness_section(folder)])


def _kernel_section(folder: Path) -> list[str]:
    """V3's operators beside their rivals, those left out that do not exist for a case."""
    path = folder / "kernels" / "kernels.json"
    if not path.is_file():
        return []
    rows, run = benchmark_kernels.load(path)
    rows = [row for row in rows if row.status != benchmark_kernels.ABSENT]
    lines = ["### V3's kernels", "", KERNELS.format(commit=run.git_commit), ""]
    for group in benchmark_kernels.by_op(rows):
        lines += [f"**{benchmark_kernels.title(group, run)}**", ""]
        header = benchmark_kernels.header(group, run)
        lines += [_line(header), "| --- | --- |" + " ---: |" * (len(header) - 2)]
        lines += [_line(benchmark_kernels.cells(row, run)) for row in group]
        lines += ["", *(f"{note}  " for note in benchmark_kernels.notes(group, run)), ""]
    return [*lines, benchmark_kernels.summary(run), ""]


def _harness_section(folder: Path) -> list[str]:
    """What the harness adds to a step, beside a bare loop in the same process."""
    paths = sorted(folder.glob("harness/*.json"))
    if not paths:
        return []
    lines = [
        "### What the harness costs",
        "",
        "The same step in a bare hand-written loop and through the harness, alternating in one",
        "process (`pytest tests/test_gpu.py -k harness`); medians of ten times 15 steps, bf16.",
        "",
        _line(["version", "preset", "bare loop", "harness", "difference"]),
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for path in paths:
        record = results.read_json(path)
        bare, harness = (statistics.median(record[name]) for name in ("bare_ms", "harness_ms"))
        cells = [record["version"], record["config"], f"{bare:.3f} ms", f"{harness:.3f} ms"]
        lines.append(_line([*cells, f"{harness / bare - 1:+.2%}"]))
    return [*lines, ""]


if __name__ == "__main__":
    sys.exit(main())

"""Keeps a comparison's raw samples as a baseline, and says whether a later one is slower.

    regression_tester.py baseline save --config small medium
    regression_tester.py check --threshold 3%

Both run the versions as compare_versions.py does, or take result files instead. The verdicts are
slower, faster, no significant difference, or too noisy to tell, for each version's step, phases
and memory. docs/regression.md says how they come about and how to use them in CI.
"""

import argparse
import dataclasses
import re
import sys
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":  # PyTorch is not everywhere, and takes seconds to import
    from workshop.needed import import_torch

    import_torch()

from workshop import errors, records, results, tables
from workshop.arguments import option, read_command
from workshop.compare import regression, rows, runner
from workshop.compare.regression import ALARMS, Finding
from workshop.compare.runner import Asked
from workshop.errors import NotOnThisMachine, WorkshopError, printable
from workshop.results import RunResult
from workshop.run import hardware
from workshop.run.presets import PRESETS
from workshop.tables import Line, Table, escape, print_tables

FOLDER = "regression"
"""Below an output folder."""
DEFAULT_BASELINE = results.DEFAULT_FOLDER / FOLDER / "baseline.jsonl"
REPEATS = 10
IN_RESULTS = "(default: results/regression/baseline.jsonl of this checkout)"


def percent(text: str) -> float:
    """An argument's type: `3%` is 0.03."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)%", text)
    if not match or not 0 < float(match[1]) <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is no percentage above 0%, such as 3%")
    return float(match[1]) / 100


@dataclass
class Save(Asked):
    """Options of `baseline save`."""

    repeats: int = option("processes a version", REPEATS)
    baseline: Path = option(f"where to keep it {IN_RESULTS}", DEFAULT_BASELINE, metavar="FILE")
    from_results: list[Path] | None = option(
        "run nothing: take each DIR's newest session of each version and size", metavar="DIR"
    )


@dataclass
class Check:
    """Options of `check`."""

    baseline: Path = option(f"of `baseline save` {IN_RESULTS}", DEFAULT_BASELINE, metavar="FILE")
    threshold: float = option(
        "the least change that counts (default 3%%)", 0.03, type=percent, metavar="P%"
    )
    force: bool = option("compare with another device or software too")
    repeats: int | None = option("processes a version (default: the baseline's)")
    from_results: Path | None = option("run nothing: judge DIR's newest session", metavar="DIR")
    junit: Path | None = option("write the verdicts for a CI system, too", metavar="FILE")
    markdown: Path | None = option("write the tables as Markdown, too", metavar="FILE")
    output_dir: Path = option(
        "regression/check.json and runs/ go there (default: results/ of this checkout); with "
        "--from-results nothing is written there unless it is given",
        results.DEFAULT_FOLDER,
    )


def main(argv: list[str] | None = None) -> int:
    work, options = read_command(
        {
            "baseline save": (
                save_baseline,
                Save,
                "run the versions, or take result files, and keep their raw samples",
            ),
            "check": (
                check,
                Check,
                "run the baseline's versions again, or take result files, and say what is slower",
            ),
        },
        argv,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status: 0 done, 1 a version is slower or failed, 2 wrong usage, 77 not "
        "comparable or too noisy,\n130 interrupted.",
    )
    return errors.exit_status(
        lambda: work(options),
        interrupted="interrupted: nothing judged; the completed runs are in OUTPUT_DIR/runs/",
    )


# --- the commands --------------------------------------------------------------------------------


def save_baseline(options: Save) -> int:
    errors.require("rich")
    results.prepare_file(options.baseline, "--baseline")
    if options.from_results:
        folders = [_load(folder, options.versions) for folder in options.from_results]
    else:
        folders = [_run(options)]
    baseline, skipped = regression.make_baseline(folders)
    comparison = records.Comparison.of(baseline[0])
    comparison.runs += baseline
    comparison.write(options.baseline)
    for finding in skipped:
        line = f"skipped: {finding.label}: {finding.verdict}, {finding.note}"
        print(printable(line), file=sys.stderr)
    print(f"Written: {options.baseline} ({len(baseline)} runs)")
    for label in dict.fromkeys(f"{r.version} {r.config_name} {r.precision}" for r in baseline):
        print(f"  {printable(label)}")
    failed = any(finding.verdict == regression.FAILED for finding in skipped)
    return errors.ANSWER_IS_NO if failed else errors.DONE


def check(options: Check) -> int:
    errors.require("rich")
    baseline = regression.load_baseline(options.baseline)
    for target, flag in ((options.junit, "--junit"), (options.markdown, "--markdown")):
        if target is not None:
            results.prepare_file(target, flag)
    if options.from_results is None:
        runs = _run_again(baseline, options)
    else:
        runs = _load(options.from_results)
    findings = regression.check(baseline, runs, threshold=options.threshold, force=options.force)
    report = Report(findings, baseline[0], options.baseline, options.threshold)
    writes = options.from_results is None or options.output_dir is not results.DEFAULT_FOLDER
    targets = [
        (options.output_dir / FOLDER / "check.json" if writes else None, as_json),
        (options.markdown, as_markdown),
        (options.junit, as_junit),
    ]
    written = {target: render(report) + "\n" for target, render in targets if target is not None}
    for target in written:
        results.prepare_folder(target.parent)
    results.write_together(written)
    console = tables.terminal()
    console.print(report.heading, soft_wrap=True)
    print_tables(report.tables())
    for line in report.alarms:
        console.print(line, style="red", soft_wrap=True)
    console.print(report.summary, soft_wrap=True)
    if written:
        print(f"Written: {', '.join(map(str, written))}")
    return regression.exit_status(findings)


def _load(folder: Path, keys: list[str] | None = None) -> list[RunResult]:
    """The folder's runs of some versions, or all, except those of waterfalls and sweeps beside
    comparisons of versions. Raises WorkshopError where one of the versions has no run."""
    runs = rows.preferred(records.load_folder(folder, RunResult))
    known = sorted({run.version for run in runs})
    for key in keys or ():
        if key not in known:
            there = f"there are runs of {', '.join(known)} only"
            raise WorkshopError(f"--versions {key}: {there}")
    return [run for run in runs if not keys or run.version in keys]


def _run(asked: Asked) -> list[RunResult]:
    """The versions' runs, as compare_versions.py trains them.

    Raises:
        KeyboardInterrupt: Ctrl-C ended them.
        WorkshopError: too few processes to know how they scatter.
    """
    if asked.repeats < regression.LEAST_PROCESSES:
        least = f"takes at least {regression.LEAST_PROCESSES}; {REPEATS} are better"
        raise WorkshopError(f"--repeats {asked.repeats}: the scatter between processes {least}")
    planned = runner.plan(asked)
    results.prepare_folder(asked.output_dir)
    runs, interrupted = runner.run_plans(planned, asked, results.new_session())
    if interrupted:
        raise KeyboardInterrupt
    return runs


def _run_again(baseline: list[RunResult], options: Check) -> list[RunResult]:
    """The baseline's versions, run anew as it was.

    Raises:
        NotOnThisMachine: the machine is not the baseline's.
        WorkshopError: the baseline has no size that can be run by its name.
    """
    runs = [run for run in baseline if run.config_name in PRESETS]
    if not runs:
        raise WorkshopError("the baseline has no preset's runs: run your own, then --from-results")
    first = runs[0]
    synthetic = str(first.data.get("name")).startswith("synthetic")
    asked = Asked(
        versions=list(dict.fromkeys(run.version for run in runs)),
        config=list(dict.fromkeys(run.config_name for run in runs)),
        precision=list(dict.fromkeys(run.precision for run in runs)),
        data="synthetic" if synthetic else "text",
        num_steps=int(first.options.get("num_steps") or len(first.step_ms)),
        warmup_steps=first.warmup_steps,
        repeats=regression.repeats(runs) if options.repeats is None else options.repeats,
        device=str(first.device.get("type", "auto")),
        seed=int(first.options.get("seed") or 0),
        output_dir=options.output_dir,
    )
    device = hardware.describe(hardware.get_device(asked.device))
    here = dataclasses.replace(first, device=device, software=results.describe_software())
    differences = regression.differing(first, here)
    if differences and not options.force:
        listed = printable("; ".join(differences))
        remedy = "save a baseline here, or use --force"
        raise NotOnThisMachine(f"not comparable with {options.baseline}: {listed}; {remedy}")
    return _run(asked)


# --- the report ----------------------------------------------------------------------------------

HEADER = ("version", "what", "then", "now", "change", "interval", "visible", "verdict")
STYLES = dict.fromkeys(ALARMS, "red")
STYLES |= {regression.FASTER: "green", regression.TOO_NOISY: "yellow"}


@dataclass(frozen=True)
class Report:
    """The findings, and the baseline that they are against, by its first run."""

    findings: list[Finding]
    baseline: RunResult
    path: Path
    threshold: float

    @property
    def heading(self) -> str:
        b = self.baseline
        parts = [f"baseline {self.path.name} of {b.created[:10]}"]
        parts += [f"commit {b.git_commit}"] if b.git_commit else []
        parts += [str(b.device.get("name")), f"torch {b.software.get('torch')}"]
        return printable(", ".join(parts))

    @property
    def summary(self) -> str:
        """How many of each verdict, the worst first."""
        found = [finding.verdict for finding in self.findings]
        counts = [f"{found.count(v)} {v}" for v in regression.VERDICTS if v in found]
        return f"changes by {self.threshold * 100:.3g}% or more: {', '.join(counts)}"

    @property
    def alarms(self) -> list[str]:
        """Findings of a slow-down or a failure, a line each."""
        found = [f for f in self.findings if f.verdict in ALARMS]
        return [printable(f"{f.label} {f.heading}: {_sentence(f)}") for f in found]

    def tables(self) -> list[Table]:
        """One for each size and precision."""
        groups: dict[object, list[Finding]] = {}
        for f in self.findings:
            groups.setdefault((f.config, f.precision, f.batch_size, f.seq_len), []).append(f)
        return list(map(_table, groups.values()))


def _table(group: list[Finding]) -> Table:
    f = group[0]
    title = printable(f"{f.config}: {f.batch_size} x {f.seq_len} tokens, {f.precision}")
    lines = [Line(cells(f), STYLES.get(f.verdict), (f.version, f.variant)) for f in group]
    return Table(title, HEADER, lines, _notes(group), left=(0, 1, 7), only_wide=(5, 6))


def cells(f: Finding) -> tuple[str, ...]:
    """The cells of one line, in the order of HEADER."""
    visible = "-" if f.visible is None else _share(f.visible)
    return (
        f"{f.version} {f.variant}".strip(),
        f.heading or "-",
        _amount(f.before, f.unit),
        _amount(f.after, f.unit),
        "-" if f.change is None else _share(f.change, "+"),
        " to ".join(_share(bound, "+") for bound in f.interval or ()) or "-",
        visible,
        f"too noisy under {visible}" if f.verdict == regression.TOO_NOISY else f.verdict,
    )


def _share(value: float, sign: str = "-") -> str:
    """A percentage with its significant digits."""
    return format(value, f"{sign}.{1 if abs(value) < 0.1 else 0}%")


def _amount(value: float | None, unit: str | None) -> str:
    return "-" if value is None else f"{value:,.{2 if value < 1000 else 0}f} {unit}"


def _notes(findings: list[Finding]) -> list[str]:
    """Each note once, with the versions that share it. Of noisy metrics only the step's."""
    lines: dict[str, dict[str, None]] = {}
    for f in findings:
        if f.note and (f.verdict != regression.TOO_NOISY or f.metric == regression.STEP):
            lines.setdefault(f.note, {})[f"{f.version} {f.variant}".strip()] = None
    return [printable(f"{', '.join(labels)}: {line}") for line, labels in lines.items()]


def _sentence(finding: Finding) -> str:
    _, _, then, now, change, interval, *_ = cells(finding)
    numbers = "" if finding.change is None else f": {change} ({interval}), {then} then, {now} now"
    return printable(finding.verdict + numbers + (f": {finding.note}" if finding.note else ""))


def as_markdown(report: Report) -> str:
    parts = ["# Regression check", "", f"**{escape(report.summary)}**", ""]
    parts += [f"- **{escape(line)}**" for line in report.alarms]
    parts += ["", f"Compared with {escape(report.heading)}.", ""]
    return "\n".join([*parts, tables.markdown(report.tables(), "##")])


def as_json(report: Report) -> str:
    content = {
        "schema_version": regression.SCHEMA_VERSION,
        "created": results.now(),
        "threshold": report.threshold,
        "false_alarms": regression.FALSE_ALARMS,
        "baseline": {
            name: getattr(report.baseline, name)
            for name in ("created", "git_commit", "device", "software")
        },
        "findings": [dataclasses.asdict(finding) for finding in report.findings],
    }
    return results.json_text(content).rstrip()


def as_junit(report: Report) -> str:
    """One test case a finding: slower and failed ones fail, those without a verdict are skipped."""
    from xml.etree import ElementTree as xml

    suites = xml.Element("testsuites")
    suite = xml.SubElement(suites, "testsuite", name="regression")
    tags = []
    for f in report.findings:
        where = ".".join(filter(None, (f.config, f.precision, f.version, f.variant)))
        names = {"classname": printable(where), "name": f.heading or "verdict"}
        case = xml.SubElement(suite, "testcase", names)
        if f.verdict in (regression.SAME, regression.FASTER):
            xml.SubElement(case, "system-out").text = _sentence(f)
            continue
        tags.append("failure" if f.verdict in ALARMS else "skipped")
        kind = {"type": f.verdict} if f.verdict in ALARMS else {}
        xml.SubElement(case, tags[-1], kind, message=_sentence(f))
    counts = {"tests": len(report.findings), "errors": 0}
    counts |= {"failures": tags.count("failure"), "skipped": tags.count("skipped")}
    for name, count in counts.items():
        suites.set(name, str(count))
        suite.set(name, str(count))
    xml.indent(suites)
    text = xml.tostring(suites, encoding="unicode")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{text}'


if __name__ == "__main__":
    sys.exit(main())

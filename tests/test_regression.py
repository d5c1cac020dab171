"""The regression tester: few false alarms, no slow-down missed in silence, nothing left out."""

import dataclasses
import json
import math
import random
import re
import statistics
from collections import Counter, defaultdict
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from test_compare import SHRINK_PRESET, copy_repository, use_versions_of
from test_results import make_result

from analysis_tools import regression_tester
from workshop import errors, records
from workshop.compare import regression
from workshop.compare.regression import (
    FAILED,
    FASTER,
    GONE,
    METRICS,
    NEW,
    NOT_COMPARABLE,
    NOT_TIMED,
    SAME,
    SLOWER,
    TOO_NOISY,
    Finding,
)
from workshop.errors import WorkshopError
from workshop.results import RunResult

ROOT = Path(__file__).resolve().parents[1]
H200 = ROOT / "results" / "reference" / "nvidia_h200"
CPU_NOISE = ROOT / "tests" / "fixtures" / "noise_cpu.json"
SAMPLES = ("step_ms", "forward_ms", "backward_ms", "optimizer_ms")
THRESHOLD = 0.03

# --- statistics -------------------------------------------------------------------------------


def some_steps(times: list[float], rng: random.Random, steps: int) -> float:
    """The median of drawn steps, in stretches of five, as neighbours are alike."""
    starts = [rng.randrange(len(times)) for _ in range(steps // 5)]
    return statistics.median(times[(start + i) % len(times)] for start in starts for i in range(5))


class Noise:
    """Recorded processes of one version and size on the H200, to draw more of their kind: these
    differ as the recorded ones do, and each has a recorded one's steps."""

    def __init__(self, runs: list[RunResult]) -> None:
        self._runs = [{name: getattr(run, name) for name in SAMPLES} for run in runs]
        logs = {n: [math.log(statistics.median(run[n])) for run in self._runs] for n in SAMPLES}
        self._centre = {name: math.exp(statistics.fmean(logs[name])) for name in SAMPLES}
        self.scatter = {name: statistics.stdev(logs[name]) for name in SAMPLES}

    def process(self, rng: random.Random, steps: int) -> dict[str, float]:
        """The median of each of SAMPLES. A process that is slow in one phase is so in the others,
        up to a point."""
        recorded, common = rng.choice(self._runs), rng.gauss(0, 1)
        medians = {}
        for name in SAMPLES:
            shape = some_steps(recorded[name], rng, steps) / statistics.median(recorded[name])
            own = math.sqrt(0.5) * (common + rng.gauss(0, 1))
            medians[name] = self._centre[name] * shape * math.exp(self.scatter[name] * own)
        return medians


class Drawn:
    """Many recorded processes of V1 on a CPU, to draw from: few are slow, but these by much."""

    def __init__(self, runs: list[dict[str, list[float]]]) -> None:
        self._runs = runs

    def process(self, rng: random.Random, steps: int) -> dict[str, float]:
        """As Noise.process, of one that was recorded."""
        recorded = rng.choice(self._runs)
        return {name: some_steps(recorded[name], rng, steps) for name in SAMPLES}


def recorded_noise() -> dict[str, Noise]:
    cells = defaultdict(list)
    for run in records.load_folder(H200 / "runs", RunResult):
        if run.status == "complete":
            cells[f"{run.version} {run.config_name} {run.precision} {run.session}"].append(run)
    return {cell: Noise(runs) for cell, runs in cells.items() if len(runs) > 1}


def simulate(
    noise: Noise | Drawn,
    rng: random.Random,
    *,
    checks: int,
    slow_down: float,
    processes: int,
    steps: int,
) -> Counter[str]:
    """How checks of one version end: `alarm` where the same code is called slower in any
    metric; and the verdicts on a step slower by `slow_down`."""
    counts: Counter[str] = Counter()
    for _ in range(checks):
        before, after = ([noise.process(rng, steps) for _ in range(processes)] for _ in range(2))
        sides = {name: ([p[name] for p in before], [p[name] for p in after]) for name in SAMPLES}
        same = [regression.compare(*side, comparisons=len(METRICS)) for side in sides.values()]
        counts["alarm"] += any(change.verdict(THRESHOLD) == SLOWER for change in same)
        then, now = sides["step_ms"]
        planted = [value * (1 + slow_down) for value in now]
        change = regression.compare(then, planted, comparisons=len(METRICS))
        counts[change.verdict(THRESHOLD)] += 1
    return counts


QUIET, LOUD = 0.01, 0.05
"""Scatter of processes that keep the GPU busy stays below the first, of those that wait for the
host it is above the second."""


def test_false_alarms_are_rare_and_slow_downs_are_found_or_reported_as_invisible() -> None:
    quiet, every, loud = Counter[str](), Counter[str](), Counter[str]()
    for cell, noise in recorded_noise().items():
        scatter = noise.scatter["step_ms"]
        size = {"processes": regression_tester.REPEATS, "steps": 20}
        checks = 20 if scatter < QUIET else 250
        counts = simulate(noise, random.Random(cell), checks=checks, slow_down=0.05, **size)
        for group, belongs in ((quiet, scatter < QUIET), (every, True), (loud, scatter > LOUD)):
            if belongs:
                group.update(counts | {"checks": checks})
    # A machine as quiet as a GPU that is kept busy: every 5% is found.
    assert quiet["checks"] >= 6 * 20 and quiet[SLOWER] == quiet["checks"]
    # Times that scatter by more between processes: 5% drowns, with a report, or is found after all.
    assert every[TOO_NOISY] + every[SLOWER] == every["checks"]
    assert loud["checks"] >= 4 * 250 and loud[TOO_NOISY] >= 0.95 * loud["checks"]
    for counts in (quiet, every):
        assert counts["alarm"] <= 0.01 * counts["checks"]


@pytest.mark.parametrize(
    ("recording", "processes", "found", "too_noisy"),
    [("shared CPU", 10, 91, 409), ("shared CPU", 40, 486, 9), ("busy shared CPU", 10, 2, 497)],
)
def test_false_alarms_are_as_rare_on_a_cpu_and_noise_is_reported(
    recording, processes, found, too_noisy
) -> None:
    """The figures are those of docs/regression.md."""
    noise = Drawn(json.loads(CPU_NOISE.read_text())[recording])
    rng = random.Random(recording)
    counts = simulate(noise, rng, checks=500, slow_down=0.05, processes=processes, steps=20)
    assert (counts[SLOWER], counts[TOO_NOISY]) == (found, too_noisy)
    assert counts["alarm"] <= 5


def test_a_disturbed_process_does_not_hide_a_slow_down() -> None:
    calm = [100.0, 100.2, 99.9, 100.1, 100.3, 99.8, 100.0]
    disturbed = [*calm[:5], 180.0, 140.0]
    change = regression.compare(disturbed, [value * 1.05 for value in disturbed], comparisons=20)
    assert change.verdict(THRESHOLD) == SLOWER
    assert change.ratio == pytest.approx(1.05) and change.visible < 0.01
    assert regression.compare(calm, disturbed, comparisons=20).verdict(THRESHOLD) == SAME


def test_what_is_too_noisy_comes_with_what_would_help() -> None:
    noisy = [100.0, 103.0, 98.0, 105.0]
    change = regression.compare(noisy, [value * 1.05 for value in noisy], comparisons=4)
    assert change.verdict(THRESHOLD) == TOO_NOISY and 0.05 < change.visible < 0.25
    needed = change.processes_needed(THRESHOLD)
    assert needed is not None and needed > 10
    more = regression.compare(noisy * (needed // 4 + 1), noisy * (needed // 4 + 1), comparisons=4)
    assert more.visible < 1.2 * THRESHOLD
    assert regression.compare([1.0, 9.0], [1.0, 9.0]).processes_needed(THRESHOLD) is None
    # A change that is larger than the noise is seen all the same.
    change = regression.compare(noisy, [value * 2 for value in noisy], comparisons=4)
    assert change.verdict(THRESHOLD) == SLOWER
    change = regression.compare([value * 2 for value in noisy], noisy, comparisons=4)
    assert change.verdict(THRESHOLD) == FASTER


def test_a_certain_change_below_the_threshold_is_none() -> None:
    quiet = [100.0, 100.01, 99.99, 100.02, 100.0]
    change = regression.compare(quiet, [value * 1.02 for value in quiet])
    assert change.low > 1.01 and change.verdict(THRESHOLD) == SAME
    assert change.verdict(0.01) == SLOWER


# --- verdicts ---------------------------------------------------------------------------------


def session(version: str = "v1", factor: float = 1.0, count: int = 3, **changes: object) -> list:
    """Processes of one version that differ by a tenth of a percent, the first through the gate."""
    gates = ["pass", *["not run"] * (count - 1)]
    steps = [[value * factor * (1 + 1e-3 * i) for value in (99.0, 100.0, 101.0)] for i in range(3)]
    return [
        make_result(version, gate, **{"step_ms": steps[i % 3], **changes})
        for i, gate in enumerate(gates)
    ]


def judge(before: list[RunResult], after: list[RunResult], *, force: bool = False) -> list[Finding]:
    baseline, _ = regression.make_baseline([before])
    return regression.check(baseline, after, threshold=THRESHOLD, force=force)


def verdicts(findings: list[Finding]) -> dict[str, str]:
    return {f"{f.version} {f.metric}" if f.metric else f.version: f.verdict for f in findings}


def test_each_version_phase_and_memory_has_its_verdict() -> None:
    before = session("v1") + session("v2") + session("v4", factor=0.5)
    after = [
        *session("v1", backward_ms=[66.0, 66.0], memory_mb={"peak": 210.0, "source": "allocator"}),
        *session("v2", factor=1.05, forward_ms=[20.0]),
    ]
    findings = judge(before, after + session("v3", device={"type": "cuda", "name": "Some CPU"}))
    assert verdicts(findings) == {
        "v1 step_ms": SAME,
        "v1 forward_ms": SAME,
        "v1 backward_ms": SLOWER,
        "v1 optimizer_ms": SAME,
        "v1 peak_memory_mb": SLOWER,
        "v2 step_ms": SLOWER,
        "v2 forward_ms": FASTER,
        "v2 backward_ms": SAME,
        "v2 optimizer_ms": SAME,
        "v2 peak_memory_mb": SAME,
        "v3": NEW,
        "v4": GONE,
    }
    step = next(f for f in findings if (f.version, f.metric) == ("v2", "step_ms"))
    assert step.change == pytest.approx(0.05) and step.processes == [3, 3] and step.unit == "ms"
    assert step.interval is not None and 0 < step.interval[0] < 0.05 < step.interval[1] < 0.1
    assert regression.exit_status(findings) == errors.ANSWER_IS_NO
    sheet = {"type": "cpu", "name": "Some CPU", "peaks_source": "a newer sheet", "threads": 2}
    same = [
        dataclasses.replace(run, device=sheet) for run in before
    ]  # its data sheet was corrected
    calm = judge(before, same + session("v3", device={"type": "cuda"}))
    assert regression.exit_status(calm) == errors.DONE


@pytest.mark.parametrize(
    ("changes", "verdict", "note"),
    [
        ({"gate": "fail"}, FAILED, "gate failed: gradient of norm.weight is missing"),
        ({"gate": "not run"}, FAILED, "gate not run"),
        ({"status": "failed", "error": "crashed", "step_ms": []}, FAILED, "crashed"),
        ({"status": "interrupted", "step_ms": []}, FAILED, "no timed step"),
        ({"status": "skipped", "error": "no Triton", "step_ms": []}, NOT_TIMED, "skipped: no Tri"),
    ],
)
def test_a_version_without_proven_times_is_judged_for_that(changes, verdict, note) -> None:
    broken = make_result("v2", **{"gate": "pass", **changes})
    findings = judge(session("v1"), [*session("v1"), broken])
    assert findings[-1].verdict == verdict and note in findings[-1].note
    expected = errors.ANSWER_IS_NO if verdict == FAILED else errors.DONE
    assert regression.exit_status(findings) == expected
    # Where the baseline has times of it, to have none now is no pass.
    findings = judge(session("v1") + session("v2"), [*session("v1"), broken])
    known = findings[-1]
    assert (known.verdict, known.metric) == (FAILED if verdict == FAILED else NOT_COMPARABLE, None)
    assert regression.exit_status(findings) != errors.DONE


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"device": {"type": "cpu", "name": "Another CPU"}}, "Some CPU then, Another CPU now"),
        ({"device": {"type": "cpu", "name": "Some CPU", "threads": 4}}, "threads: 2 then, 4 now"),
        ({"software": {"torch": "2.14.0"}}, "software torch: 2.13.0 then, 2.14.0 now"),
    ],
    ids=["device", "threads", "software"],
)
def test_another_machine_is_named_and_compared_by_force(changes, difference) -> None:
    moved = session(factor=1.05, **changes)
    (finding,) = judge(session(), moved)
    assert finding.verdict == NOT_COMPARABLE and difference in finding.note
    assert regression.exit_status([finding]) == errors.NOT_ON_THIS_MACHINE
    forced = judge(session(), moved, force=True)
    assert verdicts(forced)["v1 step_ms"] == SLOWER and difference in forced[0].note
    with pytest.raises(WorkshopError, match="a baseline is of one machine"):
        regression.make_baseline([session() + session("v2", **changes)])


def test_the_newest_session_counts_and_one_of_this_machine_before_all_others() -> None:
    old = session(factor=2.0, session="20250101")
    elsewhere = session(factor=3.0, session="20270101", device={"type": "cuda", "name": "GPU"})
    findings = judge(session(), old + elsewhere + session())
    assert set(verdicts(findings).values()) == {SAME}
    # A baseline takes each folder's newest session.
    baseline, _ = regression.make_baseline([old + session(), session(session="20250301")])
    assert Counter(run.session for run in baseline) == {session()[0].session: 3, "20250301": 3}


def test_one_process_proves_nothing_and_noise_in_every_step_is_no_pass() -> None:
    findings = judge(session(), session(count=1))
    assert {f.verdict for f in findings} == {NOT_COMPARABLE}
    assert regression.exit_status(findings) == errors.NOT_ON_THIS_MACHINE
    wild = [make_result(step_ms=[level]) for level in (60.0, 100.0, 140.0)]
    findings = judge(wild, wild)
    assert verdicts(findings)["v1 step_ms"] == TOO_NOISY
    assert findings[0].note.startswith("can't see less than ")
    assert "--repeats" not in findings[0].note
    assert regression.exit_status(findings) == errors.NOT_ON_THIS_MACHINE
    # One version that is too noisy does not silence the others.
    findings = judge(wild + session("v2"), wild + session("v2"))
    assert regression.exit_status(findings) == errors.DONE


def test_a_baseline_leaves_out_what_is_not_proven(tmp_path, capsys) -> None:
    for run in [*session("v1"), make_result("v2", "fail"), make_result("v4", "not run")]:
        records.add(run, tmp_path / "in")
    target = tmp_path / "new" / "b.json"
    assert save(tmp_path / "in", target) == 1
    captured = capsys.readouterr()
    assert "skipped: v2 tiny fp32: failed, gate failed: gradient of norm.weight" in captured.err
    assert "skipped: v4 tiny fp32: failed, gate not run" in captured.err
    assert [run.version for run in regression.load_baseline(target)] == ["v1"] * 3
    assert save(tmp_path / "in", tmp_path / "some.json", "--versions", "v4") == 2
    capsys.readouterr()
    records.add(make_result("v2", "fail"), tmp_path / "red")
    assert save(tmp_path / "red", target) == 2
    assert "no run is fit for a baseline: v2 tiny fp32: gate failed" in capsys.readouterr().err
    assert len(regression.load_baseline(target)) == 3  # the old one is kept


# --- files ------------------------------------------------------------------------------------


def run_tool(*words: str | Path) -> int:
    return regression_tester.main([str(word) for word in words])


def save(folder: Path, path: Path, *words: str) -> int:
    return run_tool("baseline", "save", "--from-results", folder, "--baseline", path, *words)


@pytest.fixture
def saved(tmp_path) -> Path:
    """A baseline of V1 and V2."""
    for run in session("v1") + session("v2"):
        records.add(run, tmp_path / "in")
    path = tmp_path / "baseline.jsonl"
    assert save(tmp_path / "in", path) == 0
    return path


def test_a_baseline_is_read_as_written_and_no_empty_file_is_one(saved, capsys) -> None:
    baseline = regression.load_baseline(saved)
    assert sorted(baseline, key=repr) == sorted(session("v1") + session("v2"), key=repr)
    saved.write_text(saved.read_text().splitlines()[0])
    assert run_tool("check", "--from-results", saved.parent / "in", "--baseline", saved) == 2
    assert "baseline.jsonl: there is no run of a version in it: make" in capsys.readouterr().err


def test_every_form_holds_the_verdicts(saved, capsys) -> None:
    folder, junit, page = saved.parent / "now", saved.parent / "j.xml", saved.parent / "a" / "m.md"
    for run in [*session("v2", factor=1.5), make_result("v4", "fail")]:
        records.add(run, folder)
    words = ["check", "--from-results", folder, "--baseline", saved]
    words += ["--output-dir", saved.parent / "out", "--junit", junit, "--markdown", page]
    assert run_tool(*words) == 1
    content = json.loads((saved.parent / "out" / "regression" / "check.json").read_text())
    assert len(content["findings"]) == 7 and content["threshold"] == THRESHOLD
    table = capsys.readouterr().out
    assert re.search(r"│ v2 +│ step +│ 100.\d+ ms │ 150.\d+ ms │ +\+50% │ .* │ slower ", table)
    assert "| v2 | step | 100.10 ms | 150.15 ms | +50% |" in page.read_text()
    outcomes = {
        (str(case.get("classname")), case.get("name")): (child.tag, str(child.get("message")))
        for case in ElementTree.parse(junit).getroot().iter("testcase")
        for child in case
    }
    slower = outcomes.pop(("tiny.fp32.v2", "step"))
    assert slower[0] == "failure" and slower[1].startswith("slower: +50% (+")
    found = {key[0]: value for key, value in outcomes.items()}
    assert found["tiny.fp32.v1"] == ("skipped", "gone")
    assert found["tiny.fp32.v4"][0] == "failure"
    assert "failed: gate failed: gradient of norm.weight" in found["tiny.fp32.v4"][1]


# --- fresh runs -------------------------------------------------------------------------------


def test_a_check_runs_what_the_baseline_ran(saved, monkeypatch, capsys) -> None:
    given = []
    monkeypatch.setattr(regression_tester, "_run", lambda asked: given.append(asked) or [])
    monkeypatch.setattr(regression_tester.regression, "differing", lambda *_: [])
    run_tool("check", "--baseline", saved, "--repeats", "9", "--output-dir", saved.parent / "out")
    fresh = vars(given[0])
    wanted = {"versions": ["v1", "v2"], "config": ["tiny"], "precision": ["fp32"], "repeats": 9}
    wanted |= {"num_steps": 3, "warmup_steps": 1, "device": "cpu", "seed": 42, "data": "text"}
    assert {name: fresh[name] for name in wanted} == wanted


def test_another_machine_is_refused_before_anything_runs(saved, monkeypatch, capsys) -> None:
    monkeypatch.setattr(regression_tester.runner, "run_plans", pytest.fail)
    out = saved.parent / "out"
    assert run_tool("check", "--baseline", saved, "--output-dir", out) == 77
    line = capsys.readouterr().err
    assert re.search(r"not comparable .*: device name: Some CPU then, .+ now; .*--force\n$", line)
    assert not out.exists()


def with_clock(folder: Path, milliseconds: float) -> Path:
    """The repository with a tiny model, and a clock that goes so far from mark to mark: by a little
    more in some processes than in others."""
    old = "self._marks.append(time.perf_counter())"
    tick = f"{milliseconds / 1e3} * (1 + __import__('os').getpid() % 7 / 1e3)"
    new = f"self._marks.append(len(self._marks) * {tick})"
    changes = {"workshop/run/presets.py": SHRINK_PRESET, "workshop/run/timing.py": (old, new)}
    return copy_repository(folder, changes)


@pytest.mark.slow
def test_a_planted_slow_down_is_found_in_real_runs(tmp_path, monkeypatch) -> None:
    def run(clock_ms: float, *words: str | Path) -> int:
        code = with_clock(tmp_path / str(clock_ms), clock_ms)
        with pytest.MonkeyPatch.context() as patch:
            use_versions_of(code, patch)
            return run_tool(*words, "--baseline", tmp_path / "b.json")

    # The check refuses another number of threads than its own.
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    save = ("baseline", "save", "--versions", "v1", "--config", "tiny", "--device", "cpu")
    few = ("--repeats", "3", "--num-steps", "10")
    assert run(20, *save, *few, "--output-dir", tmp_path / "a") == 0
    check = ("check", "--repeats", "2", "--output-dir", tmp_path / "b")
    assert run(80, *check, "--junit", tmp_path / "j.xml") == 1
    found = json.loads((tmp_path / "b" / "regression" / "check.json").read_text())["findings"]
    by_metric = {f["metric"]: f for f in found}
    for name in SAMPLES:
        assert by_metric[name]["verdict"] == SLOWER
        assert by_metric[name]["change"] == pytest.approx(3, rel=0.03)
    assert by_metric["peak_memory_mb"]["verdict"] in (SAME, TOO_NOISY)
    # The same runs once more: what they wrote can be read as results, and nothing is slower.
    words = ("check", "--from-results", tmp_path / "a", "--baseline", tmp_path / "b.json")
    assert run_tool(*words) in (0, 77)

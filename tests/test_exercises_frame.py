"""The exercises' frame: commands, checks of broken files, answers, progress; the sheets and their
index; V1's three measuring exercises."""

import re
import shutil
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import stored_runs
import torch
from conftest import HANGS_S
from exercise_cases import checked, red, shown, solution, with_answers

from workshop.errors import WorkshopError
from workshop.exercises import frame, runner, sheet
from workshop.exercises.__main__ import main
from workshop.exercises.answers import Answers
from workshop.exercises.compare import first_difference
from workshop.exercises.frame import Work
from workshop.exercises.predict import Found, disturbed
from workshop.exercises.progress import FILE, Progress

ROOT = Path(__file__).resolve().parents[1]
SOLUTIONS = ROOT / "exercises" / "solutions"

SHEET = """# A demo

**15 minutes** · session 1 · no GPU needed · coding and measuring

## Hints

<details><summary>First hint</summary>

Multiply by `2`.

</details>
<details><summary>Second hint</summary>

Add it to itself.

</details>
"""
STARTER = "def double(x):\n    raise NotImplementedError  # YOUR CODE\n"
QUESTIONS = 'time_ms = nan\n[cause]\nfirst = ""\n'
CHECK = """
import torch
from workshop.errors import NotOnThisMachine
from workshop.exercises.compare import first_difference
from workshop.exercises.frame import Item
from workshop.exercises.predict import disturbed, prediction

def check(work):
    return work.each(code, time, cause)

def code(work):
    x = torch.arange(6.0).reshape(2, 3)
    yield first_difference(work.module.double(x), 2 * x, what="double(x)", limit=1e-6)

def time(work):
    yield prediction("time", work.answers.number("time_ms"), 4.0, "ms", why="Because.")

def cause(work):
    yield Item(work.answers.choice("cause.first", ("one", "two")) == "one", "the cause")
"""
RIGHT = "def double(x):\n    return 2 * x\n"
ANSWERED = 'time_ms = 8\n[cause]\nfirst = "One"\n'


@pytest.fixture
def demo(tmp_path) -> Path:
    """An exercise below another root."""
    folder = tmp_path / "a é" / "version1_demo" / "exercises" / "demo"
    folder.mkdir(parents=True)
    for name, text in (
        ("README.md", SHEET),
        ("starter.py", STARTER),
        ("answers.toml", QUESTIONS),
        ("check.py", CHECK),
    ):
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def typed(demo, capsys, monkeypatch) -> Callable[..., tuple[int, str]]:
    """Types a command, below the demo's root; its status and what it printed."""
    root = demo.parents[2]
    monkeypatch.setattr(runner, "LIMIT_S", HANGS_S)
    monkeypatch.setenv("COLUMNS", "1000")  # a long path is in one line

    def run(*words: str) -> tuple[int, str]:
        try:
            status = main(["--results-dir", str(root / "results"), *words], root)
        except SystemExit as error:  # argparse's
            status = int(error.code or 0)
        printed = capsys.readouterr()
        return status, " ".join((printed.out + printed.err).split())

    return run


def write(folder: Path, mine: str = RIGHT, answers: str = ANSWERED) -> None:
    (folder / "mine.py").write_text(mine, encoding="utf-8")
    (folder / "my_answers.toml").write_text(answers, encoding="utf-8")


def test_from_the_first_check_to_the_last(typed, demo) -> None:
    status, text = typed("check", "demo")
    assert status == 1 and "made" in text and "mine.py" in text and "my_answers.toml" in text
    assert (demo / "mine.py").read_text() == STARTER
    status, text = typed("check", "demo")
    assert status == 1 and "0 green, 3 red" in text
    assert "not written yet: mine.py, line 2, in double" in text
    assert "not answered yet: time_ms" in text and "not answered yet: cause.first" in text
    assert "demo 15 min 0 green A demo Next: demo, 15 minutes" in typed()[1]
    write(demo, answers=ANSWERED.replace("One", "two"))
    first, second = (typed("check", "demo")[1] for _ in range(2))
    assert "predicted 8 ms, is too high" in first and "2 times" not in first
    assert "measured 4 ms: 2 times too high" in second
    typed("reset", "demo")
    write(demo)
    status, text = typed("check", "demo")
    assert status == 0 and "Passed: all 3 green" in text
    assert "predicted 8 ms, measured 4 ms: 2 times too high Because." in text
    status, text = typed("list")
    assert status == 0 and "1 of 1 passed demo 15 min passed" in text
    for _ in range(2):  # the second time nothing was written since
        status, text = typed("reset", "demo")
        assert status == 0 and (demo / "mine.py").read_text() == STARTER
        assert (demo / "mine.py.old").read_text() == RIGHT
    assert "0 of 1 passed" in typed()[1]


def test_a_name_without_a_command_gets_the_command(demo, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["demo"], demo.parents[2])
    assert capsys.readouterr().err.endswith("error: did you mean: check demo\n")


def test_hints_come_one_by_one(typed) -> None:
    assert "Multiply by 2. (1 more" in typed("hint", "demo")[1]
    for _ in range(2):
        text = typed("hint", "demo")[1]
        assert "Add it to itself." in text and "exercises/solutions/demo/" in text


NEEDS_A_GPU = 'def code(work):\n    raise NotOnThisMachine("no GPU")\n    yield\n\ndef time('


@pytest.mark.parametrize(
    ("changes", "words", "status", "message"),
    [
        ({}, ("check", "dmeo"), 2, "no exercise is called 'dmeo'; the nearest: demo"),
        ({"check.py": ("def time(", NEEDS_A_GPU)}, ("check", "demo"), 77, "machine: no GPU"),
        ({"README.md": ("15 minutes", "15 min")}, ("list",), 2, "it should begin with `# Title`"),
    ],
)
def test_what_cannot_be_done_is_one_message(changes, words, status, message, typed, demo) -> None:
    write(demo)
    for name, change in changes.items():
        text = (demo / name).read_text(encoding="utf-8")
        (demo / name).write_text(text.replace(*change, 1), encoding="utf-8")
    found, text = typed(*words)
    assert found == status and message in text


BROKEN = {
    "syntax": ("def double(x)\n    return x\n", "mine.py, line 1 is no Python: expected ':'"),
    "division": ("def double(x):\n    return 1 / 0\n", "mine.py, line 2, in double: ZeroDiv"),
    "nothing": ("def double(x):\n    x * 2\n", "yours is nothing (None), expected a tensor"),
    "dtype": ("def double(x):\n    return (2 * x).double()\n", "its dtype is torch.float64"),
    "shape": ("def double(x):\n    return 2 * x[0]\n", "its shape is (3,), expected (2, 3)"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_code_is_named_with_its_line(name, demo, monkeypatch) -> None:
    code, message = BROKEN[name]
    write(demo, mine=code)
    monkeypatch.setattr(sys, "path", [*sys.path])
    items = list(runner.check_here(Work(demo)))
    assert message in red(items)
    assert [item.ok for item in items] == [False, True, True]


ENDED = {
    "a loop": (
        "import time\nwhile True:\n    time.sleep(9)\n",
        r"mine.py, line [23]: still running after \d+ s",
    ),
    "a crash": (
        "import ctypes\ndef double(x):\n    ctypes.string_at(0)\n",
        "mine.py, line 3, in double: Python was ended by SIG",
    ),
    "a long file": (
        "import os\nprint('so far')\ndef double(x):\n    os.truncate(PLACE, 1 << 40)\n",
        "line 4, in double: OSError: .*too large",
    ),
}


@pytest.mark.parametrize("name", ENDED)
def test_code_that_ends_python_or_never_ends(name, demo, tmp_path) -> None:
    code, message = ENDED[name]
    (tmp_path / "long").touch()
    write(demo, mine=code.replace("PLACE", repr(str(tmp_path / "long"))))
    for limit_s in (4, 40, 400) if name == "a loop" else (HANGS_S,):
        outcome = runner.run(demo, results=demo, limit_s=limit_s)
        if "line" in red(outcome.items):  # in 4 s a busy machine has not come to the loop
            break
    assert not outcome.passed and re.search(message, red(outcome.items))
    assert outcome.printed == (["so far"] if name == "a long file" else [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time_ms = soon\n", "my_answers.toml: Invalid value (at line 1, column 11)"),
        ("time_ms = true\n[cause]\nfirst = 1\n", "line 3: cause.first should be a text in quotes"),
        ("[cause]\n", "time_ms is missing; `python -m workshop.exercises reset demo`"),
        ("\udcff", "can't be read, save it as UTF-8"),
    ],
)
def test_broken_answers_are_named_with_their_line(text, message, demo) -> None:
    write(demo)
    (demo / "my_answers.toml").write_bytes(text.encode("utf-8", errors="surrogateescape"))
    check = frame.import_file(demo / "check.py")
    items = list(Work(demo).each(check.time, check.cause))
    assert message in red(items)
    assert len({item.what for item in items}) == len(items)  # each is named once


def test_the_first_wrong_element_is_shown_beside_the_right_one() -> None:
    right = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0))
    wrong = right.clone()
    wrong[1, 4, 6] += 1
    wrong[2] = float("nan")
    item = first_difference(wrong, right, what="out", limit=1e-5)
    assert not item.ok
    lines = item.why.splitlines()
    assert lines[0] == "36 of 105 elements are wrong (34.3%); 35 are NaN"
    assert lines[1] == "first at [1, 4, 6]:"
    yours, expected = (float(line.split()[1]) for line in lines[2:])
    assert yours == pytest.approx(expected + 1, abs=1e-3)


ZERO_IN = torch.cat(
    [torch.zeros(1, 5), torch.randn(62, 5, generator=torch.Generator().manual_seed(0))]
)
INFINITE = ZERO_IN.where(ZERO_IN != 0, float("-inf"))


@pytest.mark.parametrize(
    ("yours", "right", "limit", "ok"),
    [
        (ZERO_IN + 1e-6, ZERO_IN, 1e-5, True),
        (ZERO_IN + 1e-4, ZERO_IN, 1e-5, False),
        (INFINITE.clone(), INFINITE, 1e-5, True),
        (ZERO_IN, INFINITE, 1e-5, False),
        (torch.tensor(3), torch.tensor(2), 0, False),
    ],
)
def test_rounding_is_no_difference(yours, right, limit, ok) -> None:
    assert first_difference(yours, right, what="out", limit=limit).ok == ok


@pytest.mark.parametrize(
    ("yours", "way"),
    [(1, "far too low"), (3, "too low"), (4.4, "a little too high"), (-1, "too low")],
)
def test_the_first_miss_of_a_finding_says_no_ratio(tmp_path, yours, way) -> None:
    (tmp_path / "my_answers.toml").write_text(f"x = {yours}")
    item = Found("x", "X", "", lambda _: 4.0, "H.").item(
        Answers(tmp_path / "my_answers.toml"), None
    )
    assert not item.ok and item.at_first == f"yours, {yours}, is {way}\nH."


def test_a_prediction_waits_for_the_findings(tmp_path) -> None:
    """The measured value would give them away."""
    name = "baseline_analysis"
    answers = with_answers(name, tmp_path, larger_part="")
    items = checked(name, answers=answers, results=solution(name)["results"])
    predicted = [item.why for item in items if item.what.startswith("predicted: ")]
    assert len(predicted) == 6
    assert all(why.endswith("compared when all else is answered") for why in predicted)


def test_progress_is_kept_and_a_broken_file_is_named(tmp_path) -> None:
    progress = Progress(tmp_path)
    progress.checked("a", 2, 3)
    progress.hinted("a")
    assert Progress(tmp_path)["a"].passed is None and Progress(tmp_path)["a"].hints == 1
    progress.checked("a", 3, 3)
    progress.checked("a", 1, 3)
    assert Progress(tmp_path)["a"].passed  # once is enough
    assert [path.name for path in (tmp_path / FILE).parent.iterdir()] == [FILE.name]
    for broken in ("{", '{"schema_version": 1, "exercises": {"a": {"checks": "many"}}}'):
        (tmp_path / FILE).write_text(broken)
        with pytest.raises(WorkshopError, match="delete the file to start again"):
            Progress(tmp_path)


def test_own_results_are_found_newest_first_and_reference_ones_are_not(tmp_path) -> None:
    content = stored_runs.reference()
    for name, created in (("old", "2030-01-01"), ("new", "2030-01-02")):
        stored_runs.write(tmp_path, content, name, created=created, session=name)
    stored_runs.write(tmp_path / "reference", content, "theirs", created="2031-01-01")
    stored_runs.write(tmp_path, content, "cut", status="interrupted")
    work = Work(tmp_path / "exercise", results=tmp_path)
    assert [run.session for run in work.runs("v1")] == ["new", "old"]
    assert [s.path.name for s in work.stored_runs("v1", session="old")] == ["old_v1_old.jsonl"]
    assert work.runs("v2") == [] and len(work.runs("v1", status="interrupted")) == 1
    assert Work(tmp_path, results=tmp_path / "nowhere").runs() == []
    assert work.profile("v1") is None


@pytest.mark.parametrize("folder", sheet.folders(), ids=lambda folder: folder.name)
def test_every_sheet_is_whole(folder) -> None:
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert len(sheet.read(folder).hints) >= 2
    assert [one.name for one in sheet.folders()].count(folder.name) == 1
    assert any((folder / given).is_file() for given in frame.COPIES)
    assert f"check {folder.name}" in text
    assert text.splitlines()[4].startswith("After this you can ")
    seen = text.partition("\n## What you should see\n\n<details>")[2]
    assert "H200" in seen and "</details>" in seen


def test_the_baseline_of_a_gpu_with_launches(tmp_path) -> None:
    """Twice the batch hardly takes longer there, and two runs may differ by more than 1.05x."""
    run = stored_runs.reference()
    times = [20.0] * len(run["step_ms"])
    for name, factor, batch in (("a", 1, 8), ("b", 1.1, 8), ("c", 1.15, 16)):
        changes = {"batch_size": batch, "step_ms": [factor * ms for ms in times]}
        kind = {"config_name": "small" if batch == 8 else "custom"}
        stored_runs.write(tmp_path, run, name, session=name, created=name, **changes, **kind)
    found = {
        "step_ms": 22,
        "tokens_per_s": 46545,
        "backward_over_forward": (
            statistics.median(run["backward_ms"]) / statistics.median(run["forward_ms"])
        ),
        "least_ms": 0.213,
        "runs_differ_percent": 10,
        "one_version_shows_1_05": "yes",
        "twice_the_batch": 1.045,
        "larger_part": "fixed",
    }
    answers = with_answers("baseline_analysis", tmp_path, **found)
    assert not red(checked("baseline_analysis", answers=answers, results=tmp_path))
    # A comparison's later runs of the same code skip the gate, and are newer.
    ungated = {"gate": {**run["gate"], "status": "not run"}, "step_ms": [99.0] * 9}
    later = {"session": "z", "created": "z"}
    stored_runs.write(tmp_path, run, "repeat", **ungated, **later)
    assert not red(checked("baseline_analysis", answers=answers, results=tmp_path))


def test_times_of_a_disturbed_baseline_are_not_judged(tmp_path) -> None:
    quiet = SOLUTIONS / "baseline_analysis" / "results" / "runs"
    for path in quiet.iterdir():
        newer = {"session": f"b{path.stem}", "created": "2099", "waited_share": 0.7}
        stored_runs.write(tmp_path, stored_runs.content(path), **newer)
    wrong = with_answers("baseline_analysis", tmp_path, step_ms=1.0, larger_part="fixed")
    items = checked("baseline_analysis", answers=wrong, results=tmp_path)
    assert not red(items) and "warning: other programs disturbed 3 of 3 runs" in shown(items)
    assert "larger part of a step's time: not judged" in shown(items)
    shutil.copytree(quiet, tmp_path / "quiet" / "runs")  # older ones, which count
    items = checked("baseline_analysis", answers=wrong, results=tmp_path)
    assert "disturbed" not in shown(items) and "the time of a step: yours, 1 ms" in red(items)
    uneven = stored_runs.lab_run(step_ms=[10.0, 10.0, 20.0, 20.0])
    (warning,) = disturbed([uneven, stored_runs.lab_run()])
    assert "the steps of 1 of 2 runs" in warning.what and not warning.counted


@pytest.mark.parametrize(
    ("factors", "device", "said"),
    [
        ((1, 1.6, 0.45), "cpu", "Twice the work can't take less time. Your two equal runs differ"),
        ((1, 1, 0.45), "cpu", "Twice the work can't take less time. Run"),
        ((1.3, 1, 1), "cpu", "Your two equal runs differ by 31%. Run the three again on a quiet"),
        ((1.3, 1, 0.45), "cuda", ""),
        ((1.2, 1, 1), "cpu", ""),
    ],
)
def test_times_that_contradict_each_other_are_not_judged(tmp_path, factors, device, said) -> None:
    """`factors`: of the later, the earlier and the doubled run's times."""
    quiet = sorted((SOLUTIONS / "baseline_analysis" / "results" / "runs").iterdir())
    earlier, later, doubled = map(stored_runs.content, quiet)
    for run, factor in zip((later, earlier, doubled), factors, strict=True):
        run["step_ms"] = [factor * ms for ms in run["step_ms"]]
        run["device"]["type"] = device
        stored_runs.write(tmp_path, run)
    wrong = with_answers("baseline_analysis", tmp_path, step_ms=1.0, larger_part="fixed")
    items = checked("baseline_analysis", answers=wrong, results=tmp_path)
    assert ("the time of a step: yours, 1 ms" in red(items)) == (not said)
    if said:
        assert said in shown(items) and not red(items)
        assert sum("not judged" in item.why for item in items) == 11


@pytest.mark.parametrize("fast", [0, 1, 2])
def test_a_run_that_beats_its_peak_is_said(tmp_path, fast) -> None:
    """`fast`: by its time; 1 is the later of the equal runs."""
    quiet = sorted((SOLUTIONS / "baseline_analysis" / "results" / "runs").iterdir())
    for number, run in enumerate(map(stored_runs.content, quiet)):
        run["peak_tflops"] /= 2 if number == fast else 1
        stored_runs.write(tmp_path, run)
    where = {**solution("baseline_analysis"), "results": tmp_path}
    items = checked("baseline_analysis", **where)
    assert "warning: 1 of 3 runs beat their peak" in shown(items)
    assert "no number is impossible" not in shown(items)
    assert ("the least time of a step: not judged" in shown(items)) == (fast == 1)


def test_the_bottleneck_of_a_gpu(tmp_path) -> None:
    """Idle time counts: products that are twice as fast win less than their share says."""
    recorded = stored_runs.REFERENCE / "nvidia_h200" / "profiles" / "v1" / "pytorch_profiler"
    for tool in ("pytorch_profiler", "batch_1"):
        folder = tmp_path / "profiles" / "v1" / tool
        shutil.copytree(recorded, folder)
        (folder / "command.txt").write_text("# run_pytorch_profiler.py\n")
    record = stored_runs.content(folder / "run.jsonl")
    (folder / "run.jsonl").write_text(stored_runs.lines(record | {"batch_size": 1}))
    found = {
        "calls_a_step": 2166,
        "hottest": "unrolled_elementwise_kernel<direct_copy_kernel_cuda>",
        "products_percent": 24.3,
        "passes_percent": 69.2,
        "idle_percent": 36.6,
        "products_twice_as_fast": 1 / (1 - 0.243 * 0.634 / 2),
        "passes_twice_as_fast": 1 / (1 - 0.692 * 0.634 / 2),
        "bound": "passes",
        "batch_1_calls": 1,
        "batch_1_call_time": 1,
    }
    name = "bottleneck_identification"
    answers = with_answers(name, tmp_path, **found)
    assert not red(checked(name, answers=answers, results=tmp_path))
    found |= {"products_twice_as_fast": 1 / (1 - 0.243 / 2), "bound": "products"}
    answers = with_answers(name, tmp_path, **found)
    items = checked(name, answers=answers, results=tmp_path)
    assert "idle time in it" in red(items) and "passes 69%" in red(items)

"""Every program's command line, typed wrong: one line on stderr, and nothing is trained.

Programs and flags are found, not listed: a new one is in these tests by itself.
"""

import argparse
import os
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import stored_runs
import torch

from labs.cifar10_roofline import loop as cifar_loop
from labs.cifar10_roofline import step as cifar_step
from labs.inference_benchmark import measure
from labs.inference_benchmark.modes import Variant
from workshop import errors, records
from workshop.arguments import count
from workshop.compare import runner
from workshop.exercises import sheet
from workshop.gate import parity
from workshop.results import RunResult
from workshop.run import trainer
from workshop.show import roofline_chart
from workshop.versions import PEERS, VERSIONS

ROOT = Path(__file__).resolve().parents[1]
INTERNAL = {
    "setup/environment_setup.py",  # environment_setup.sh starts it
    "workshop/exercises/runner.py",  # python -m workshop.exercises starts it
    "workshop/profilers/proton_app.py",  # run_proton.sh starts it
}
"""Programs that only other programs start."""


def programs() -> list[str]:
    """The Python files that can be started, below ROOT."""
    found = []
    for path in ROOT.glob("*/**/*.py"):
        name = path.relative_to(ROOT)
        if name.parts[0] == "tests" or any(part[0] == "." for part in name.parts):
            continue
        if "site-packages" in name.parts or name.name == "mine.py":
            continue
        # The versions' runners are links to the same files: version 1's stand for all.
        if name.parent.name == "runners" or (path.is_symlink() and "version1" not in name.parts[0]):
            continue
        if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8"):
            found.append(name.as_posix())
    return sorted(set(found) - INTERNAL)


PROGRAMS = programs()
LIKE_V1 = {
    version.path.relative_to(ROOT).as_posix()
    for version in (VERSIONS | PEERS).values()
    if version.key != "v1"
}
"""They have V1's command line."""
each_program = pytest.mark.parametrize(
    "program",
    [pytest.param(name, marks=pytest.mark.slow) if name in LIKE_V1 else name for name in PROGRAMS],
)
TRACE = str(ROOT / "tests/fixtures/profilers/kineto/h200_small_2layer_trace.json.gz")
NO_NAME = "no such name\x1b[31m"
"""Steers a terminal, too."""
BENCHMARK = "labs/inference_benchmark/micro_benchmarking_pytorch.py"
CPU_PROFILE = str(ROOT / "results/reference/cpu_amd_epyc/profiles/v4/pytorch_profiler")
NCU_CSV = str(ROOT / "tests/fixtures/profilers/ncu/ncu_raw_h200.csv")


class Accepted(BaseException):
    """The program would have begun its work."""


@pytest.fixture
def apart(monkeypatch, tmp_path) -> Iterator[Path]:
    """A folder with results and a baseline, where programs run in this process leave no trace."""
    monkeypatch.setattr(errors, "begin", lambda: None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for version in ("v1", "v4"):
        stored_runs.write(tmp_path / "runs", stored_runs.reference(version))
    for run in 5 * records.load_folder(tmp_path / "runs", RunResult):
        records.save(run, tmp_path / "baseline.jsonl")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def stop_where_work_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise Accepted

    for owner, name in (
        (trainer, "train"),
        (trainer, "Runner"),
        (parity, "check_model"),
        (measure, "make_bench"),
        (cifar_step, "build"),
        (sheet, "make_copies"),
        (subprocess.Popen, "__init__"),
        (ProcessPoolExecutor, "__init__"),
    ):
        monkeypatch.setattr(owner, name, stop)


def start(program: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    """Starts a program in this process; what it ends with."""
    monkeypatch.setattr(sys, "argv", [str(ROOT / program), *words])
    with monkeypatch.context() as m:
        try:
            if program.startswith("workshop/"):
                module = program.removesuffix(".py").replace("/", ".")
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            else:
                m.syspath_prepend(str((ROOT / program).parent))
                runpy.run_path(str(ROOT / program), run_name="__main__")
        except SystemExit as ended:
            return ended.code
    return None


def ended(program: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    """The end of a program that should not begin its work."""
    try:
        return start(program, words, monkeypatch)
    except Accepted:
        return "at work"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


class Found(Exception):
    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def parser_of(program: str, monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    def give(self: argparse.ArgumentParser, *_: object) -> None:
        raise Found(self)

    with monkeypatch.context() as m:
        m.setattr(argparse.ArgumentParser, "parse_known_args", give)
        try:
            status = start(program, first_words(program), m)
        except Found as found:
            return found.parser
    if status == errors.NOT_ON_THIS_MACHINE:
        pytest.skip("something that it needs is missing here")
    pytest.fail(f"{program} parses no command line")


def first_words(program: str) -> list[str]:
    return ["5"] if program.endswith("/repairs.py") else []


def cases(parser: argparse.ArgumentParser, before: list[str]) -> Iterator[tuple[list[str], str]]:
    """Command lines that are wrong in one word, and the flag or word that an error names: a flag
    that the program does not have; a wrong value of each argument that is no text and no path."""
    yield [*before, "--no-such-flag"], "no-such-flag"
    for action in parser._actions:
        flag = list(action.option_strings[-1:])
        name = (flag or [action.metavar or action.dest])[-1].lstrip("-").replace("_", "-").lower()
        size = action.nargs if isinstance(action.nargs, int) else 1
        if isinstance(action, argparse._SubParsersAction):
            yield [*before, NO_NAME], name
            for key, sub in action.choices.items():
                yield from cases(sub, [*before, key])
        elif action.choices and action.help is not argparse.SUPPRESS:
            yield [*before, *flag, *(size * [NO_NAME])], name
        elif action.nargs != 0 and action.type not in (None, Path, str):
            for value in ("text", "", *(["0", "1e23"] if action.type is count else [])):
                yield [*before, *flag, *(size * [value])], name


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")  # of runpy's
@each_program
def test_what_is_typed_wrong_is_refused_in_a_line(program, apart, monkeypatch, capsys) -> None:
    parser, problems = parser_of(program, monkeypatch), []
    stop_where_work_begins(monkeypatch)
    for line, name in cases(parser, first_words(program)):
        capsys.readouterr()
        status = ended(program, line, monkeypatch)
        *usage, last = capsys.readouterr().err.splitlines() or [""]
        named = name in last.replace("_", "-").lower() or "required" in last
        shown = all(text.startswith(("usage:", " ")) for text in usage)
        if status != errors.WRONG_USAGE or not shown or not named or "\x1b" in last:
            problems.append(f"{line} ended with {status}: {[*usage, last]}")
    assert not problems, "\n".join(problems)


COMPARE, SWEEP = "analysis_tools/compare_versions.py", "--device cpu --sweep"
ROOFLINE, REGRESSION = "analysis_tools/roofline_analysis.py", "analysis_tools/regression_tester.py"
MACHINE = "workshop/classroom/check_machine.py"
TOGETHER = [
    (COMPARE, "--device cpu --precision fp32 fp16", "precision fp16: the CPU does not have it"),
    (COMPARE, "--from-results empty", "no result files"),
    (COMPARE, "--from-results runs --config large", "no runs of the --vers"),
    (COMPARE, "--from-results cut", "cut.jsonl: line 1: no valid JSON"),
    (COMPARE, "--waterfall --sweep seq-len 1", "give one of them"),
    (COMPARE, "--waterfall --versions v3", "--versions: name a waterfall's end"),
    (COMPARE, "--waterfall v4 v9 --from-results runs", "--waterfall v9: choose from v4, v3"),
    (COMPARE, "--waterfall --from-results runs", "no waterfall: V1 at fp32"),
    (COMPARE, f"{SWEEP} seq-len 8 16 --jobs 2", "--jobs: no more than 1"),
    (COMPARE, f"{SWEEP} seq-len 128", "--sweep seq-len: give two sizes or more"),
    (COMPARE, f"{SWEEP} hidden-dim 64 100", "must be a multiple of 64"),
    (COMPARE, "--sweep seq-len --from-results runs", "no sweep over seq-len"),
    (ROOFLINE, "", "nothing to show: give a PATH"),
    (ROOFLINE, f"{NCU_CSV} --chip Abacus", "--chip Abacus: not listed; known"),
    (ROOFLINE, TRACE, "bytes and operations of each kernel need counters"),
    (ROOFLINE, CPU_PROFILE, "bytes and operations of each kernel need counters"),
    (ROOFLINE, "runs --config huge", "no run is huge"),
    (ROOFLINE, f"{NCU_CSV} {CPU_PROFILE}", "a roofline is of one device"),
    (REGRESSION, "check --baseline baseline.jsonl --from-results runs --junit .", ". is a folder"),
    (REGRESSION, "baseline save --baseline b.json --repeats 1", "--repeats 1: the scatter between"),
    (MACHINE, "--collect empty", "no machine's file in it"),
]
"""Programs, words that are right in themselves, and what the answer must say."""


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@pytest.mark.parametrize(("program", "words", "message"), TOGETHER)
def test_what_does_not_go_together_is_refused_in_a_line(
    program, words, message, apart, monkeypatch, capsys
) -> None:
    (apart / "empty").mkdir()
    (apart / "cut").mkdir()
    (apart / "cut" / "cut.jsonl").write_text('{"schema_version": 1, "vers')
    before = set(apart.rglob("*"))
    stop_where_work_begins(monkeypatch)
    status, printed = ended(program, words.split(), monkeypatch), capsys.readouterr()
    if status == errors.NOT_ON_THIS_MACHINE:
        pytest.skip("something that it needs is missing here")
    assert (status, printed.out) == (errors.WRONG_USAGE, ""), printed.err
    *usage, line = printed.err.splitlines()
    assert "error: " in line and message in line
    assert not usage or usage[0].startswith("usage: ")
    assert set(apart.rglob("*")) == before


class Reached(BaseException):
    """A program has called what a flag is for."""

    def __init__(self, given: list[Any]) -> None:
        self.given = given


SMALL_V1 = "--device cpu --hidden-dim 64 --num-heads 4 --num-kv-heads 2 --vocab-size 256"
SHORT_V1 = "--num-layers 1 --batch-size 1 --seq-len 8"
DIGITS = "--dataset digits --device cpu --epochs 1 --batch-size 64 --out-dir weights"
OUT = "--output-dir out"
REACHES = [
    (
        BENCHMARK,
        f"--network resnet18 --precision bf16 --channels-last --fold-norms --fuse-relus {OUT}",
        (measure, "make_bench"),
        lambda _, variant, *__: (
            variant == Variant("bf16", channels_last=True, fold=True, fuse=True)
        ),
    ),
    (
        "labs/cifar10_roofline/train.py",
        f"{DIGITS} --warmup 3 --label-smoothing 0.25 {OUT}",
        (cifar_loop, "Problem"),
        lambda schedule, smoothing, *_: (schedule.warmup, smoothing) == (3, 0.25),
    ),
    (
        "analysis_tools/regression_tester.py",
        "baseline save --baseline a.json --precision bf16 --warmup-steps 3 --seed 5 --jobs 2",
        (runner, "plan"),
        lambda a: (a.precision, a.warmup_steps, a.seed, a.jobs) == (["bf16"], 3, 5, 2),
    ),
    (
        "analysis_tools/roofline_analysis.py",
        f"runs --top 3 {OUT}",
        (roofline_chart, "draw"),
        lambda *_, labels: labels == 3,
    ),
    (
        "version1_pytorch_baseline/run_pytorch_profiler.py",
        f"--stacks --steps 1 {OUT} -- {SMALL_V1} {SHORT_V1}",
        (torch.profiler, "profile"),
        lambda with_stack, **_: with_stack,
    ),
]
"""Programs, flags, and what is called with their values."""


@pytest.mark.parametrize(
    ("program", "flags", "called", "right"), REACHES, ids=[f"{p} {w}" for p, w, *_ in REACHES]
)
def test_a_flag_reaches_what_it_is_for(program, flags, called, right, apart, monkeypatch) -> None:
    def reach(*given: Any, **named: Any) -> None:
        raise Reached([given, named])

    monkeypatch.setattr(*called, reach)
    with pytest.raises(Reached) as reached:
        assert start(program, flags.split(), monkeypatch) == errors.NOT_ON_THIS_MACHINE
        pytest.skip("something that it needs is missing here")
    given, named = reached.value.given
    assert right(*given, **named)


@pytest.mark.parametrize(
    ("program", "needs"),
    [
        ("labs/scale_out/train.py", ""),
        ("labs/text_generation/lm_gen.py", "--model_path model --input_file prompts"),
    ],
)
def test_the_flag_of_deepspeed_s_launcher_is_taken(program, needs, monkeypatch) -> None:
    parser = parser_of(program, monkeypatch)
    assert parser.parse_known_args([*needs.split(), "--local_rank=1"])[1] == []


INTERRUPT = """
import signal, subprocess, sys

FIRST = ("", "errors", "needed", "run", "run.waiting")

class Finder:
    def find_spec(self, name, *_):
        top, _, rest = name.partition(".")
        if sys.argv[0] == "-m":  # Python looks for the program
            return
        if top == "torch" or (top == "workshop" and rest not in FIRST):
            interrupt()

def interrupt(*_, **__):
    signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Finder())
subprocess.Popen.__init__ = interrupt
"""
"""A sitecustomize.py: Ctrl-C as soon as the program imports what may take seconds, or starts a
process."""


@each_program
def test_ctrl_c_is_quiet_from_the_first_import_on(program, tmp_path) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPT)
    ended = subprocess.run(
        command(program),
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ended.returncode, ended.stdout) == (errors.INTERRUPTED, ""), ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1, ended.stderr


def command(program: str, *words: str) -> list[str]:
    """As it is typed."""
    if not program.startswith("workshop/"):
        return [sys.executable, str(ROOT / program), *words]
    name = program.removesuffix(".py").removesuffix("/__main__").replace("/", ".")
    return [sys.executable, "-m", name, *words]


def test_a_program_of_another_checkout_is_refused(type_command, tmp_path) -> None:
    """Its numbers would be this one's."""
    (tmp_path / "workshop").mkdir()
    (tmp_path / "workshop" / "versions.py").touch()
    program = shutil.copy(ROOT / "analysis_tools" / "compare_versions.py", tmp_path)
    done = type_command("python", program, "--help", PYTHONPATH=str(ROOT))
    assert done.returncode == errors.WRONG_USAGE
    assert f"is {tmp_path}'s, but Python finds the workshop in {ROOT}: " in done.stderr

"""rocprofv3's commands and tables: each answer against what the script prints on this machine, or
against the tables in made_up_run/, read by workshop.profilers."""

import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from workshop.errors import WorkshopError
from workshop.exercises.frame import Item, Work, judged
from workshop.exercises.predict import Chosen, Found, Predicted, ask, prediction
from workshop.profilers import rocprofv3
from workshop.profilers.categories import CATEGORIES
from workshop.profilers.reading import CsvTable, Problems
from workshop.profilers.table import Kernel, KernelTable
from workshop.run import chips
from workshop.versions import VERSIONS

FOLDER = Path(__file__).parent
TABLES = FOLDER / "made_up_run"
SCRIPT = VERSIONS["v2"].path.parent / "run_rocprofv3.sh"
SCRIPTS = ("run_rocprofv3.sh", "run_rocprof_sys.sh", "run_rocprof_compute.sh")
FOR_THE_HOST = "run_rocprof_sys.sh"
NOT_COMPARED = "the script has chosen no counters for this machine's GPU: not compared"
CSV_FLAGS = ("--output-format csv", "--output-format=csv", "-f csv")
TRACES = ("--kernel-trace", "--hip-trace", "--runtime-trace", "--sys-trace", "-r", "-s")
WITHIN = 0.02
"""Of a rate or a share: room for the digits that `show` prints."""


def check(work: Work) -> Iterator[Item]:
    yield from work.each(
        *(_predict_counter_runs, _csv_flag, _separator, _counter_runs, _read_counter, _command),
        *(_hottest_kernel, _hottest_calls, _idle),
    )
    yield from ask(work, lambda _: _table(), QUESTIONS)
    yield from work.each(_fastest_mover, _fastest_gbs, _spilling_kernel)


# --- the commands --------------------------------------------------------------------------------


@cache
def _printed_commands() -> list[list[str]]:
    """What the script would run here, in words.

    Raises:
        WorkshopError: it can't be run.
    """
    try:
        answer = subprocess.run(
            ["bash", str(SCRIPT), "--dry-run"],
            capture_output=True,
            text=True,
            timeout=200,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise WorkshopError(f"{SCRIPT.name} --dry-run can't be run here: {error}") from None
    lines = [line for line in answer.stdout.splitlines() if not line.startswith("#")]
    return [words for words in map(shlex.split, lines) if words and words[0] == "rocprofv3"]


def _counters() -> list[list[str]]:
    """The names after --pmc, a list for each run under counters."""
    return [_values(words, "--pmc") for words in _printed_commands() if "--pmc" in words]


def _values(words: list[str], *options: str) -> list[str]:
    """The words after an option, up to the next one; none without it."""
    start = next((index for index, word in enumerate(words) if word in options), None)
    if start is None:
        return []
    rest = words[start + 1 :]
    end = next((index for index, word in enumerate(rest) if word.startswith("-")), len(rest))
    return rest[:end]


def _predict_counter_runs(work: Work) -> Iterator[Item]:
    predicted, what = work.answers().number("predict_counter_runs"), "predicted: runs for counters"
    if not _counters():
        yield Item(True, what, NOT_COMPARED)
        return
    yield prediction(
        what,
        predicted,
        len(_counters()),
        "",
        why="The chip has few counters at a time, 8 of the shaders and 4 of the L2 cache: each "
        "group costs a whole run, start-up and warm-up included. So profile few steps.",
    )


def _csv_flag(work: Work) -> Iterator[Item]:
    answer = " ".join(work.answers().text("csv_flag").split())
    why = "the option and the word after it; all commands in commands.txt but one ask for formats"
    yield judged(answer in CSV_FLAGS, "the option for CSV files", f"{answer!r}: {why}")


def _separator(work: Work) -> Iterator[Item]:
    answer = work.answers().text("separator")
    why = f"{answer!r} is not what comes before `python` in every command"
    yield judged(answer == "--", "what separates the tool from the program", why)


def _counter_runs(work: Work) -> Iterator[Item]:
    counted = work.answers().number("counter_runs")
    why = f"you counted {counted:g}: each command of the dry run that has --pmc is one"
    yield judged(counted == len(_counters()), "runs under counters", why)


def _read_counter(work: Work) -> Iterator[Item]:
    answer = work.answers().text("read_counter")
    what = "the counter of the bytes read"
    if not _counters():
        yield Item(True, what, NOT_COMPARED)
        return
    why = f"{answer!r} is not in the first --pmc command, whose folder is counters/read"
    yield judged(answer.upper() in _counters()[0], what, why)


def _command(work: Work) -> Iterator[Item]:
    lines = (FOLDER / "commands.txt").read_text(encoding="utf-8").splitlines()
    commands = {letter: words for letter, *words in map(shlex.split, lines)}
    letter = work.answers().choice("command", tuple(commands))
    fault = _fault(commands[letter])
    yield judged(fault is None, f"command {letter}", f"{fault}")


def _fault(words: list[str]) -> str | None:
    """Why a command leaves no kernel_stats.csv with ROCm 7; None if it does leave one."""
    if "--" not in words:
        return "nothing separates rocprofv3's options from the program: it stops at `python`"
    options = words[: words.index("--")]
    formats = _values(options, "--output-format", "-f")
    if any("," in one for one in formats):
        return "formats are separated by spaces; rocprofv3 refuses the comma"
    if not any(trace in options for trace in TRACES):
        return "--stats sums up a trace, and no trace is requested: rocprofv3 refuses it"
    if "csv" not in formats:
        return (
            "it runs, and leaves a database: that is the default since ROCm 7.0, and --stats has "
            "no effect on it"
        )
    return None


# --- the tables ----------------------------------------------------------------------------------


@cache
def _table() -> KernelTable:
    return rocprofv3.read(TABLES)


def _steps() -> int:
    steps = _table().steps
    assert steps
    return steps


def _hottest_kernel(work: Work) -> Iterator[Item]:
    yield _names(work, "hottest_kernel", "the hottest kernel", _table().kernels[0])


def _hottest_calls(work: Work) -> Iterator[Item]:
    answer, kernel = work.answers().number("hottest_calls_a_step"), _table().kernels[0]
    why = f"yours is {answer:g}; `show` has {kernel.calls} calls, in {_steps()} steps"
    sums = next(TABLES.rglob("*_kernel_stats.csv"))
    table = CsvTable(sums, Problems(sums))
    name, calls = table.index("Name"), table.index("Calls")
    whole_run = next(int(row[calls]) for _, row in table.rows() if row[name] == kernel.name)
    if answer in (whole_run, whole_run / _steps()):
        why = (
            f"{sums.name} has {whole_run} calls, of the whole run: rocprofv3 watches the "
            "warm-up too. `show` leaves out what is outside of the marked steps"
        )
    right = answer == kernel.calls / _steps()
    yield judged(right, "its calls a step", why)


def _idle(work: Work) -> Iterator[Item]:
    answer, line = work.answers().number("idle_percent"), _table().timeline
    assert line
    idle = 100 * line.idle_ns / line.span_ns
    why = f"yours is {answer:g}: `show` has the ms in which the GPU was busy, and of how many"
    yield judged(abs(answer - idle) <= 100 * WITHIN / 2, "the GPU's idle share", why)


def _fastest() -> Kernel:
    return max(_table().kernels, key=_gbs)


def _gbs(kernel: Kernel) -> float:
    return (kernel.bytes or 0.0) / kernel.total_ns


QUESTIONS: tuple[Found[KernelTable] | Chosen[KernelTable], ...] = (
    Chosen(
        "script_for_the_host",
        "the script for the host's threads",
        SCRIPTS,
        lambda _: FOR_THE_HOST,
        lambda yours: f"{yours} looks at kernels; docs/profilers.md has a line for each question",
    ),
    Found(
        "kernels_a_step",
        "kernels a step",
        "",
        lambda table: table.launches / _steps(),
        "The line below the table of `show` has them, for each step.",
        within=0,
    ),
    Chosen(
        "category",
        "what takes most of the time",
        tuple(CATEGORIES),
        lambda table: next(iter(table.category_ns())),
        "it is not the first in the line 'by category' of `show`",
    ),
    Predicted(
        "predict_gbs",
        "predicted: GB/s of an element-wise kernel",
        "GB/s",
        lambda _: _gbs(_fastest()),
        "No kernel reaches the data sheet's number: on an H200 a plain copy moved 4,195 GB/s of "
        "4,800 (results/reference/nvidia_h200/ceilings). So this one is near the end, and only "
        "fewer bytes make it faster: that is what fusing does.",
        within=0.1,
    ),
)


def _fastest_mover(work: Work) -> Iterator[Item]:
    yield _names(work, "fastest_mover", "the kernel that moves most a second", _fastest())


def _fastest_gbs(work: Work) -> Iterator[Item]:
    answer, right = work.answers().number("fastest_gbs"), _gbs(_fastest())
    why = f"yours is {answer:,.0f}: bytes read and written over the time, GB/s are bytes a ns"
    counted = {kernel.name: kernel for kernel in rocprofv3.read(TABLES / "counters").kernels}
    if _is_near(answer, _gbs(counted[_fastest().name])):
        why = (
            "these are the times of the run under counters, where every kernel takes longer: "
            "bytes come from there, times from hotspots/"
        )
    peaks = chips.find_peaks("MI300X")
    assert peaks
    share = f"{right / peaks.bandwidth_gbs:.0%} of the {peaks.bandwidth_gbs:,.0f} of the data sheet"
    if _is_near(answer, right):
        yield Item(True, f"its rate: {right:,.0f} GB/s", f"{share}, if the numbers were real")
    else:
        yield Item(False, "its rate", why)


def _is_near(answer: float, right: float) -> bool:
    return abs(answer - right) <= WITHIN * right


def _spilling_kernel(work: Work) -> Iterator[Item]:
    path = next(TABLES.rglob("*_kernel_trace.csv"))
    table = CsvTable(path, Problems(path))
    name, scratch = table.index("Kernel_Name"), table.index("Scratch_Size")
    spilling = {row[name] for _, row in table.rows() if float(row[scratch]) > 0}
    right = next(kernel for kernel in _table().kernels if kernel.name in spilling)
    yield _names(work, "spilling_kernel", "the kernel that spills", right)


def _names(work: Work, key: str, what: str, right: Kernel) -> Item:
    """Whether an answer names a kernel, by a part of the name that no other kernel has."""
    answer = work.answers().text(key)
    found = [k.name for k in _table().kernels if answer.casefold() in k.name.casefold()]
    if len(found) != 1:
        how_many = f"{len(found)} kernels have" if found else "no kernel has"
        return Item(False, what, f"{how_many} {answer!r} in the name: write more of it")
    return judged(found[0] == right.name, what, f"{found[0]} is not it")

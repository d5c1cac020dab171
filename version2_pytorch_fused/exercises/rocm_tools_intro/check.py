"""rocprofv3's commands and tables: each answer against what the script prints on this machine, or
against the tables in made_up_run/, read by workshop.profilers."""

import csv
import shlex
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from workshop.errors import WorkshopError
from workshop.exercises.frame import Item, Work
from workshop.exercises.predict import Chosen, Found, NotCompared, Predicted, Question, Written, ask
from workshop.profilers import rocprofv3
from workshop.profilers.categories import CATEGORIES
from workshop.profilers.table import Kernel, KernelTable
from workshop.run import chips
from workshop.versions import VERSIONS

TABLES = Path(__file__).parent / "made_up_run"
SCRIPT = VERSIONS["v2"].path.parent / "run_rocprofv3.sh"
SCRIPTS = ("run_rocprofv3.sh", "run_rocprof_sys.sh", "run_rocprof_compute.sh")
FOR_THE_HOST = "run_rocprof_sys.sh"
CSV_FLAGS = ("--output-format csv", "--output-format=csv", "-f csv")
COMMANDS = {
    "A": "--stats sums up a trace, and no trace is requested: rocprofv3 refuses it",
    "B": "formats are separated by spaces; rocprofv3 refuses the comma",
    "C": "nothing separates rocprofv3's options from the program: it stops at `python`",
    "D": "it runs, and leaves a database: that is the default since ROCm 7.0, and --stats has no "
    "effect on it",
    "E": "",
}
"""Why each command of commands.txt leaves no kernel_stats.csv with ROCm 7; "" if it does."""


def check(work: Work) -> Iterator[Item]:
    return ask(work, lambda _: _table(), QUESTIONS)


@cache
def _counters() -> list[list[str]]:
    """The counters' names in the script's commands, a list for each run with --pmc.

    Raises:
        WorkshopError: the script can't be run.
    """
    command = ["bash", str(SCRIPT), "--dry-run"]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise WorkshopError(f"{SCRIPT.name} --dry-run can't be run here: {error}") from None
    found = []
    for line in printed.stdout.splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["rocprofv3"] and "--pmc" in words:
            rest = words[words.index("--pmc") + 1 :]
            ends = [index for index, word in enumerate(rest) if word.startswith("-")]
            found.append(rest[: ends[0]] if ends else rest)
    return found


def _chosen() -> list[list[str]]:
    if not _counters():
        raise NotCompared("the script has chosen no counters for this machine's GPU: not compared")
    return _counters()


@cache
def _table() -> KernelTable:
    return rocprofv3.read(TABLES)


def _steps() -> int:
    steps = _table().steps
    assert steps
    return steps


def _rows(table: str) -> list[dict[str, str]]:
    with next(TABLES.rglob(f"*_{table}.csv")).open(newline="") as file:
        return list(csv.DictReader(file))


def _calls_of_the_whole_run(kernel: Kernel) -> int:
    """As rocprofv3 sums them up, the warm-up included."""
    return next(int(row["Calls"]) for row in _rows("kernel_stats") if row["Name"] == kernel.name)


def _spilling(table: KernelTable) -> Kernel:
    rows = _rows("kernel_trace")
    spilling = {row["Kernel_Name"] for row in rows if float(row["Scratch_Size"]) > 0}
    return next(kernel for kernel in table.kernels if kernel.name in spilling)


def _idle_percent(table: KernelTable) -> float:
    assert table.timeline
    return 100 * table.timeline.idle_ns / table.timeline.span_ns


def _fastest(table: KernelTable) -> Kernel:
    return max(table.kernels, key=_gbs)


def _gbs(kernel: Kernel) -> float:
    return (kernel.bytes or 0.0) / kernel.total_ns


def _fastest_gbs_under_counters(table: KernelTable) -> float:
    counted = {kernel.name: kernel for kernel in rocprofv3.read(TABLES / "counters").kernels}
    return _gbs(counted[_fastest(table).name])


def _of_the_data_sheet(table: KernelTable) -> str:
    gbs, peaks = _gbs(_fastest(table)), chips.find_peaks("MI300X")
    assert peaks
    share, most = gbs / peaks.bandwidth_gbs, peaks.bandwidth_gbs
    return f"{gbs:,.0f} GB/s, {share:.0%} of the {most:,.0f} of the data sheet, if they were real"


def _named(key: str, what: str, right: Callable[[KernelTable], Kernel]) -> Written[KernelTable]:
    """Question for a kernel, by a part of its name that no other kernel has."""

    def fault(table: KernelTable, text: str) -> str:
        found = [k.name for k in table.kernels if text.casefold() in k.name.casefold()]
        if len(found) != 1:
            how_many = f"{len(found)} kernels have" if found else "no kernel has"
            return f"{how_many} {text!r} in the name: write more of it"
        return "" if found[0] == right(table).name else f"{found[0]} is not it"

    return Written(key, what, fault)


QUESTIONS: tuple[Question[KernelTable], ...] = (
    Predicted(
        "predict_counter_runs", "predicted: runs for counters", "", lambda _: len(_chosen()),
        "The chip has few counters at a time, 8 of the shaders and 4 of the L2 cache: each group "
        "costs a whole run, start-up and warm-up included. So profile few steps.",
    ),
    Written(
        "csv_flag", "the option for CSV files",
        lambda _, text: "" if " ".join(text.split()) in CSV_FLAGS else "the option and the word "
        "after it; all commands in commands.txt but one ask for formats",
    ),
    Written(
        "separator", "what separates the tool from the program",
        lambda _, text: "" if text == "--" else f"{text!r} is not what comes before `python` in "
        "every command",
    ),
    Found(
        "counter_runs", "runs under counters", "", lambda _: len(_counters()),
        "each command of the dry run that has --pmc is one", within=0,
    ),
    Written(
        "read_counter", "the counter of the bytes read",
        lambda _, text: "" if text.upper() in _chosen()[0] else f"{text!r} is not in the first "
        "--pmc command, whose folder is counters/read",
    ),
    Chosen(
        "command", "the command that leaves kernel_stats.csv", COMMANDS,
        lambda _: [letter for letter, fault in COMMANDS.items() if not fault],
    ),
    Chosen(
        "script_for_the_host", "the script for the host's threads", SCRIPTS,
        lambda _: FOR_THE_HOST,
        "it looks at kernels; docs/profilers.md has a line for each question",
    ),
    _named("hottest_kernel", "the hottest kernel", lambda table: table.kernels[0]),
    Found(
        "hottest_calls_a_step", "its calls a step", "",
        lambda table: table.kernels[0].calls / _steps(),
        lambda table: f"`show` has {table.kernels[0].calls} calls, in {_steps()} steps", within=0,
        slips=lambda table: [
            (_calls_of_the_whole_run(table.kernels[0]) / steps, "kernel_stats.csv has those of "
            "the whole run: rocprofv3 watches the warm-up too. `show` leaves out what is outside "
            "of the marked steps") for steps in (1, _steps())
        ],
    ),
    Found(
        "kernels_a_step", "kernels a step", "", lambda table: table.launches / _steps(),
        "The line below the table of `show` has them, for each step.", within=0,
    ),
    Found(
        "idle_percent", "the GPU's idle share", "%", _idle_percent,
        "`show` has the ms in which the GPU was busy, and of how many", within=0, margin=1,
    ),
    Chosen(
        "category", "what takes most of the time", tuple(CATEGORIES),
        lambda table: next(iter(table.category_ns())),
        "it is not the first in the line 'by category' of `show`",
    ),
    Predicted(
        "predict_gbs", "predicted: GB/s of an element-wise kernel", "GB/s",
        lambda table: _gbs(_fastest(table)),
        "No kernel reaches the data sheet's number: on an H200 a plain copy moved 4,195 GB/s of "
        "4,800 (results/reference/nvidia_h200/ceilings). So this one is near the end, and only "
        "fewer bytes make it faster: that is what fusing does.", within=0.1,
    ),
    _named("fastest_mover", "the kernel that moves most a second", _fastest),
    Found(
        "fastest_gbs", "its rate", "GB/s", lambda table: _gbs(_fastest(table)),
        "bytes read and written over the time, GB/s are bytes a ns", within=0.02,
        slips=lambda table: [(
            _fastest_gbs_under_counters(table), "these are the times of the run under counters, "
            "where every kernel takes longer: bytes come from there, times from hotspots/",
        )], note=_of_the_data_sheet,
    ),
    _named("spilling_kernel", "the kernel that spills", _spilling),
)  # fmt: skip

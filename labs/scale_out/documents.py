"""The tables of scaling, for the terminal and for the lab's README: `make docs` writes those of
results/reference/ between its markers."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from labs.scale_out import collectives
from labs.scale_out.request import LAB
from workshop import labs, tables
from workshop.labs import LabRow, LabRun
from workshop.run.timing import median
from workshop.show import lab_table
from workshop.tables import Line, Table, number

README = Path(__file__).with_name("README.md")
COMMAND = "python measure.py --jobs 2"
TRAIN = "train.py"
WORDS = ("model", "training", "scaling", "verdict", "commit")
"""Columns of words; the others have numbers."""
OF_A_SESSION = ("training", "processes", "scaling", "batch each", "ms a step", "efficiency [95%]",
                "GB a GPU", "communication", "hidden", "compile s", "verdict")  # fmt: skip
OF_ALL = ("model", "training", "processes", "scaling", "batch each", "ms of one process",
          "ms a step", "efficiency [95%]", "GB a GPU", "communication", "hidden", "verdict",
          "commit")  # fmt: skip
NOTES = (
    "efficiency: tokens per second of n processes, divided by n times those of one process of the "
    "same training",
    "scaling: weak, each process has the batch that one has alone; strong, they share it; a batch "
    "is in sequences",
    "communication: share of a profiled step during which it runs, including waits for other "
    "processes; hidden: the part of it during which computation runs too",
    "compile: what torch.compile and Triton took before the first fast step; less where an earlier "
    "process has left its results in their caches",
)


def parts(runs: Iterable[LabRun]) -> dict[Path, dict[str, str]]:
    """The text between the markers, from runs of any labs."""
    found = sorted(sessions(runs).items())
    shown = [summary(*its) for its in found]
    rows = [row for _, sessions in found for session in sessions for row in session]
    shown = [table for table in (*shown, collectives.table(rows)) if table.lines]
    if not shown:
        return {README: {"scaling": lab_table.not_measured(COMMAND)}}
    return {README: {"scaling": tables.markdown(shown, "####")}}


def sessions(runs: Iterable[LabRun]) -> dict[str, list[list[LabRow]]]:
    """The rows of measure.py and collectives.py, by device: a list for each session, in order."""
    by_session = defaultdict(list)
    for run in runs:
        if run.lab == LAB and run.parent_command[:1] != [TRAIN]:  # one alone is not part of a study
            by_session[run.session].append(run)
    found = defaultdict(list)
    for session in sorted(by_session):
        for rows in labs.newest(by_session[session]):
            found[rows[0].device].append(rows)
    return found


def tables_of(rows: Sequence[LabRow]) -> list[Table]:
    """The tables of a session's rows that are not empty: one for each subject, sorted by training,
    in the order of first runs, then by processes, weak before strong; and the collectives'."""
    by_subject = defaultdict(list)
    for row in rows:
        if row.first.unit == "tokens" and row.first.status != "skipped":
            by_subject[row.first.subject].append(row)
    found = []
    for subject, its in by_subject.items():
        names = list(dict.fromkeys(map(training_of, its)))
        places = [(names.index(training_of(r)), r.first.processes, -sequences(r)) for r in its]
        ordered = [its[i] for i in sorted(range(len(its)), key=places.__getitem__)]
        lines = [
            Line([cells(row, its)[name] for name in OF_A_SESSION], "red" if row.failed else None,
                 training_of(row))
            for row in ordered
        ]  # fmt: skip
        title = f"{LAB}: {subject}, {its[0].device}"
        found.append(Table(title, OF_A_SESSION, lines, NOTES, _left(OF_A_SESSION), wraps=(0, 5)))
    return [one for one in (*found, collectives.table(rows)) if one.lines]


def summary(device: str, sessions: Iterable[Sequence[LabRow]]) -> Table:
    """The newest row of each training, number of processes and scaling, of one device.
    A row's one process is from the same session."""
    newest: dict[tuple[str, str, int, str], Line] = {}
    for rows in sessions:
        for row in rows:
            run = row.first
            if run.unit != "tokens" or run.processes == 1 or run.status == "skipped":
                continue
            its = cells(row, [one for one in rows if one.first.subject == run.subject])
            key = its["model"], its["training"], run.processes, its["scaling"]
            newest[key] = Line([its[name] for name in OF_ALL])
    return Table(device, OF_ALL, [newest[key] for key in sorted(newest)], left=_left(OF_ALL))


def _left(columns: Sequence[str]) -> tuple[int, ...]:
    return tuple(i for i, name in enumerate(columns) if name in WORDS)


def training_of(row: LabRow) -> str:
    run = row.first
    version, strategy = run.options["version"], run.options["strategy"]
    # One process of ddp does what the version does, whatever it is compared with.
    graph = run.options.get("cuda_graph") and (run.processes > 1 or strategy == "fsdp")
    return f"{version}, {strategy}" + ", graph" * bool(graph)


def sequences(row: LabRow) -> int:
    """The batch size of each process."""
    return int(row.first.metrics["sequences"] or 0)


def efficiency(row: LabRow) -> str:
    """Tokens per second, divided by n times those of one process, with its 95% interval; "-" if
    either has no times."""
    if row.speedup is None:
        return "-"
    value, *bounds = (
        100 * ratio / row.first.processes
        for ratio in (row.speedup.value, *(row.speedup.interval or ()))
    )
    interval = f"[{bounds[0]:.1f}, {bounds[1]:.1f}]" if bounds else "(one run)"
    return f"{value:.1f}% {interval}"


def cells(row: LabRow, rows: Iterable[LabRow]) -> dict[str, str]:
    """A row's cells by column; its one process is one of `rows`."""
    run, memory = row.first, row.peak_memory_mb
    one = next((one for one in rows if one.first.variant == run.baseline), None)
    kind = ""
    if one is not None and run.processes > 1:
        kind = "weak" if sequences(row) == sequences(one) else "strong"
    compiled = [float(run.setup_s.get("compile") or 0) for run in row.runs if row.times]
    return {
        "model": run.subject.split(",")[0],
        "training": training_of(row),
        "processes": str(run.processes),
        "scaling": kind,
        "batch each": str(sequences(row)),
        "ms of one process": number(one.step_ms if one else None, ",.2f"),
        "ms a step": number(row.step_ms, ",.2f"),
        "efficiency [95%]": efficiency(row),
        "GB a GPU": number(memory / 1e3 if memory else None, ",.1f"),
        "communication": number(row.metric("communication_share"), ".0%"),
        "hidden": number(row.metric("hidden_share"), ".0%"),
        "compile s": number(median(compiled) if compiled else None, ".1f"),
        "verdict": row.verdict,
        "commit": (run.git_commit or "-")[:7],
    }

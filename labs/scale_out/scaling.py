"""The tables of scaling: the efficiency of several processes, and their communication."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from labs.scale_out import collectives
from labs.scale_out.request import LAB
from workshop import labs
from workshop.labs import LabRow, LabRun
from workshop.run.timing import median
from workshop.tables import Line, Table, number

TRAIN = "train.py"
HEADER = ("training", "processes", "scaling", "batch each", "ms a step", "efficiency [95%]",
          "GB a GPU", "communication", "hidden", "compile s", "verdict")  # fmt: skip
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
    """The tables of a session's rows that are not empty."""
    by_subject = defaultdict(list)
    for row in rows:
        if row.first.unit == "tokens":
            by_subject[row.first.subject].append(row)
    found = [scaling_table(its) for its in by_subject.values()]
    return [one for one in (*found, collectives.table(rows)) if one.lines]


def scaling_table(rows: Sequence[LabRow]) -> Table:
    """A line for each row. The rows are of one session, device and subject."""
    ran = [row for row in in_order(rows) if row.first.status != "skipped"]
    lines = [Line(cells(row, rows), "red" if row.failed else None, training_of(row)) for row in ran]
    title = f"{LAB}: {rows[0].first.subject}, {rows[0].device}"
    return Table(title, HEADER, lines, NOTES, left=(0, 2, 10), wraps=(0, 5))


def summary(device: str, sessions: Iterable[Sequence[LabRow]]) -> Table:
    """The newest row of each training, number of processes and scaling, of one device.
    A row's one process is that of its own session."""
    newest: dict[tuple[str, str, int, str], list[str]] = {}
    for rows in sessions:
        for row in rows:
            run = row.first
            if run.unit != "tokens" or run.processes == 1 or run.status == "skipped":
                continue
            its = [one for one in rows if one.first.subject == run.subject]
            name, n, scale, batch, *measured, _, verdict = cells(row, its)
            one, model = alone(row, its), run.subject.split(",")[0]
            alone_ms = number(one.step_ms if one else None, ",.2f")
            commit = (run.git_commit or "-")[:7]
            line = [model, name, n, scale, batch, alone_ms, *measured, verdict, commit]
            newest[model, name, run.processes, scale] = line
    header = ("model", *HEADER[:4], "ms of one process", *HEADER[4:-2], HEADER[-1], "commit")
    found = [Line(newest[key]) for key in sorted(newest)]
    return Table(device, header, found, left=(0, 1, 3, 11, 12))


def in_order(rows: Sequence[LabRow]) -> list[LabRow]:
    """Sorted by training, in the order of first runs, then by processes, weak before strong."""
    names = list(dict.fromkeys(map(training_of, rows)))

    def place(row: LabRow) -> tuple[int, int, int]:
        return names.index(training_of(row)), row.first.processes, -sequences(row)

    return sorted(rows, key=place)


def training_of(row: LabRow) -> str:
    run = row.first
    version, strategy = run.options["version"], run.options["strategy"]
    # One process of ddp does what the version does, whatever it is compared with.
    graph = run.options.get("cuda_graph") and (run.processes > 1 or strategy == "fsdp")
    return f"{version}, {strategy}" + ", graph" * bool(graph)


def sequences(row: LabRow) -> int:
    """The batch size of each process."""
    return int(row.first.metrics["sequences"] or 0)


def alone(row: LabRow, rows: Iterable[LabRow]) -> LabRow | None:
    """The row of one process that a row is compared with."""
    its = (one for one in rows if one.first.variant == row.first.baseline)
    return next(its, None)


def kind(row: LabRow, rows: Iterable[LabRow]) -> str:
    """ "weak" or "strong"; "" for one process."""
    one = alone(row, rows)
    if row.first.processes == 1 or one is None:
        return ""
    return "weak" if sequences(row) == sequences(one) else "strong"


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


def cells(row: LabRow, rows: Sequence[LabRow]) -> list[str]:
    memory = row.peak_memory_mb
    compiled = [float(run.setup_s.get("compile") or 0) for run in row.runs if row.times]
    return [
        training_of(row),
        str(row.first.processes),
        kind(row, rows),
        str(sequences(row)),
        number(row.step_ms, ",.2f"),
        efficiency(row),
        number(memory / 1e3 if memory else None, ",.1f"),
        number(row.metric("communication_share"), ".0%"),
        number(row.metric("hidden_share"), ".0%"),
        number(median(compiled) if compiled else None, ".1f"),
        row.verdict,
    ]

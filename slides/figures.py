"""The charts of the slides: each function is a directive of the decks' files.

`!rows small | step_ms` calls `rows` with the results and these arguments. It returns what to draw,
and values for the braces in the slide's title and caption.
"""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from slides.measured import SIZES, Measured, NotMeasured
from slides.pages import Body, Code, Lanes
from workshop.compare import sweep as sweeps
from workshop.compare.rows import ratio
from workshop.errors import WorkshopError
from workshop.gate import plausibility
from workshop.kernels.cases import OPS
from workshop.kernels.rows import Row, against_fastest
from workshop.profilers import advisor, picture, timeline
from workshop.roofline import ceilings, inputs
from workshop.roofline.model import COMPUTE, DATA_SHEET, MEMORY
from workshop.run import timing
from workshop.show import charts, lab_table
from workshop.show import roofline_chart as roofs
from workshop.show.drawing import GREEN, GREY, RED, Bars, Curves
from workshop.versions import ALL, BASELINE, PEERS, ROOT, VERSIONS

Shown = tuple[Body, Mapping[str, object]]
BLUE, LIGHT = "#0072B2", "#B8D4E8"
SMALL, MEDIUM = SIZES
TORCH_PROFILER = "torch.profiler"
PUBLISHED = ROOT / "tests" / "fixtures" / "published_tables.json"
TRACES = ROOT / "tests" / "fixtures" / "profilers" / "kineto"
MOST_MOVING = 7
"""Changes of a waterfall that are shown, besides the first and the last."""
FIELDS = {
    "step_ms": ("ms a step", 1.0),
    "peak_share": ("% of the peak rate", 100.0),
    "startup_s": ("seconds to compile and capture", 1.0),
}
LABS = {
    "inference_benchmark": "resnet50, batch 256, 224 x 224, inference, ladder",
    "cifar10_roofline": "resnet18, digits, batch 256, training",
    "data_pipeline": "resnet50, digits_2048_224, batch 128",
    "text_generation": "",
    "scale_out": "",
}
"""The subject of each lab whose gain is shown."""


def ms(value: float | None) -> str:
    """Three digits: "1.44 ms"."""
    return f"{value:,.0f} ms" if value and value >= 1000 else f"{value or 0:.3g} ms"


def name(key: str) -> str:
    return key.upper() if key in VERSIONS else ALL[key].title


def _bars(
    keys: Sequence[str], values: Sequence[float | None], axis: str, look: Sequence[str] = (),
    form: str = "",
) -> Bars:  # fmt: skip
    """A bar for each version, peer or text; across if one is long."""
    labels = [name(key) if key in ALL else key for key in keys]
    look = look or [ALL[key].colour for key in keys]
    large = max(value or 0.0 for value in values) >= 100
    form = form or ("#,##0" if large else "#,##0.0")
    return Bars(labels, {axis: values}, axis, look, form, across=max(map(len, labels)) > 7)


# --- versions ------------------------------------------------------------------------------------


def rows(measured: Measured, size: str, field: str, who: str = "versions") -> Shown:
    """One of FIELDS of the versions, of "all" (the peers too) or of some, as "v1 v2"; the lowest
    and highest, and the speed-up of the lowest over V1.
    """
    its = measured.ladder(size).rows
    keys = {"versions": list(VERSIONS), "all": list(its)}.get(who, who.split())
    shown = [row for key, row in its.items() if key in keys and getattr(row, field)]
    if not shown:
        raise NotMeasured(f"{field} of the versions", "make compare, on a GPU")
    axis, scale = FIELDS[field]
    values = [scale * getattr(row, field) for row in shown]
    low, high = (shown[values.index(pick(values))] for pick in (min, max))
    words = {"size": low.config, "v1": values[0], "v1_ms": ms(values[0]), "most": max(values)}
    words |= {"low": name(low.version), "low_ms": ms(min(values)), "speedup": low.speedup_text()}
    words |= {"high": name(high.version), "break_even": high.break_even}
    if who == "all":
        rivals = [value for row, value in zip(shown, values, strict=True) if row.version in PEERS]
        words["peer_ms"] = ms(min(rivals)) if rivals else "not measured"
    return _bars([row.version for row in shown], values, axis), words


def losses(measured: Measured) -> Shown:
    its = [
        row
        for row in measured.ladder(MEDIUM).versions
        if None not in (row.loss_first, row.loss_last)
    ]
    first, last = ([getattr(row, key) for row in its] for key in ("loss_first", "loss_last"))
    series = {"first step": first, "last step": last}
    labels = [name(row.version) for row in its]
    body = Bars(labels, series, "loss", (LIGHT, BLUE), "0.000")
    return body, {"apart": max(last) - min(last)}


def parts(measured: Measured, what: str) -> Shown:
    """The parts of the peak memory or of the step; V1 against the version with the least."""
    its = measured.ladder(MEDIUM).versions
    body = charts.memory(its) if what == "memory" else charts.steps(its)
    if what == "memory":
        own = {name: [(x or 0.0) / 1e3 for x in mb] for name, mb in body.series.items()}
        body = replace(body, series=own, axis="GB at the peak")
    series = {name: [x or 0.0 for x in own] for name, own in body.series.items()}
    sums, labels = [*map(sum, zip(*series.values(), strict=True))], [name(r.version) for r in its]
    if not all(sums):
        raise NotMeasured(f"the {what} of the versions", "make compare")
    words = {"v1": sums[0], "low": labels[sums.index(min(sums))], "least": min(sums)}
    if what == "phases":
        ratios = [b / f for b, f in zip(series["backward"], series["forward"], strict=True)]
        words |= {"shortest": min(ratios), "longest": max(ratios)}
    return replace(body, labels=labels), words


def precision(measured: Measured) -> Shown:
    """V1's step in each."""
    size = measured.ladder(MEDIUM).first.config
    found = {its.first.precision: its for its in measured.ladders if its.first.config == size}
    its = {key: found[key] for key in ("fp32", "tf32", "fp16", "bf16") if key in found}
    if len(its) < 2:
        command = f'make compare ARGS="--config {size} --precision fp32 bf16"'
        raise NotMeasured(f"several precisions at {size}", command)
    measured.begin()
    measured.use_runs([one for ladder in its.values() for one in ladder.stored([ladder.first])])
    steps = {key: ladder.first.step_ms or 0.0 for key, ladder in its.items()}
    first, best = next(iter(steps)), min(steps, key=steps.__getitem__)
    words = {"size": size, "first": first, "first_ms": ms(steps[first])}
    body = _bars(list(steps), list(steps.values()), "ms a step", [GREY] * len(steps))
    return body, words | {"best": best, "best_ms": ms(steps[best])}


def waterfall(measured: Measured, to: str) -> Shown:
    """The step after each of the changes that move it most."""
    fall = measured.fall(to, MEDIUM)
    timed = [step for step in fall.steps if step.timed]
    moving = sorted(timed[1:-1], key=lambda step: abs(step.saved_ms or 0.0))[-MOST_MOVING:]
    kept = {id(step) for step in (timed[0], *moving, timed[-1])}
    shown = [step for step in timed if id(step) in kept]
    values, look = [s.step_ms for s in shown], [ALL[s.rung.version].colour for s in shown]
    own = max(timed[1:], key=lambda step: (step.rung.version == to, step.saved_ms or 0.0))
    words = {"size": fall.config, "first_ms": ms(values[0]), "last_ms": ms(values[-1])}
    body = _bars([step.rung.title for step in shown], values, "ms a step", look)
    return body, words | {"change": own.rung.title, "saved_ms": ms(own.saved_ms)}


def change(measured: Measured, title: str, size: str = MEDIUM) -> Shown:
    """The step before and after one change on the way to V4."""
    fall = measured.fall("v4", size)
    timed = [step for step in fall.steps if step.timed]
    at = next((i for i, step in enumerate(timed) if i and step.rung.title == title), 0)
    if not at:
        raise NotMeasured(f"{title} at {size}", "compare_versions.py --waterfall v4, on a GPU")
    values = [step.step_ms for step in timed[at - 1 : at + 1]]
    body = _bars(("without it", "with it"), values, "ms a step", (GREY, GREEN))
    return body, {"size": fall.config, "gain": ratio(timed[at].gain)}


def sweep(measured: Measured) -> Shown:
    """The peak memory over a sequence's length; V1 against the version with the least, at V1's
    longest."""
    found = sweeps.build([one.run for one in measured.all.runs], sweeps.AXES["seq-len"])
    if not found:
        command = "compare_versions.py --sweep seq-len SIZE ... SIZE"
        raise NotMeasured(f"a sweep over the {sweeps.AXES['seq-len'].words}", command)
    measured.use_runs([one for one in measured.all.runs if found[0].includes(one.run)])
    series = {
        curve.version: [(p.size, (p.row.peak_memory_mb or 0.0) / 1e3) for p in curve.points]
        for curve in found[0].curves
    }
    series = {key: [point for point in its if point[1]] for key, its in series.items()}
    # LibreOffice does not draw a first series that is shorter than the others.
    series = dict(sorted(series.items(), key=lambda item: -len(item[1])))
    most = series[BASELINE][-1][0]
    at = {key: dict(its)[most] for key, its in series.items() if most in dict(its)}
    least = min(at, key=at.__getitem__)
    upper, look = (
        {name(key): its for key, its in series.items()},
        [ALL[key].colour for key in series],
    )
    body = Curves(upper, "tokens of a sequence", "GB at the peak", look)
    return body, {"at": most, "v1": at[BASELINE], "low": name(least), "least": at[least]}


def roofline(measured: Measured) -> Shown:
    its = measured.ladder(MEDIUM)
    stored = its.stored(its.versions)
    found = inputs.load([one.path for one in stored], [one.run for one in stored])
    ceilings.attach(found, folder=measured.all.folders[0])
    frame = roofs.view(found)
    lines = {
        one.kind: one
        for one in roofs.lines(found, frame)
        if one.is_main and one.origin == DATA_SHEET
        if one.kind == MEMORY or its.first.precision in one.text
    }
    if len(lines) < 2:
        raise NotMeasured("the limits of this chip", "roofline_analysis.py --measure")
    marks = {m.point.label: [(m.start or m.x, m.y), (m.x, m.y)] for m in roofs.marks(found, frame)}
    keys = [row.version for row in its.versions if row.version in marks]
    every = {kind: [line.start, line.end] for kind, line in lines.items()}
    every |= {name(key): marks[key] for key in keys}
    series = {key: [(x, y / 1e12) for x, y in points] for key, points in every.items()}
    look = ["#5F6B76", "#1F2933", *(ALL[key].colour for key in keys)]
    body = Curves(series, "FLOP a byte", "TFLOP/s", look, logarithmic=True)
    words = {"best": max(marks[key][0][1] for key in keys) / 1e12}
    limits = "; ".join(line.text for line in lines.values())
    return body, words | {"roof": lines[COMPUTE].end[1] / 1e12, "limits": limits}


# --- how far to trust a number -------------------------------------------------------------------


def spread(measured: Measured) -> Shown:
    """The medians of V1's processes, sorted."""
    row = measured.ladder(SMALL).first
    found = [
        one
        for one in measured.all.runs
        if (run := one.run).kind == "run" and run.step_ms
        if (run.version, run.config_name, run.precision, run.device.get("name"))
        == (row.version, row.config, row.precision, row.device)
    ]
    measured.begin()
    measured.use_runs(found)
    medians = sorted(timing.median(one.run.step_ms) for one in found)
    labels = [str(index) for index in range(1, len(medians) + 1)]
    body = Bars(labels, {"median": medians}, "ms a step", [GREY] * len(medians))
    words = {"size": row.config, "count": len(medians)}
    return body, words | {"low": ms(medians[0]), "high": ms(medians[-1])}


def intervals(measured: Measured, size: str, version: str) -> Shown:
    """The interval of a version's speed-up over V1."""
    its = [row for row in measured.ladder(size).versions if row.version == version]
    found = [
        (row, row.speedup.value, row.speedup.interval)
        for row in its
        if row.speedup and row.speedup.interval
    ]
    if not found:
        raise NotMeasured(f"intervals at {size}", 'make compare ARGS="--repeats 3"')
    low, high = ([ci[i] for *_, ci in found] for i in (0, 1))
    series: dict[str, list[float]] = {"low": low, "median": [s for _, s, _ in found], "high": high}
    labels, look = [name(row.version) for row, *_ in found], (LIGHT, BLUE, LIGHT)
    form = "0.0" if max(high) >= 10 else "0.00"
    words = {"version": labels[-1], "size": found[0][0].config, "low": low[-1], "high": high[-1]}
    return Bars(labels, series, "times as fast as V1", look, form), words


def claims(measured: Measured, what: str) -> Shown:
    """Published rows: the time of a step, or the number of reasons why they can't be true."""
    its = plausibility.read_claims(PUBLISHED)
    reasons = [len(plausibility.check(row)) for row in its]
    measured.use([PUBLISHED], "published times of others: tests/fixtures/published_tables.json")
    look, labels = [RED if count else GREY for count in reasons], [row.name for row in its]
    words = {"wrong": sum(map(bool, reasons)), "count": len(its)}
    if what == "times":
        times = [row.step_ms for row in its]
        return _bars(labels, times, "ms a step, as published", [GREY] * len(its), "0.0"), words
    return _bars(labels, reasons, "reasons why it can't be true", look, "0"), words


# --- profiles ------------------------------------------------------------------------------------


def launches(measured: Measured) -> Shown:
    """Each version's launches in a step; V1's against the fewest."""
    tables = {key: one.table for key, one in measured.profiles(TORCH_PROFILER).items()}
    values = {key: table.launches / (table.steps or 1) for key, table in tables.items()}
    axis, best = f"{tables[BASELINE].what}s a step", min(values, key=values.__getitem__)
    words = {"v1": values[BASELINE], "best": name(best), "value": values[best], "axis": axis}
    return _bars(list(values), list(values.values()), axis, form="#,##0"), words


def categories(measured: Measured) -> Shown:
    """Where the time of each version's kernels goes, and what the command advise says of it."""
    its = list(measured.profiles(TORCH_PROFILER).items())
    shares = [
        {what: 100 * ns / one.table.total_ns for what, ns in one.table.category_ns().items()}
        for _, one in its
    ]
    kinds = [what for what in picture.COLOURS if any(what in own for own in shares)]
    series = {what: [own.get(what, 0.0) for own in shares] for what in kinds}
    labels, look = [name(key) for key, _ in its], [picture.COLOURS[what] for what in kinds]
    found = [advisor.headline(advisor.advise(one.table, one.run)) for _, one in its]
    advice = [f"{key} {one.finding}" for key, one in zip(labels, found, strict=True) if one]
    body = Bars(labels, series, "% of kernels' time", look, stacked=True)
    words = {"v1": shares[0].get("GEMM", 0.0), "last": labels[-1]}
    return body, words | {"share": shares[-1].get("GEMM", 0.0), "advice": ", ".join(advice)}


def kernels(measured: Measured) -> Shown:
    """V3's operators at their largest size against the fastest other that is right."""
    gains: dict[str, float] = {}
    for path, runs in measured.all.kernels.items():
        its = [row for row in (Row((run,)) for run in runs) if row.op in OPS]
        gains |= {best.ours.op: best.gain for best in against_fastest(its)}
        device = runs[0].device.get("name")
        measured.use([path], f"forward and backward, {its[0].precision}, {device}")
    if not gains:
        raise NotMeasured("V3's kernels against others", "python -m workshop.kernels.benchmark")
    axis, values = "times as fast as the best other", list(gains.values())
    body = _bars(list(gains), values, axis, [BLUE] * len(gains), "0.00")
    return body, {"low": min(values), "high": max(values)}


def trace(measured: Measured, file: str, start: str, end: str = "") -> Shown:
    """A stretch of a trace in ms, or one of its steps."""
    recorded = timeline.read(TRACES / file)
    stretch = (None, float(start), float(end)) if end else (int(start), None, None)
    window = timeline.choose_window(recorded, *stretch)
    lanes, length = timeline.arrange(recorded, window), window.end - window.start
    measured.use([TRACES / file], ", ".join([file, *(lane.title for lane in lanes if lane.on_gpu)]))
    drawn, words = {}, {"ms": length, "us": 1e3 * length}
    for kind in (timeline.RANGES, timeline.OPERATORS, timeline.CALLS, timeline.KERNELS):
        own = [lane for lane in lanes if lane.on_gpu == (kind == timeline.KERNELS)]
        slices = sorted(s for lane in own for s in _outermost(lane.slices.get(kind, ())))
        words[kind.replace(" ", "_")] = sum(s.start >= window.start for s in slices)
        drawn[kind] = [
            (max(s.start - window.start, 0.0) / length, min(s.end - window.start, length) / length,
             picture.COLOURS[s.category],
             s.name.removeprefix("aten::") if kind in (timeline.RANGES, timeline.OPERATORS) else "")
            for s in timeline.merge(slices, length / 600)
        ]  # fmt: skip
    idle = sum(end - start for start, end in timeline.gaps(slices, window))
    shown = {colour for slices in drawn.values() for *_, colour, _ in slices}
    legend = {kind: c for kind, c in picture.COLOURS.items() if c in shown}
    for kind in ("other", timeline.RANGE, timeline.CALL, timeline.SYNCHRONISATION):
        legend.pop(kind, None)
    return Lanes(drawn, legend), words | {"busy": 100 * (1 - idle / length)}


def _outermost(slices: Iterable[timeline.Slice]) -> list[timeline.Slice]:
    return next(iter(timeline.nest(slices)), [])


# --- labs and code -------------------------------------------------------------------------------


def lab(measured: Measured, lab: str, subject: str, variants: str = "") -> Shown:
    """A lab's rows, or some of them in an order; the fastest against the baseline."""
    every = measured.lab(lab, subject)
    first = next(row for row in every if row.is_baseline)
    by_variant = {row.first.variant: row for row in every}
    its = [by_variant[key] for key in variants.split(", ") if key in by_variant] or every
    rates, labels, last = [row.units_per_s or 0.0 for row in its], [], ""
    for variant in (row.first.variant for row in its):
        added = variant.removeprefix(f"{last}, ")
        short = textwrap.shorten(variant, 28, placeholder=" ...")
        labels.append(short if added == variant else f"+ {added}")
        last = variant
    best = its[rates.index(max(rates))]
    words = {"unit": best.first.unit, "slow": first.units_per_s, "fast": max(rates)}
    words |= {"best": best.first.variant, "first": first.first.variant}
    words |= {"subject": first.first.subject.split(",")[0], "speedup": lab_table.speedup_text(best)}
    return _bars(labels, rates, f"{best.first.unit} a second", [BLUE] * len(its)), words


def lab_gains(measured: Measured) -> Shown:
    """The fastest row of each lab against its baseline."""
    gains, missing = {}, []
    for key, subject in LABS.items():
        try:
            its = measured.lab(key, subject)
            label = f"{key}, {its[0].first.subject.split(',')[0]}"
            gains[label] = max(row.speedup.value for row in its if row.speedup)
        except NotMeasured:
            missing.append(key)
    if not gains:
        raise NotMeasured("the labs", "see the READMEs in labs/")
    values, axis = list(gains.values()), "times the baseline's rate"
    body = _bars(list(gains), values, axis, [BLUE] * len(gains))
    return body, {"count": len(LABS), "missing": ", ".join(missing) or "none"}


def code(measured: Measured, file: str, *marks: str) -> Shown:
    """Lines of a version's file, or of a path from the repository's root. Each mark is a text that
    is looked for from the line of the one before it; the last two are in the first line and in the
    last one.

    Raises:
        WorkshopError: one of them is no longer there.
    """
    path = VERSIONS[file].path if file in VERSIONS else ROOT / file
    shown, lines = path.relative_to(ROOT).as_posix(), path.read_text("utf-8").splitlines()
    places = [0]
    for mark in marks:
        at = next((i for i in range(places[-1], len(lines)) if mark in lines[i]), None)
        if at is None:
            raise WorkshopError(f"slides: {shown} has no {mark!r} there: change the deck's file")
        places.append(at)
    measured.use([path], f"{shown}: {marks[0]}")
    return Code(textwrap.dedent("\n".join(lines[places[-2] : places[-1] + 1])).splitlines()), {}

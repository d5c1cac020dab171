"""The worth of each fusion of V2, from the participant's own runs and profiles: the predictions
are set beside what was measured, the findings must agree with the files."""

import math
from collections.abc import Iterator
from functools import partial

from workshop.compare.rows import variant
from workshop.errors import WorkshopError
from workshop.exercises.frame import Item, Work, note, setting
from workshop.exercises.predict import (
    Chosen,
    Found,
    NotCompared,
    Predicted,
    Question,
    ask,
    disturbed,
    prediction,
    step_ms,
)
from workshop.profilers.reading import CsvTable, Problems
from workshop.results import RunResult
from workshop.run import timing

ROUNDS = 2
"""Runs of each variant that the sheet's loop makes: older ones are left out."""
PROFILES = "fusion"
"""Below results/profiles, a folder for each profiled variant."""
WITHIN = 0.02
"""Room in a finding for the digits that were printed, and no more."""
NONE = "none"
FEWER_PASSES = 7 - 2
"""Over (B, T, C). V1's norm: read x, write its square; read that for the mean; read x, write the
normed; read that, write it times the weight. One kernel reads x and writes y."""

WHY = {
    "fuse_qkv": "It saves two reads of x, two launches and one rotation a layer. The products' "
    "operations stay: where these take most of the time, the gain is small.",
    "fuse_gate_up": "It saves one read of x and one launch a layer. The operations stay, and the "
    "halves of a stacked result no longer lie together in memory.",
    "fuse_norm": "One kernel has 2 passes over (B, T, C), V1's line 7. Whether F.rms_norm is one "
    "kernel depends on the device: look at your profile.",
    "fuse_attention": "It saves all passes over (B, H, T, T), which grow with the square of T; "
    "at a short T the tensors of the feed-forward layer are as large.",
    "fuse_gqa": "It saves copies of k and v, of the size (B, H, T, D): small beside the scores, "
    "and the fused attention may copy them itself.",
    "fuse_optimizer": "It saves passes over parameters and moments, and launches. What they cost "
    "does not depend on the batch: with few tokens a step it is a large share.",
}
FUSIONS = tuple(WHY)


def check(work: Work) -> Iterator[Item]:
    times = (partial(_predicted_time, name) for name in FUSIONS)
    return ask(work, lambda work: work, (_quiet, *times, *QUESTIONS))


def _quiet(work: Work) -> Iterator[Item]:
    return disturbed(run for fusion in (None, *FUSIONS) for run in _runs(work, fusion))


def _variant(fusion: str | None) -> str:
    """As `variant` has it: "" for V2 as it is."""
    return f"no-{fusion.replace('_', '-')}" if fusion else ""


FLAGS = {f"--{_variant(name)}": name for name in FUSIONS}


# --- the participant's runs and profiles ---------------------------------------------------------


def _runs(work: Work, fusion: str | None = None) -> list[RunResult]:
    """The newest runs of V2, whole or without one fusion, at the size of the newest ablation.

    Raises:
        WorkshopError: there are none.
    """
    runs = work.runs("v2")
    if not runs:
        raise WorkshopError("no result of V2: run the sheet's loop")
    newest = next((run for run in runs if f"--{variant(run)}" in FLAGS), runs[0])
    wanted = (_variant(fusion), *_size(newest))
    alike = [run for run in runs if (variant(run), *_size(run)) == wanted]
    if not alike:
        how = f"with --{wanted[0]}" if fusion else "as it is"
        size = f"{newest.config_name}, {newest.precision}"
        raise WorkshopError(f"no result of V2 {how} at {size}: run the sheet's loop")
    return [run for run in alike if not run.disturbed][:ROUNDS] or alike[:ROUNDS]


def _size(run: RunResult) -> tuple[object, ...]:
    """Runs are comparable where these are the same."""
    return run.config_name, run.batch_size, run.seq_len, setting(run)


def _ratio(work: Work, fusion: str, other: str | None = None) -> timing.Ratio:
    """Time of a step without a fusion over one of V2 whole, or without another. Raises NotCompared:
    other programs disturbed the runs."""
    slower, faster = _runs(work, fusion), _runs(work, other)
    for run in (*slower, *faster):
        step_ms(run)
    return timing.speedup([run.step_ms for run in slower], [run.step_ms for run in faster])


def _memory_more_mb(work: Work, fusion: str) -> float:
    peaks = [[float(run.memory_mb["peak"]) for run in _runs(work, f)] for f in (fusion, None)]
    return max(peaks[0]) - max(peaks[1])


def _calls(work: Work, fusion: str | None, operator: str) -> float:
    """Calls of an operator in a step, in the profile of V2 whole or without one fusion.

    Raises:
        WorkshopError: there is no such profile, or it is of something else.
    """
    name = _variant(fusion) or "v2"
    folder = work.results / "profiles" / PROFILES / name
    profile = work.profile(PROFILES, name)
    record = profile[1] if profile else None
    if record is None:
        raise WorkshopError(f"no profile in {folder}: make it as the sheet says")
    if record.version != "v2" or variant(record) != _variant(fusion):
        found = f"{record.version} {variant(record)}".strip()
        raise WorkshopError(f"{folder} is a profile of {found}: make it again as the sheet says")
    path = folder / "operators.csv"
    rows = CsvTable(path, Problems(path)).select("operator", "count")
    calls = sum(int(count) for _, (name, count) in rows if name == operator)
    return calls / int(record.options["num_steps"] or 1)


def _predicted_time(fusion: str, work: Work) -> Iterator[Item]:
    predicted = work.answers.number(f"predict.{fusion}")
    what = f"--{_variant(fusion)}: a longer step"
    try:
        ratio = _ratio(work, fusion)
    except NotCompared as reason:
        yield note(what, str(reason))
        return
    measured = 100 * (ratio.value - 1)
    if ratio.interval is not None and ratio.significant:
        yield prediction(what, predicted, measured, "%", within=0.5, why=WHY[fusion])
        return
    text = f"predicted {predicted:.3g}%, measured: "
    if ratio.interval is None:
        text += f"{measured:+.1f}% in one process: run the sheet's loop to its end for an interval"
    else:
        low, high = (100 * (bound - 1) for bound in ratio.interval)
        text += f"no clear difference [{low:+.1f}%, {high:+.1f}%]"
        text += "" if low <= predicted <= high else f"\n{WHY[fusion]}"
    yield Item(True, what, text)


# --- right answers -------------------------------------------------------------------------------


def _tensor_mb(work: Work, *sizes: str) -> float:
    """Memory of a tensor with a number for each token and each of the run's further sizes."""
    run = _runs(work)[0]
    further = [run.seq_len if name == "seq_len" else int(run.config[name]) for name in sizes]
    numbers = run.batch_size * run.seq_len * math.prod(further)
    return numbers * (2 if run.precision in ("bf16", "fp16") else 4) / 1e6


def _scores_mb(work: Work) -> float:
    """Memory of a layer's scores (B, H, T, T)."""
    return _tensor_mb(work, "num_heads", "seq_len")


def _clearly_slower(work: Work) -> dict[str, float]:
    ratios = {flag: _ratio(work, fusion) for flag, fusion in FLAGS.items()}
    return {flag: r.value for flag, r in ratios.items() if r.significant and r.value > 1}


def _costliest(work: Work) -> list[str]:
    """Every switch that the clock can't distinguish from the one that costs most time."""
    clear = _clearly_slower(work)
    if not clear:
        return [NONE]
    most = max(clear, key=clear.__getitem__)
    return [most, *(f for f in clear if not _ratio(work, FLAGS[most], FLAGS[f]).significant)]


def _percents(work: Work) -> str:
    values = {flag: _ratio(work, fusion).value for flag, fusion in FLAGS.items()}
    return ", ".join(f"{flag} {round(100 * (value - 1)):+d}%" for flag, value in values.items())


def _more_mb(work: Work) -> dict[str, float]:
    return {flag: _memory_more_mb(work, fusion) for flag, fusion in FLAGS.items()}


def _squares(work: Work) -> list[float]:
    """Squares in a step of V2, whole and with V1's norm: with F.rms_norm as one kernel, fewer."""
    return [_calls(work, fusion, "aten::pow") for fusion in (None, "fuse_norm")]


def _squares_shown(work: Work) -> str:
    return "aten::pow: {:g} calls a step in V2, {:g} with --no-fuse-norm".format(*_squares(work))


def _layers(work: Work) -> int:
    return int(_runs(work)[0].config["num_layers"])


QUESTIONS: tuple[Question[Work], ...] = (
    Predicted(
        "predict.attention_memory_mb", "--no-fuse-attention: more peak memory", "MB",
        lambda work: _memory_more_mb(work, "fuse_attention"),
        lambda work: f"That is {_memory_more_mb(work, 'fuse_attention') / _scores_mb(work):.1f} "
        "times the scores of one layer. Each layer keeps its softmax for the backward pass, and no "
        "longer what the fused attention keeps: its output, and a number a row.",
    ),
    Predicted(
        "predict.products_more", "--no-fuse-qkv: more products a step", "",
        lambda work: _calls(work, "fuse_qkv", "aten::mm") - _calls(work, None, "aten::mm"),
        "Two more in each layer's forward pass, and for each of them two in the backward pass: "
        "one for the gradient of x, one for that of the weight.", within=0,
    ),
    Found(
        "bytes.scores_mb", "the scores of a layer", "MB", _scores_mb,
        "B x H x T x T numbers; H are the query heads, also where k and v have fewer",
        within=WITHIN,
    ),
    Found(
        "bytes.norm_mb", "what fused norms do not move", "MB",
        lambda work: FEWER_PASSES * (2 * _layers(work) + 1) * _tensor_mb(work, "hidden_dim"),
        f"{FEWER_PASSES} passes over B x T x C numbers, in all norms: two a layer and one at the "
        "end", within=WITHIN,
    ),
    Found(
        "bytes.qkv_mb", "what one product for q, k, v does not read", "MB",
        lambda work: 2 * _layers(work) * _tensor_mb(work, "hidden_dim"),
        "each layer reads x, B x T x C numbers, once instead of three times", within=WITHIN,
    ),
    Found(
        "findings.products", "products a step", "", lambda work: _calls(work, None, "aten::mm"),
        "the calls of aten::mm in the profile of V2, of one step", within=0,
    ),
    Found(
        "findings.products_without_qkv", "products a step, unfused", "",
        lambda work: _calls(work, "fuse_qkv", "aten::mm"),
        "the calls of aten::mm in the profile with --no-fuse-qkv, of one step", within=0,
    ),
    Chosen(
        "findings.dearest_switch", "the switch that costs most time", (*FLAGS, NONE), _costliest,
        lambda work: f"clearly longer became: {', '.join(_clearly_slower(work)) or NONE}; "
        f"{_percents(work)}", _percents,
    ),
    Chosen(
        "findings.memory_switch", "the switch that costs most memory", tuple(FLAGS),
        lambda work: max(_more_mb(work), key=_more_mb(work).__getitem__),
        lambda work: ", ".join(f"{flag} {mb:+.1f} MB" for flag, mb in _more_mb(work).items()),
    ),
    Found(
        "findings.memory_more_mb", "how much more memory", "MB",
        lambda work: max(_more_mb(work).values()), "the peak of that run less the peak of V2",
        within=WITHIN, margin=1.0,  # each of the two peaks was printed as a whole number of MB
    ),
    Chosen(
        "findings.norm_is_one_kernel", "is F.rms_norm one kernel?", ("yes", "no"),
        lambda work: "yes" if _squares(work)[0] < _squares(work)[1] else "no",
        _squares_shown, _squares_shown,
    ),
)  # fmt: skip

"""What each fusion of V2 is worth, from the participant's own runs and profiles: the predictions
are set beside what was measured, the findings must agree with the files."""

from collections.abc import Iterator, Sequence
from functools import partial

from workshop.compare.rows import variant
from workshop.errors import WorkshopError
from workshop.exercises.frame import Item, Work
from workshop.exercises.predict import prediction
from workshop.profilers.reading import CsvTable, Problems
from workshop.results import RunResult
from workshop.run import timing

ROUNDS = 2
"""Runs of each variant that the sheet's loop makes: older ones are left out."""
PROFILES = "fusion"
"""Below results/profiles, a folder for each profiled variant."""
WITHIN = 0.02
"""Of a finding: room for the digits that were printed, and no more."""
NONE = "none"
PASSES_OF_V1_NORM, PASSES_OF_ONE_KERNEL = 7, 2
"""Over (B, T, C). Read x, write its square; read that for the mean; read x, write the normed; read
that, write it times the weight. One kernel reads x and writes y."""

WHY = {
    "fuse_qkv": "It saves two reads of x, two launches and one rotation a layer. The products' "
    "operations stay: where these take most of the time, little is won.",
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
    yield from work.each(
        *(partial(_predicted_time, name) for name in FUSIONS),
        *(_predicted_memory, _predicted_products),
        *(_scores, _norm, _qkv),
        *(_dearest_switch, _memory_switch, _memory_more, _products, _products_without_qkv),
        _norm_is_one_kernel,
    )


def _flag(fusion: str) -> str:
    return f"--no-{fusion.replace('_', '-')}"


def _variant(fusion: str | None) -> str:
    """As variant has it: "" for V2 as it is."""
    return _flag(fusion).removeprefix("--") if fusion else ""


FLAGS = {_flag(name): name for name in FUSIONS}
VARIANTS = {_variant(name) for name in FUSIONS}


# --- the participant's runs ----------------------------------------------------------------------


def _runs(work: Work, fusion: str | None = None) -> list[RunResult]:
    """The newest runs of V2, whole or without one fusion, at the size of the newest ablation.

    Raises:
        WorkshopError: there are none.
    """
    runs = work.runs("v2")
    if not runs:
        raise WorkshopError("no result of V2: run the sheet's loop")
    newest = next((run for run in runs if variant(run) in VARIANTS), runs[0])
    wanted = _variant(fusion)
    alike = [r for r in runs if variant(r) == wanted and _size(r) == _size(newest)]
    if not alike:
        how = f"with --{wanted}" if fusion else "as it is"
        size = f"{newest.config_name}, {newest.precision}"
        raise WorkshopError(f"no result of V2 {how} at {size}: run the sheet's loop")
    return alike[:ROUNDS]


def _size(run: RunResult) -> tuple[object, ...]:
    """Runs are comparable where these are the same."""
    sizes = tuple(sorted(run.config.items()))
    return run.config_name, run.precision, run.batch_size, run.seq_len, sizes, run.device["name"]


def _ratio(slower: Sequence[RunResult], faster: Sequence[RunResult]) -> timing.Ratio:
    return timing.speedup([run.step_ms for run in slower], [run.step_ms for run in faster])


def _peak_mb(runs: Sequence[RunResult]) -> float:
    return max(float(run.memory_mb["peak"]) for run in runs)


def _memory_more_mb(work: Work, fusion: str) -> float:
    return _peak_mb(_runs(work, fusion)) - _peak_mb(_runs(work))


# --- predictions ---------------------------------------------------------------------------------


def _predicted_time(fusion: str, work: Work) -> Iterator[Item]:
    predicted = work.answers().number(f"predict.{fusion}")
    ratio = _ratio(_runs(work, fusion), _runs(work))
    what = f"{_flag(fusion)}: a longer step"
    measured = 100 * (ratio.value - 1)
    if ratio.interval is None:
        told = f"predicted {predicted:.3g}%, measured: {measured:+.1f}% in one process"
        yield Item(True, what, f"{told}: run the sheet's loop to its end for an interval")
        return
    if ratio.significant:
        yield prediction(what, predicted, measured, "%", within=0.5, why=WHY[fusion])
        return
    low, high = (100 * (bound - 1) for bound in ratio.interval)
    told = f"predicted {predicted:.3g}%, measured: no clear difference [{low:+.1f}%, {high:+.1f}%]"
    off = "" if low <= predicted <= high else f"\n{WHY[fusion]}"
    yield Item(True, what, told + off)


def _predicted_memory(work: Work) -> Iterator[Item]:
    predicted = work.answers().number("predict.attention_memory_mb")
    scores = _scores_mb(_runs(work)[0])
    measured = _memory_more_mb(work, "fuse_attention")
    yield prediction(
        "--no-fuse-attention: more peak memory",
        predicted,
        measured,
        "MB",
        why=f"That is {measured / scores:.1f} times the scores of one layer. Each layer keeps its "
        "softmax for the backward pass, and no longer what the fused attention keeps: its output, "
        "and a number a row.",
    )


def _predicted_products(work: Work) -> Iterator[Item]:
    predicted = work.answers().number("predict.products_more")
    more = _calls(work, "fuse_qkv", "aten::mm") - _calls(work, None, "aten::mm")
    yield prediction(
        "--no-fuse-qkv: more products a step",
        predicted,
        more,
        "",
        within=0.0,
        why="Two more in each layer's forward pass, and for each of them two in the backward pass: "
        "one for the gradient of x, one for that of the weight.",
    )


# --- bytes, counted ------------------------------------------------------------------------------


def _number_bytes(run: RunResult) -> int:
    return 2 if run.precision in ("bf16", "fp16") else 4


def _scores_mb(run: RunResult) -> float:
    heads = int(run.config["num_heads"])
    return run.batch_size * heads * run.seq_len**2 * _number_bytes(run) / 1e6


def _stream_mb(run: RunResult) -> float:
    """Of a tensor (B, T, C)."""
    width = int(run.config["hidden_dim"])
    return run.batch_size * run.seq_len * width * _number_bytes(run) / 1e6


def _scores(work: Work) -> Iterator[Item]:
    counted = work.answers().number("bytes.scores_mb")
    right = _scores_mb(_runs(work)[0])
    why = "B x H x T x T numbers; H are the query heads, also where k and v have fewer"
    yield _amount("the scores of a layer", counted, right, "MB", why)


def _norm(work: Work) -> Iterator[Item]:
    counted, run = work.answers().number("bytes.norm_mb"), _runs(work)[0]
    norms = 2 * int(run.config["num_layers"]) + 1
    saved = PASSES_OF_V1_NORM - PASSES_OF_ONE_KERNEL
    why = f"{saved} passes over B x T x C numbers, in {norms} norms: two a layer and one at the end"
    right = saved * norms * _stream_mb(run)
    yield _amount("what fused norms do not move", counted, right, "MB", why)


def _qkv(work: Work) -> Iterator[Item]:
    counted, run = work.answers().number("bytes.qkv_mb"), _runs(work)[0]
    why = "each layer reads x, B x T x C numbers, once in the place of three times"
    right = 2 * int(run.config["num_layers"]) * _stream_mb(run)
    yield _amount("what one product for q, k, v does not read", counted, right, "MB", why)


# --- findings ------------------------------------------------------------------------------------


def _dearest_switch(work: Work) -> Iterator[Item]:
    """Right is every switch that the clock can't tell from the dearest."""
    answer = work.answers().choice("findings.dearest_switch", (*FLAGS, NONE))
    whole, what = _runs(work), "the switch that costs most time"
    ratios = {flag: _ratio(_runs(work, fusion), whole) for flag, fusion in FLAGS.items()}
    clear = {
        flag: ratio.value for flag, ratio in ratios.items() if ratio.significant and ratio.value > 1
    }
    told = ", ".join(f"{flag} {round(100 * (r.value - 1)):+d}%" for flag, r in ratios.items())
    if not clear or answer not in clear:
        right = not clear and answer == NONE
        why = f"clearly longer became: {', '.join(clear) or 'none'}"
        yield Item(right, what, told if right else f"{told}; {why}")
        return
    dearest = max(clear, key=clear.__getitem__)
    tied = not _ratio(_runs(work, FLAGS[dearest]), _runs(work, FLAGS[answer])).significant
    right = answer == dearest or tied
    yield Item(right, what, told if right else f"{told}: not {answer}")


def _memory_switch(work: Work) -> Iterator[Item]:
    answer = work.answers().choice("findings.memory_switch", tuple(FLAGS))
    more = {flag: _memory_more_mb(work, fusion) for flag, fusion in FLAGS.items()}
    told = ", ".join(f"{flag} {mb:+.1f} MB" for flag, mb in more.items())
    yield Item(more[answer] == max(more.values()), "the switch that costs most memory", told)


def _memory_more(work: Work) -> Iterator[Item]:
    answer = work.answers().number("findings.memory_more_mb")
    right = max(_memory_more_mb(work, fusion) for fusion in FUSIONS)
    what = "how much more memory"
    # Each of the two peaks was printed as a whole number of MB.
    if abs(answer - right) <= max(1.0, WITHIN * right):
        yield Item(True, what)
    else:
        why = f"yours is {answer:,.4g} MB; your results have {right:,.1f}: peak less peak of V2"
        yield Item(False, what, why)


def _products(work: Work) -> Iterator[Item]:
    answer = work.answers().number("findings.products")
    yield _calls_found("products a step", answer, _calls(work, None, "aten::mm"))


def _products_without_qkv(work: Work) -> Iterator[Item]:
    answer = work.answers().number("findings.products_without_qkv")
    yield _calls_found("products a step, unfused", answer, _calls(work, "fuse_qkv", "aten::mm"))


def _calls_found(what: str, answer: float, right: float) -> Item:
    why = f"yours is {answer:g}; your profile has {right:g} calls of aten::mm a step"
    return Item(answer == right, what, "" if answer == right else why)


def _norm_is_one_kernel(work: Work) -> Iterator[Item]:
    """It is, if the squares that V1's line takes are gone."""
    answer = work.answers().choice("findings.norm_is_one_kernel", ("yes", "no"))
    squares = [_calls(work, fusion, "aten::pow") for fusion in (None, "fuse_norm")]
    right = "yes" if squares[0] < squares[1] else "no"
    told = f"aten::pow: {squares[0]:g} calls a step in V2, {squares[1]:g} with --no-fuse-norm"
    yield Item(answer == right, "is F.rms_norm one kernel?", told)


def _amount(what: str, answer: float, right: float, unit: str, why: str) -> Item:
    if abs(answer - right) <= WITHIN * right:
        return Item(True, what, f"{right:,.3g} {unit}")
    return Item(False, what, f"yours is {answer:,.4g} {unit}: {why}")


# --- the participant's profiles ------------------------------------------------------------------


def _calls(work: Work, fusion: str | None, operator: str) -> float:
    """Of an operator, a step, in the profile of V2 whole or without one fusion.

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
    table = CsvTable(path, Problems(path))
    column, count = table.index("operator"), table.index("count")
    calls = sum(int(row[count]) for _, row in table.rows() if row[column] == operator)
    return calls / int(record.options["num_steps"] or 1)

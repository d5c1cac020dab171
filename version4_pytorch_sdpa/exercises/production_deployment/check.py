"""Whether what mine.py saves, loads, exports and measures is the trained model and its latency."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from version4_pytorch_sdpa.exercises.production_deployment import deployment
from workshop import errors, versions
from workshop.errors import WorkshopError
from workshop.exercises.compare import first_difference
from workshop.exercises.frame import Item, Work, judged
from workshop.exercises.predict import Predicted, Question, ask

SIZES = {
    "vocab_size": 101,
    "hidden_dim": 64,
    "intermediate_dim": 96,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_seq_len": 48,
}
"""None is a default of TinyLlamaConfig: a model that is built from those is not this one."""
ODD = (3, 33)
SHAPES = ((1, 1), ODD, (2, SIZES["max_seq_len"]))
EXACT = 1e-5
"""The same operations in fp32, up to another order of a sum."""
CLOSE = 0.98
"""Share of the most tokens a second that is as good, on a machine that others use too."""
_BESIDES = 16_384
"""Bytes of a file besides the weights: names, shapes, sizes. The embedding has 25,856."""
STATUSES = {
    errors.DONE: "pass",
    errors.ANSWER_IS_NO: "fail",
    errors.NOT_ON_THIS_MACHINE: "unknown",
    errors.WRONG_USAGE: "fail",
    errors.INTERRUPTED: "fail",
}


def check(work: Work) -> Iterator[Item]:
    code = (_weights, _export, _latency, _verdict)
    return ask(work, _table, (*code, *PREDICTIONS, _service, _throughput, _statuses))


# --- the weights ---------------------------------------------------------------------------------


def _trained(kind: type[nn.Module]) -> Any:
    """A small V4 after three steps, in training mode, so that no initialisation is its weights."""
    v4 = versions.load("v4")
    torch.manual_seed(0)
    model = kind(v4.TinyLlamaConfig(**SIZES))
    optimizer = v4.configure_optimizer(model, 1e-2)
    for _ in range(3):
        tokens = _tokens(4, 17)
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def _tokens(batch: int, length: int) -> Tensor:
    return torch.randint(SIZES["vocab_size"], (batch, length))


@torch.no_grad()
def _weights(work: Work) -> Iterator[Item]:
    with torch.enable_grad():
        model = _trained(versions.load("v4").TinyLlama)
    mine = work.module
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "weights.pt")
        mine.save_weights(model, path)
        item = _opens_safely(path)
        yield item
        if not item.ok:
            return
        yield _holds_each_weight_once(path, model)
        loaded = mine.load_model(path)
    yield from _is_whole(loaded, model)
    tokens = _tokens(*ODD)
    what = f"load_model: the trained model's logits at B, T = {ODD}"
    yield first_difference(loaded(tokens), model(tokens), what=what, limit=EXACT)


def _opens_safely(path: Path) -> Item:
    what = "save_weights: the file is data, and no code"
    if not path.is_file():
        return Item(False, what, "there is no file at the path that it was given")
    try:
        content = torch.load(path, weights_only=True)
    except Exception as error:
        why = f"torch.load(weights_only=True) refuses it: save no objects\n{_reason(error)}"
        return Item(False, what, why)
    if not isinstance(content, dict) or set(content) != {"config", "weights"}:
        return Item(False, what, 'it should be a dict of "config" and "weights"')
    return Item(True, what)


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _holds_each_weight_once(path: Path, model: nn.Module) -> Item:
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    size = path.stat().st_size
    what = f"save_weights: {size:,} bytes for {weights:,} of weights"
    if size <= weights + _BESIDES:
        return Item(True, what)
    return Item(False, what, "what else is in it? Copies of the tied weight, or Adam's moments?")


def _is_whole(loaded: nn.Module, model: nn.Module) -> Iterator[Item]:
    """Faults that the logits do not show, or show without saying why."""
    why = "it is in training mode: dropout, if there was any, would draw random numbers"
    yield judged(not loaded.training, "load_model: evaluation mode", why)
    parameters = dict(loaded.named_parameters(remove_duplicate=False))
    tied = parameters.get("lm_head.weight") is parameters.get("embed_tokens.weight")
    why = (
        "lm_head.weight and embed_tokens.weight are two parameters now: the logits are right, and "
        "further training changes one without the other. Does load_state_dict assign?"
    )
    yield judged(tied, "load_model: head and embedding are one tensor", why)
    theirs = dict(loaded.named_buffers())
    lost = [name for name, table in model.named_buffers() if not _same(theirs.get(name), table)]
    why = (
        f"{' and '.join(lost)}: no state_dict has them, only a model that was built with its memory"
    )
    yield judged(not lost, "load_model: the RoPE tables are there", why)


def _same(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and not one.is_meta and torch.equal(one, other)


# --- the exported program ------------------------------------------------------------------------


def _with_dropout() -> type[nn.Module]:
    """V4 with dropout, in which training mode differs from evaluation mode."""
    base: Any = versions.load("v4").TinyLlama

    class WithDropout(base):
        def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
            result = super().forward(tokens, targets)
            return nn.functional.dropout(result, 0.1, self.training)

    return WithDropout


def _export(work: Work) -> Iterator[Item]:
    model, mine = _trained(_with_dropout()), work.module
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.pt2")
        mine.export_model(model, path)
        program = mine.load_exported(path)
    model.eval()
    with torch.no_grad():
        tokens = _tokens(2, 3)
        if not torch.equal(program(tokens), program(tokens)):
            why = "two calls differ: the dropout of this model was exported with it"
            yield Item(False, "export_model: evaluation mode", why)
            return
        yield Item(True, "export_model: evaluation mode")
        for shape in SHAPES:
            yield _program_is_right(program, model, _tokens(*shape))


def _program_is_right(program: Any, model: nn.Module, tokens: Tensor) -> Item:
    what = f"the exported program's logits at B, T = {tuple(tokens.shape)}"
    try:
        logits = program(tokens)
    except Exception as error:  # which one depends on the version of PyTorch
        why = f"it does not take this shape: is each size dynamic?\n{_reason(error)}"
        return Item(False, what, why)
    return first_difference(logits, model(tokens), what=what, limit=EXACT)


# --- the clock -----------------------------------------------------------------------------------


class Device:
    """Plays a device and a model on it: a call returns at once, and `wait` when its work is
    done. The first call compiles; of the others every eighth is slow, as when a neighbour works."""

    FIRST, USUAL, SLOW = 400.0, 10.0, 120.0
    """In ms."""
    EVERY = 8

    def __init__(self) -> None:
        self.calls, self._left_s = 0, 0.0

    def __call__(self, tokens: Tensor) -> Tensor:
        slow = self.calls % self.EVERY == self.EVERY - 1
        takes = self.FIRST if self.calls == 0 else self.SLOW if slow else self.USUAL
        self._left_s += takes / 1e3
        self.calls += 1
        return tokens

    def wait(self) -> None:
        time.sleep(self._left_s)
        self._left_s = 0.0


def _latency(work: Work) -> Iterator[Item]:
    device, repeats = Device(), 24
    found = work.module.measure(device, _tokens(1, 2), device.wait, repeats=repeats)
    p50, p95, most = (float(found[f"{name}_ms"]) for name in ("p50", "p95", "max"))
    times = f"p50 {p50:.1f}, p95 {p95:.1f}, max {most:.1f} ms"
    usual, slow, first = Device.USUAL, Device.SLOW, Device.FIRST
    what = (
        f"measure: a device of {usual:.0f} ms, one call in eight {slow:.0f}, the first {first:.0f}"
    )
    # A sleep on a busy machine lasts a bit longer, and never shorter.
    if p50 < 0.9 * usual:
        why = "the clock stopped before the device had done its work: wait() comes first"
    elif device.calls <= repeats or most > 0.9 * first:
        why = "the first call is among the timed ones: it compiles, and is paid once"
    elif p50 > 1.8 * usual:
        why = "half of the calls took 10 ms: is p50 a mean, or of several calls together?"
    elif p95 < 0.9 * slow:
        why = "more than one call in twenty took 120 ms, and p95 hides them"
    elif most < p95:
        why = "the maximum is below the 95th percentile"
    else:
        yield Item(True, what, times)
        return
    yield Item(False, what, f"{times}: {why}")


# --- the release ---------------------------------------------------------------------------------


def _verdict(work: Work) -> Iterator[Item]:
    wrong = [
        f"exit status {status}: {yours!r}, expected {expected!r}"
        for status, expected in STATUSES.items()
        if (yours := work.module.release_verdict(status)) != expected
    ]
    yield Item(not wrong, "release_verdict: pass, fail and unknown", "\n".join(wrong))


def _statuses(work: Work) -> Iterator[Item]:
    for key, what, expected in (
        ("status_same", "the same results", errors.DONE),
        ("status_slower", "V4 5% slower", errors.ANSWER_IS_NO),
        ("status_other_device", "another device", errors.NOT_ON_THIS_MACHINE),
    ):
        yours = work.answers.number(f"findings.{key}")
        why = f"you wrote {yours:g}: run it again, and echo $? directly after it"
        yield judged(yours == expected, f"regression_tester.py on {what}: its exit status", why)


# --- the participant's table ---------------------------------------------------------------------


def _table(work: Work) -> deployment.Rows:
    return deployment.read_table(work.results / deployment.FOLDER / deployment.TABLE)


def _batch_ratio(rows: deployment.Rows) -> float:
    exported = rows["exported"]
    return exported[max(exported)]["p50_ms"] / exported[min(exported)]["p50_ms"]


def _exported_ratio(rows: deployment.Rows) -> float:
    batch = min(rows["exported"])
    return rows["exported"][batch]["p50_ms"] / rows["model"][batch]["p50_ms"]


PREDICTIONS: tuple[Question[deployment.Rows], ...] = (
    Predicted(
        "predict.batch_ratio", "latency at the largest batch, in units of that at the smallest", "",
        _batch_ratio,
        "A call has a fixed part (launches, reading the weights) and one that grows with the "
        "batch. Where the fixed part is large, a larger batch costs little.",
    ),
    Predicted(
        "predict.exported_ratio", "latency of the exported program, in units of the model's", "",
        _exported_ratio,
        "Exported is not compiled: it runs the same operators one by one, from a graph in the "
        "place of your Python. AOTInductor compiles it (deploy.py --aot).",
    ),
)  # fmt: skip


def _service(work: Work) -> Iterator[Item]:
    rows = _table(work)["exported"]
    limit = deployment.SERVICE_LIMIT * rows[min(rows)]["p50_ms"]
    largest = max((batch for batch, row in rows.items() if row["p95_ms"] <= limit), default=0)
    yours = work.answers.number("findings.largest_batch")
    why = f"you wrote {yours:g}; look at each p95 of 'exported'"
    if not largest:
        why = "no p95 is within it: write 0, and look what else uses the machine"
    yield judged(yours == largest, f"the largest batch within the service's {limit:.1f} ms", why)


def _throughput(work: Work) -> Iterator[Item]:
    speeds = {batch: row["tokens_per_s"] for batch, row in _table(work)["exported"].items()}
    yours = work.answers.number("findings.best_batch")
    if yours not in speeds:
        raise WorkshopError(f"findings.best_batch: {yours:g} is no batch size of your table")
    speed, most = speeds[int(yours)], max(speeds.values())
    why = f"you wrote {yours:g}, with {speed:,.0f} tokens/s; another one has {most:,.0f}"
    yield judged(speed >= CLOSE * most, "the batch with the most tokens a second", why)

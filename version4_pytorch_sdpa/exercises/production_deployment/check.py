"""Whether what mine.py saves, loads, exports and measures is the trained model and its latency."""

import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from version4_pytorch_sdpa.exercises.production_deployment import deploy
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
    releases = (partial(_status, *one) for one in RELEASES)
    code = (_weights, _export, _latency, _verdict)
    return ask(work, _table, (*code, *PREDICTIONS, _service, _throughput, *releases))


# --- the weights and the exported program --------------------------------------------------------


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


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _weights(work: Work) -> Iterator[Item]:
    model, mine = _trained(versions.load("v4").TinyLlama), work.module
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = Path(folder, "weights.pt")
        mine.save_weights(model, path)
        fault = _fault_of_file(path)
        yield Item(not fault, "save_weights: the file is data, and no code", fault)
        if fault:
            return
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        size = path.stat().st_size
        yield judged(
            size <= weights + _BESIDES,
            f"save_weights: {size:,} bytes for {weights:,} of weights",
            "what else is in it? Copies of the tied weight, or Adam's moments?",
        )
        loaded = mine.load_model(path)
    yield from _is_whole(loaded, model)
    tokens = _tokens(*ODD)
    what = f"load_model: the trained model's logits at B, T = {ODD}"
    with torch.no_grad():
        yield first_difference(loaded(tokens), model(tokens), what=what, limit=EXACT)


def _fault_of_file(path: Path) -> str:
    if not path.is_file():
        return "there is no file at the path that it was given"
    try:
        content = torch.load(path, weights_only=True)
    except Exception as error:
        return f"torch.load(weights_only=True) refuses it: save no objects\n{_reason(error)}"
    is_dict = isinstance(content, dict) and set(content) == {"config", "weights"}
    return "" if is_dict else 'it should be a dict of "config" and "weights"'


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
    lost = [
        name
        for name, table in model.named_buffers()
        if (its := theirs.get(name)) is None or its.is_meta or not torch.equal(its, table)
    ]
    why = (
        f"{' and '.join(lost)}: no state_dict has them, only a model that was built with its memory"
    )
    yield judged(not lost, "load_model: the RoPE tables are there", why)


def _export(work: Work) -> Iterator[Item]:
    base: Any = versions.load("v4").TinyLlama

    class WithDropout(base):
        """V4 with dropout, in which training mode differs from evaluation mode."""

        def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
            result = super().forward(tokens, targets)
            return nn.functional.dropout(result, 0.1, self.training)

    model, mine = _trained(WithDropout), work.module
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.pt2")
        mine.export_model(model, path)
        program = mine.load_exported(path)
    model.eval()
    tokens = _tokens(2, 3)
    with torch.no_grad():
        same = torch.equal(program(tokens), program(tokens))
        why = "two calls differ: the dropout of this model was exported with it"
        yield judged(same, "export_model: evaluation mode", why)
        for shape in SHAPES if same else ():
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
    usual, slow, first = Device.USUAL, Device.SLOW, Device.FIRST
    found = work.module.measure(device, _tokens(1, 2), device.wait, repeats=repeats)
    p50, p95, most = (float(found[name]) for name in deploy.TIMES)
    why = ""
    # A sleep on a busy machine lasts a bit longer, and never shorter.
    if p50 < 0.9 * usual:
        why = ": the clock stopped before the device had done its work: wait() comes first"
    elif device.calls <= repeats or most > 0.9 * first:
        why = ": the first call is among the timed ones: it compiles, and is paid once"
    elif p50 > 1.8 * usual:
        why = ": half of the calls took 10 ms: is p50 a mean, or of several calls together?"
    elif p95 < 0.9 * slow:
        why = ": more than one call in twenty took 120 ms, and p95 hides them"
    elif most < p95:
        why = ": the maximum is below the 95th percentile"
    yield Item(
        not why,
        f"measure: a device of {usual:.0f} ms, one call in eight {slow:.0f}, the first {first:.0f}",
        f"p50 {p50:.1f}, p95 {p95:.1f}, max {most:.1f} ms{why}",
    )


# --- the release ---------------------------------------------------------------------------------

RELEASES = (
    ("status_same", "the same results", errors.DONE),
    ("status_slower", "V4 5% slower", errors.ANSWER_IS_NO),
    ("status_other_device", "another device", errors.NOT_ON_THIS_MACHINE),
)


def _verdict(work: Work) -> Iterator[Item]:
    wrong = [
        f"exit status {status}: {yours!r}, expected {expected!r}"
        for status, expected in STATUSES.items()
        if (yours := work.module.release_verdict(status)) != expected
    ]
    yield Item(not wrong, "release_verdict: pass, fail and unknown", "\n".join(wrong))


def _status(key: str, what: str, expected: int, work: Work) -> Iterator[Item]:
    yours = work.answers.number(f"findings.{key}")
    why = f"you wrote {yours:g}: run it again, and echo $? directly after it"
    yield judged(yours == expected, f"regression_tester.py on {what}: its exit status", why)


# --- the participant's table ---------------------------------------------------------------------


def _table(work: Work) -> deploy.Rows:
    return deploy.read_table(work.results / deploy.FOLDER / deploy.TABLE)


def _batch_ratio(rows: deploy.Rows) -> float:
    exported = rows["exported"]
    return exported[max(exported)]["p50_ms"] / exported[min(exported)]["p50_ms"]


def _exported_ratio(rows: deploy.Rows) -> float:
    batch = min(rows["exported"])
    return rows["exported"][batch]["p50_ms"] / rows["model"][batch]["p50_ms"]


PREDICTIONS: tuple[Question[deploy.Rows], ...] = (
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
    limit = deploy.SERVICE_LIMIT * rows[min(rows)]["p50_ms"]
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

"""The gate's outcomes, the audit's courses and records as messages."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from workshop import results
from workshop.errors import WorkshopError
from workshop.gate.audit import BUCKETS, PROBES, Course, sketch
from workshop.gate.outcome import CURVE_STEPS, Outcome
from workshop.judge.pipe import NO_MESSAGE, Closed, Message

R = TypeVar("R", bound=results.Run)
NONSENSE = "the process told nonsense"
_GRADIENT, _MOVED, _FINGERPRINT = "gradient ", "moved ", "fingerprint "
_KINDS = ("updates", "initial", "directions")
"""An outcome's further groups of tensors."""


def sketched(outcome: Outcome, seed: int) -> Outcome:
    """An outcome with sketches in place of its large tensors."""
    gradients = {
        name: None if gradient is None else sketch(gradient, name, seed)
        for name, gradient in outcome.gradients.items()
    }
    # A direction is a change of the logits, and the others are changes of weights: each has the
    # sketch of what it is compared with.
    return dataclasses.replace(
        outcome,
        logits=sketch(outcome.logits, "logits", seed),
        gradients=gradients,
        updates={name: sketch(one, name, seed) for name, one in outcome.updates.items()},
        initial={name: sketch(one, name, seed) for name, one in outcome.initial.items()},
        directions={n: sketch(one, "logits", seed) for n, one in outcome.directions.items()},
    )


Sent = tuple[dict[str, Tensor], dict[str, Any]]
"""The tensors and values of a message."""


def of_outcome(outcome: Outcome) -> Sent:
    """The message of a sketched outcome."""
    missing = [name for name, gradient in outcome.gradients.items() if gradient is None]
    tensors = {"logits": outcome.logits, "loss": outcome.loss.double()}
    tensors["curve"] = outcome.curve.double()
    tensors |= {_GRADIENT + n: g for n, g in outcome.gradients.items() if g is not None}
    for kind in _KINDS:
        tensors |= {f"{kind} {name}": one for name, one in getattr(outcome, kind).items()}
    values = {"missing": missing, "moved": outcome.moved, "float8_share": outcome.float8_share}
    return tensors, values | {"logits_shape": list(outcome.logits_shape)}


def to_outcome(message: Message) -> Outcome:
    """Raises Closed: the message is no outcome."""
    values, tensors = message.values, message.tensors
    with expected():
        gradients: dict[str, Tensor | None] = dict.fromkeys(map(str, values["missing"]))
        gradients |= _group(tensors, _GRADIENT, BUCKETS)
        return Outcome(
            logits=_shaped(tensors["logits"], BUCKETS),
            loss=_shaped(tensors["loss"]),
            gradients=gradients,
            curve=_shaped(tensors["curve"], CURVE_STEPS),
            moved=_numbers(values["moved"]),
            float8_share=float(values["float8_share"]),
            logits_shape=tuple(map(int, values["logits_shape"])),
            **{kind: _group(tensors, f"{kind} ", BUCKETS) for kind in _KINDS},
        )


def of_course(course: Course) -> Sent:
    tensors = {"losses": course.losses}
    for prefix, group in (
        (_MOVED, course.moved),
        (_GRADIENT, course.gradients),
        (_FINGERPRINT, course.fingerprint),
    ):
        tensors |= {prefix + name: tensor for name, tensor in group.items()}
    return tensors, {"distance": course.distance}


def to_course(message: Message) -> Course:
    """Raises Closed: the message is no course."""
    with expected():
        return Course(
            losses=message.tensors["losses"].double().flatten(),
            distance=_numbers(message.values["distance"]),
            moved=_group(message.tensors, _MOVED, BUCKETS),
            gradients=_group(message.tensors, _GRADIENT, BUCKETS),
            fingerprint=_group(message.tensors, _FINGERPRINT, PROBES),
        )


def of_fingerprint(fingerprint: dict[str, Tensor]) -> dict[str, Tensor]:
    return {_FINGERPRINT + name: numbers for name, numbers in fingerprint.items()}


def to_fingerprint(message: Message) -> dict[str, Tensor]:
    """Raises Closed: the message is no fingerprint."""
    with expected():
        return _group(message.tensors, _FINGERPRINT, PROBES)


def to_record(kind: type[R], content: dict[str, Any]) -> R:
    """A record of which a process has told a part. Raises Closed: a part is of the wrong type."""
    try:
        return results.convert(kind, content, NONSENSE)
    except WorkshopError as error:
        raise Closed(str(error)) from None


def sensible(run: R) -> R:
    """The same record. Raises Closed: its parts contradict each other."""
    for wrong in run.wrong():
        raise Closed(f"{NONSENSE}: {wrong}")
    return run


@contextlib.contextmanager
def expected() -> Iterator[None]:
    """Turns what goes wrong while an answer is read into Closed."""
    try:
        yield
    except (*NO_MESSAGE, RuntimeError) as e:
        raise Closed(f"the process answered something else ({e!s:.60})") from None


def _group(tensors: dict[str, Tensor], prefix: str, size: int) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): _shaped(tensor, size)
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def _shaped(tensor: Tensor, *shape: int) -> Tensor:
    if tensor.shape != shape:
        raise ValueError(f"{tuple(tensor.shape)} numbers, not {shape}")
    return tensor.to(torch.float64)


def _numbers(values: dict[Any, Any]) -> dict[str, float]:
    return {str(name): float(number) for name, number in values.items()}

"""V1's answers for all candidates of one size and precision, and the batches that are timed."""

import contextlib
import dataclasses
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from workshop.errors import WorkshopError
from workshop.gate import audit
from workshop.gate.audit import Course, Reference
from workshop.gate.outcome import Outcome, Setting, parts
from workshop.judge import wire
from workshop.judge.pipe import Closed
from workshop.judge.process import Process
from workshop.results import NOT_AUDITED
from workshop.run.data import Source


def _secret() -> int:
    return secrets.randbits(62)


@dataclass
class Round:
    """The timed batches of one repeat, and V1's runs on them."""

    batches: Tensor
    """All that is trained up to the last timed step, int32 (steps, 2, B, T)."""
    probe_seed: int = field(default_factory=_secret)
    sketch_seed: int = field(default_factory=_secret)
    exact: Course | None = None
    """V1's run in higher precision."""
    own: Course | None = None
    """V1's run at the candidates' precision: its timed run, or one of the reference process."""
    fused: Course | None = None
    """V1's run at that precision with fused attention; in fp32 none."""
    why: str = f"{NOT_AUDITED}: V1 did not train these batches"
    """The reason why the round has no reference yet."""


class References:
    """One size and precision: the gate's references, and those of each repeat's timed run."""

    def __init__(
        self,
        setting: Setting,
        source: Source,
        *,
        warmup: int,
        learning_rate: float,
        environment: Mapping[str, str],
        v1_is_timed: bool,
    ) -> None:
        """
        Args:
            v1_is_timed: V1, eager, is one of the candidates, so that its timed runs serve.
        """
        self.setting, self.learning_rate = setting, learning_rate
        self._source, self._warmup, self._environment = source, warmup, environment
        self._v1_is_timed = v1_is_timed
        self._process: Process | None = None
        self.gate_answers: dict[tuple[tuple[int, int], int], tuple[Outcome, Outcome]] = {}
        """V1's in higher precision and at the candidates', by shape and part."""
        self._rounds: dict[tuple[int, int], Round] = {}
        self._own_errors: Mapping[str, float] | None = None
        self.gate_seed = _secret()
        """The seed of the gate's sketches."""
        self._facts: dict[str, Any] = {}

    # --- V1's process ---

    @contextlib.contextmanager
    def _v1(self) -> Iterator[Process]:
        """V1's process, started if it has to be. Raises WorkshopError: it has ended."""
        setting = self.setting
        if self._process is None:
            self._process = Process.of_module("workshop.judge.reference_process", self._environment)
            self._facts = {}
        process = self._process
        try:
            if not self._facts:
                asked = {name: getattr(setting, name) for name in ("seed", "batch_size", "seq_len")}
                asked |= {"precision": setting.precision.name, "device": str(setting.device)}
                process.ask("begin", config=dataclasses.asdict(setting.config), **asked)
                self._facts = process.answer("described").values
            yield process
        except Closed as closed:
            self._process = None
            _, reason = process.failure(closed)
            raise WorkshopError(f"V1, with which it is compared: {reason}") from None

    def release(self) -> None:
        """Ends V1's process, whose memory candidates may need."""
        if self._process is not None:
            process, self._process = self._process, None
            process.end()

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()

    @property
    def facts(self) -> dict[str, Any]:
        """V1's process on this size: `shape`, the batch size and sequence length that the gate has
        memory for; `sizes`, the number of weights of each of V1's tensors; `peak_tflops` at this
        precision, and `peak_source`."""
        if not self._facts:
            with self._v1():
                pass
        return self._facts

    # --- the gate ---

    def of_shape(self, shape: tuple[int, int]) -> Setting:
        """The setting with the batch size and sequence length of a gate."""
        return dataclasses.replace(self.setting, batch_size=shape[0], seq_len=shape[1])

    def prepare_gate(self, shape: tuple[int, int]) -> None:
        """Has V1 answer the gate's questions, before a candidate is started. Raises WorkshopError:
        it can't."""
        for part in range(len(parts(self.of_shape(shape)))):
            if (shape, part) in self.gate_answers:
                continue
            with self._v1() as process:
                values = {"part": part, "sketch_seed": self.gate_seed}
                process.ask("gate", batch_size=shape[0], seq_len=shape[1], **values)
                exact = process.answer("outcome", "no memory")
                if exact.kind == "no memory":
                    raise WorkshopError("out of memory: the gate trains V1, too, in fp32")
                own = process.answer("outcome")
                self.gate_answers[shape, part] = wire.to_outcome(exact), wire.to_outcome(own)

    # --- the timed runs ---

    def round(self, repeat: int, again: int, steps: int) -> Round:
        """The batches of a repeat, drawn when it begins. V1's process trains on them now, where no
        timed run of V1 will.

        Args:
            again: 1 for a run that repeats a disturbed one; it gets other batches.
            steps: the number of timed steps.
        """
        if (repeat, again) in self._rounds:
            return self._rounds[repeat, again]
        made = self._rounds[repeat, again] = Round(self.draw(steps))
        first = self._own_errors is None
        if first:
            made.exact = self._train(made, exact=True)
            if made.exact and not self.setting.in_fp32:
                made.fused = self._train(made, fused=True)
                made.exact = made.exact if made.fused else None
        if (again or not self._v1_is_timed) and (made.exact or not first):
            self.lead(made, self._train(made))
        return made

    def draw(self, steps: int, warmup: int | None = None) -> Tensor:
        """The batches of the warm-up (None: of the runs' own), the same in each process, and timed
        ones that no process has seen before: int32 (warmup + steps, 2, B, T)."""
        setting = self.setting
        shape = {
            "batch_size": setting.batch_size,
            "seq_len": setting.seq_len,
            "vocab_size": setting.config.vocab_size,
        }
        warmup = self._warmup if warmup is None else warmup
        known = self._source.draw(steps=warmup, seed=setting.seed, **shape)
        timed = self._source.draw(steps=steps, seed=_secret(), **shape)
        return torch.cat((known, timed)).int()

    def _train(self, made: Round, *, exact: bool = False, fused: bool = False) -> Course | None:
        with self._v1() as process:
            process.ask(
                "train",
                {"batches": made.batches},
                learning_rate=self.learning_rate,
                exact=exact,
                fused=fused,
                probe_seed=made.probe_seed,
                sketch_seed=made.sketch_seed,
            )
            answer = process.answer("course", "no memory")
            if answer.kind == "course":
                return wire.to_course(answer)
        made.why = f"{NOT_AUDITED}: no memory to train V1"
        return None

    def lead(self, made: Round, own: Course | None) -> None:
        """Takes V1's run at the candidates' precision."""
        made.own = own
        if own is not None and made.exact is not None:
            self._own_errors = audit.errors_of(own, made.exact, made.fused or own)

    def reference(self, made: Round) -> Reference | None:
        """The reference of a round's runs; None before V1 has trained on its batches."""
        if self._own_errors is None:
            return None
        if made.exact is not None:
            name = self.setting.reference_name
            return Reference(made.exact, self._own_errors, name, exact=True)
        if made.own is None:
            return None
        return Reference(made.own, self._own_errors, "V1's own run", exact=False)

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
from workshop.gate import audit, parity
from workshop.gate.audit import Course, Reference
from workshop.gate.parity import Outcome, Setting
from workshop.judge import wire
from workshop.judge.pipe import Closed
from workshop.judge.process import Process
from workshop.results import NOT_AUDITED
from workshop.run.data import Source


@dataclass
class Round:
    """The timed batches of one repeat, and V1's run on them."""

    batches: Tensor
    """All that is trained up to the last timed step, int32 (steps, 2, B, T)."""
    probe_seed: int = field(default_factory=lambda: secrets.randbits(62))
    sketch_seed: int = field(default_factory=lambda: secrets.randbits(62))
    truth: Course | None = None
    """V1's in higher precision."""
    own: Course | None = None
    """V1's at the candidates' precision: its timed run, or the reference's."""
    why: str = f"{NOT_AUDITED}: V1 did not train these batches"
    """Why there is no reference, as long as there is none."""


class Case:
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
        """`v1_is_timed`: V1, eager, is one of the candidates, so that its timed runs serve."""
        self.setting, self.learning_rate = setting, learning_rate
        self._source, self._warmup, self._environment = source, warmup, environment
        self._v1_is_timed = v1_is_timed
        self._process: Process | None = None
        self.gate_answers: dict[tuple[tuple[int, int], int], tuple[Outcome, Outcome]] = {}
        """V1's in higher precision and at the candidates', by shape and part."""
        self._rounds: dict[tuple[int, int], Round] = {}
        self._own_errors: Mapping[str, float] | None = None
        self.gate_seed = secrets.randbits(62)
        """The seed of the gate's sketches."""
        self._described: dict[str, Any] = {}

    # --- V1's process ---

    @contextlib.contextmanager
    def _v1(self) -> Iterator[Process]:
        """V1's process, started if it has to be. Raises WorkshopError: it has ended."""
        if self._process is None:
            self._process = Process.of_module("workshop.judge.reference", self._environment)
            self._described = {}
        process, setting = self._process, self.setting
        try:
            if not self._described:
                process.ask(
                    "begin",
                    config=dataclasses.asdict(setting.config),
                    precision=setting.precision.name,
                    device=str(setting.device),
                    seed=setting.seed,
                    batch_size=setting.batch_size,
                    seq_len=setting.seq_len,
                )
                self._described = process.answer("described").values
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

    def _describe(self, what: str) -> Any:
        if not self._described:
            with self._v1():
                pass
        return self._described[what]

    @property
    def gate_shape(self) -> tuple[int, int]:
        """Batch size and sequence length that the gate has memory for."""
        batch_size, seq_len = self._describe("shape")
        return batch_size, seq_len

    @property
    def peak(self) -> tuple[float, str]:
        """TFLOP/s at this precision, and where the figure is from."""
        return self._describe("peak_tflops"), self._describe("peak_source")

    @property
    def sizes(self) -> dict[str, int]:
        """The number of weights of each of V1's tensors."""
        found: dict[str, int] = self._describe("sizes")
        return found

    # --- the gate ---

    def of_shape(self, shape: tuple[int, int]) -> Setting:
        """The setting with the batch size and sequence length of a gate."""
        return dataclasses.replace(self.setting, batch_size=shape[0], seq_len=shape[1])

    def prepare_gate(self, shape: tuple[int, int]) -> None:
        """Has V1 answer the gate's questions, before a candidate is started. Raises WorkshopError:
        it can't."""
        for part in range(len(parity.parts(self.of_shape(shape)))):
            key = shape, part
            if key not in self.gate_answers:
                with self._v1() as process:
                    values = {"part": part, "sketch_seed": self.gate_seed}
                    process.ask("gate", batch_size=shape[0], seq_len=shape[1], **values)
                    truth = process.answer("outcome", "no memory")
                    if truth.kind == "no memory":
                        raise WorkshopError("out of memory: the gate trains V1, too, in fp32")
                    own = process.answer("outcome")
                    self.gate_answers[key] = wire.to_outcome(truth), wire.to_outcome(own)

    # --- the timed runs ---

    def round(self, repeat: int, again: int, steps: int) -> Round:
        """The batches of a repeat, drawn when it begins. What V1's timed run does not answer,
        V1's process does now.

        Args:
            again: 1 for a run that repeats one that was disturbed: it has batches of its own.
            steps: how many are timed.
        """
        if (repeat, again) in self._rounds:
            return self._rounds[repeat, again]
        made = Round(self.draw(steps))
        self._rounds[repeat, again] = made
        first = self._own_errors is None
        if first:
            made.truth = self._train(made, exact=True)
        if (again or not self._v1_is_timed) and (made.truth or not first):
            self.lead(made, self._train(made, exact=False))
        return made

    def draw(self, steps: int, warmup: int | None = None) -> Tensor:
        """The batches of the warm-up (None: as long as the case's), the same in each process, and
        timed ones that nobody has seen before: int32 (warmup + steps, 2, B, T)."""
        setting = self.setting
        warmup = self._warmup if warmup is None else warmup
        shape = {
            "batch_size": setting.batch_size,
            "seq_len": setting.seq_len,
            "vocab_size": setting.config.vocab_size,
        }
        known = self._source.draw(steps=warmup, seed=setting.seed, **shape)
        timed = self._source.draw(steps=steps, seed=secrets.randbits(62), **shape)
        return torch.cat((known, timed)).int()

    def _train(self, made: Round, *, exact: bool) -> Course | None:
        with self._v1() as process:
            process.ask(
                "train",
                {"batches": made.batches},
                learning_rate=self.learning_rate,
                exact=exact,
                probe_seed=made.probe_seed,
                sketch_seed=made.sketch_seed,
            )
            answer = process.answer("course", "no memory")
            if answer.kind == "course":
                return wire.to_course(answer)
        made.why = f"{NOT_AUDITED}: no memory for V1 in higher precision"
        return None

    def lead(self, made: Round, own: Course | None) -> None:
        """Takes V1's run at the candidates' precision."""
        made.own = own
        if own is not None and made.truth is not None:
            self._own_errors = audit.errors_of(own, made.truth)

    def reference(self, made: Round) -> Reference | None:
        """The reference of a round's runs; None as long as there is none."""
        if self._own_errors is None:
            return None
        if made.truth is not None:
            dtype = str(self.setting.reference_dtype).removeprefix("torch.")
            return Reference(made.truth, self._own_errors, f"V1 in {dtype}", exact=True)
        if made.own is None:
            return None
        return Reference(made.own, self._own_errors, "V1's own run", exact=False)

"""The same seed twice, equal to the bit?

    python -m workshop.determinism
    python -m workshop.determinism --versions v1 --second OMP_NUM_THREADS=1

Each version trains in two processes from the same weights on the same batches, without and with
--deterministic. Losses, weights and the first batch's gradients of the two are compared bit by
bit. The times of both say what the flag costs.
"""

import dataclasses
import itertools
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # PyTorch is not everywhere, and takes seconds to import
    from workshop.needed import import_torch

    import_torch()

import torch
from torch import Tensor

from workshop import errors, request, results, tables, versions
from workshop.arguments import count, option, run, seed_number
from workshop.compare import rows, runner
from workshop.errors import WorkshopError
from workshop.judge.plans import LEARNING_RATE, VersionPlan
from workshop.judge.process import Candidate, in_parallel
from workshop.run import data, deterministic, hardware, interpreter, presets, timing, trainer
from workshop.run.precision import LADDER, get_precision
from workshop.tables import Line, Table

SCHEMA_VERSION = 1
FILE = "determinism.json"
KINDS = ("gradients", "weights")
INTERPRETED = "Triton's interpreter runs a kernel's programs in one order: it shows nothing"


@dataclass
class Options:
    """The command line."""

    versions: list[str] | None = option(
        f"of {', '.join(versions.available())} (default: all)", metavar="V"
    )
    config: str | None = option(
        f"{', '.join(presets.PRESETS)} (default: tiny without a GPU, else small)", metavar="PRESET"
    )
    precision: str = option(f"{', '.join(LADDER)} or auto", "auto")
    num_steps: int | None = option(
        f"timed steps (default {request.USUAL.timed}, on a CPU {request.ON_A_CPU.timed})",
        type=count,
    )
    seed: int = option("of weights and batches", 42, type=seed_number)
    second: list[str] = option(
        "environment of the second process alone: what else has to be the same?", [],
        metavar="NAME=VALUE",
    )  # fmt: skip
    jobs: int = option("processes that prepare at the same time", 2, type=count)
    device: str = option("auto, cpu, cuda or cuda:N", "auto")
    output_dir: Path = option(
        f"for {FILE} (default: results/determinism of this checkout)",
        results.DEFAULT_FOLDER / "determinism",
    )


def main(argv: list[str] | None = None) -> int:
    return run(
        Options,
        _compare,
        argv,
        interrupted="interrupted: the versions that were complete are saved",
        prog="python -m workshop.determinism",
        description="Trains each version twice from one seed, without and with --deterministic: "
        "are the two equal to the bit, and what does the flag cost?",
        epilog="Exit status: 0 equal with --deterministic, 1 not equal or a process failed, "
        "2 wrong usage, 77 this machine can run none of them, 130 interrupted.",
    )


def _compare(options: Options) -> int:
    errors.require("rich")
    for word in options.second:
        if "=" not in word:
            raise WorkshopError(f"--second {word}: give it as NAME=VALUE")
    device = hardware.get_device(options.device)
    precision = get_precision(options.precision, device, LADDER).name
    config = options.config or presets.default_preset(device.type)
    keys = versions.baseline_first(options.versions or versions.available())
    path = results.prepare_folder(options.output_dir) / FILE
    record = {"schema_version": SCHEMA_VERSION, **request.begun(device), "config": config}
    record |= {"precision": precision, "seed": options.seed, "second": options.second, "rows": []}
    for key in keys:
        version = versions.get_version(key)
        if missing := versions.missing(version):
            print(f"{key}: skipped: {missing}")
        elif interpreter.serves(version, device):
            print(f"{key}: skipped: {INTERPRETED}")
        else:
            record["rows"] += _of_version(options, VersionPlan(key, config, precision), device)
            results.write_text(path, file_text(record))
    if not record["rows"]:
        return errors.NOT_ON_THIS_MACHINE
    tables.print_tables(shown(record))
    print(f"Written: {path}")
    found = record["rows"]
    bad = any(row["error"] or (row["deterministic"] and not is_equal(row)) for row in found)
    return errors.ANSWER_IS_NO if bad else errors.DONE


# --- the processes -------------------------------------------------------------------------------


class Twin(Candidate):
    """A process that trains a version; another one with the same seed has to train the same."""

    def __init__(
        self, plan: VersionPlan, options: Options, on: bool, environment: Mapping[str, str]
    ) -> None:
        """`on`: --deterministic."""
        self.on, self._seed = on, options.seed
        self.error = ""
        self.step_ms: list[float] = []
        self.found: dict[str, dict[str, Tensor]] = {}
        """`losses`, of all steps, and the tensors of KINDS by V1's names."""
        self._config, batch_size, seq_len = plan.model_config()
        usual = request.USUAL if options.device.startswith("cuda") else request.ON_A_CPU
        self.schedule = trainer.Schedule(usual.warmup, options.num_steps or usual.timed, 0)
        self.shape = {"batch_size": batch_size, "seq_len": seq_len}
        self._batches = data.Source("text").draw(
            steps=self.schedule.batches, vocab_size=self._config.vocab_size, seed=self._seed,
            **self.shape,
        ).int()  # fmt: skip
        program = versions.get_version(plan.version).path
        command = [sys.executable, str(program), *plan.flags(), "--device", options.device]
        super().__init__(command + [deterministic.FLAG] * on, environment)

    def _get_ready(self) -> None:
        ask = self._process.ask
        ask("build", config=dataclasses.asdict(self._config), **self.shape)
        start = {"seed": self._seed, "learning_rate": LEARNING_RATE}
        ask("gradients", {"batch": self._batches[0]}, **start)
        self.found["gradients"] = self._process.answer("gradients").tensors
        steps = dataclasses.asdict(self.schedule)
        ask("train", {"batches": self._batches}, **start, **steps)
        self._process.answer("ready")

    def measure(self) -> None:
        """Times its steps, and takes what it has trained."""
        if self.error:
            return
        process, timed = self._process, self._batches[self.schedule.warmup :]
        process.resume()
        try:
            process.timed("go", {"batches": timed}, "done", seed=self._seed)
            process.ask("sketch", seed=self._seed)
            self.found["losses"] = {"losses": process.answer("course").tensors["losses"]}
            self.step_ms = process.answer("details").values["step_ms"]
            process.ask("weights")
            self.found["weights"] = process.answer("weights").tensors
            process.end()
        except WorkshopError as error:
            self._end(error)

    def _end(self, error: WorkshopError) -> None:
        _, self.error = self._process.failure(error)


def _of_version(options: Options, plan: VersionPlan, device: torch.device) -> list[dict[str, Any]]:
    """A version's two rows, without and with the flag."""
    options = dataclasses.replace(options, device=str(device))
    second = dict(word.split("=", 1) for word in options.second)
    runs: dict[bool, list[Twin]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as caches:

        def start(on: bool, more: Mapping[str, str]) -> Twin:
            environment = runner.environment(device, beside=options.jobs - 1)
            if device.type == "cuda":  # or the second would find what the first has chosen
                environment["TORCHINDUCTOR_CACHE_DIR"] = f"{caches}/{on}{more is second}"
            return Twin(plan, options, on, {**environment, **more})

        # Alternating, so that a machine that becomes hot or busy does so for both.
        order = iter(((False, {}), (True, {}), (True, second), (False, second)))
        while batch := list(itertools.islice(order, options.jobs)):
            print(f"{plan.version}: {len(batch)} of 4 processes prepare ...", flush=True)
            with in_parallel(itertools.starmap(start, batch)) as twins:
                for twin in twins:
                    twin.measure()
                    runs[twin.on].append(twin)
    return [row(plan.version, on, pair) for on, pair in runs.items()]


# --- what the two have in common -----------------------------------------------------------------


def row(version: str, on: bool, pair: Sequence[Twin]) -> dict[str, Any]:
    """Two processes as the file has them."""
    failed = next((one for one in pair if one.error), None)
    made: dict[str, Any] = {
        "version": version,
        "deterministic": on,
        "error": failed.error if failed else None,
        **pair[0].shape,
        "warmup_steps": pair[0].schedule.warmup,
        "processes": [
            {"step_ms": one.step_ms, "losses": results.finite(losses["losses"].tolist())}
            for one in pair
            if (losses := one.found.get("losses"))
        ],
    }
    if failed:
        return made
    first, other = (one.found for one in pair)
    of_losses = (first["losses"]["losses"] != other["losses"]["losses"]).nonzero()
    made["first_other_loss"] = int(of_losses[0]) + 1 if len(of_losses) else None
    for kind in KINDS:
        made[kind] = {"tensors": len(first[kind]), "differ": [*differing(first[kind], other[kind])]}
    return made


def differing(first: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Iterator[dict[str, Any]]:
    """The fp32 tensors whose bits differ, in the order of the model, with how many of their
    numbers do, and by how much at most, as a share of the tensor's largest number."""
    for name, tensor in first.items():
        bits, others = tensor.view(torch.int32), other[name].view(torch.int32)
        if wrong := int((bits != others).sum()):
            apart = (tensor.double() - other[name].double()).abs().max() / tensor.abs().max()
            share = float(apart) if apart.isfinite() else None
            yield {"name": name, "numbers": tensor.numel(), "differ": wrong, "at_most": share}


def file_text(record: Mapping[str, Any]) -> str:
    """The record as JSON, a line for each row."""
    head = json.dumps({name: value for name, value in record.items() if name != "rows"})
    lines = ",\n".join(json.dumps(one, allow_nan=False) for one in record["rows"])
    return f'{head[:-1]}, "rows": [\n{lines}\n]}}\n'


def is_equal(row: Mapping[str, Any]) -> bool:
    return (
        not row["error"]
        and row["first_other_loss"] is None
        and not any(row[kind]["differ"] for kind in KINDS)
    )


def cost(off: Mapping[str, Any], on: Mapping[str, Any]) -> timing.Ratio | None:
    """A version's step with the flag over its step without; None where one of them failed."""
    sides = [[one["step_ms"] for one in row["processes"]] for row in (on, off)]
    return timing.speedup(*sides) if all(sides) else None


# --- the tables ----------------------------------------------------------------------------------


def shown(record: Mapping[str, Any]) -> list[Table]:
    """One table, with the tensors that differ below it."""
    header = ("version", deterministic.FLAG, "losses", "gradients", "weights", "ms a step", "cost")
    lines, notes = list[Line](), list[str]()
    for off, on in zip(record["rows"][::2], record["rows"][1::2], strict=True):
        for one in (off, on):
            name = "on" if one["deterministic"] else "off"
            ratio = cost(off, on) if one is on else None
            cells = [one["version"], name, *_cells(one), rows.ratio(ratio)]
            lines.append(Line(cells, section=one["version"]))
            notes += _notes(one, name)
    steps = max((len(p["losses"]) for one in record["rows"] for p in one["processes"]), default=0)
    where = f"{record['config']}, {record['precision']}, {record['device']['name']}"
    differs = f"; second process with {' '.join(record['second'])}" * bool(record["second"])
    notes.append(
        "gradients: of the first batch, before any update; weights: after the last step; "
        "cost: the median step with the flag over that without"
    )
    title = f"The same seed twice: {where}, {steps} steps{differs}"
    return [Table(title, header, lines, notes, left=(0, 1, 2, 3, 4))]


def _cells(one: Mapping[str, Any]) -> list[str]:
    if one["error"]:
        return ["failed", "-", "-", "-"]
    step, times = one["first_other_loss"], [p["step_ms"] for p in one["processes"]]
    return [
        "equal" if step is None else f"differ from step {step} on",
        *(
            f"{len(found)} of {one[kind]['tensors']} differ" if found else "equal"
            for kind in KINDS
            for found in [one[kind]["differ"]]
        ),
        f"{timing.median(sorted(itertools.chain(*times))):.2f}",
    ]


def _notes(one: Mapping[str, Any], name: str) -> Iterable[str]:
    """Its error, or the tensor that differs most; `name` says how the flag is."""
    where = f"{one['version']}, {deterministic.FLAG} {name}"
    if one["error"]:
        yield f"{where}: {one['error']}"
        return
    for kind in KINDS:
        most = max(one[kind]["differ"], key=lambda found: found["at_most"] or 0.0, default=None)
        if most:
            share = f", by up to {most['at_most']:.1g} of its largest" if most["at_most"] else ""
            yield (
                f"{where}, {kind}: {most['name']} differs most, in {most['differ']:,} of "
                f"{most['numbers']:,} numbers{share}"
            )


if __name__ == "__main__":
    sys.exit(main())

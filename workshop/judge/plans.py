"""Plans of single processes, and the records that they begin with."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workshop import results, versions
from workshop.arguments import option, seed_number
from workshop.request import ON_A_CPU, USUAL, begun, execution
from workshop.results import RunResult
from workshop.run import deterministic, hardware, presets, trainer
from workshop.run.precision import LADDER

LEARNING_RATE = 3e-4
REPEATS = 3
Options = Mapping[str, str | bool]


@dataclass
class Asked:
    """The options that say what a comparison runs."""

    versions: list[str] | None = option(
        f"of {', '.join(versions.available())} (default: all), and peers "
        f"{', '.join(versions.PEERS)}",
        metavar="V",
    )
    config: list[str] | None = option(
        f"of {', '.join(presets.PRESETS)} (default: tiny without a GPU, else small)",
        metavar="PRESET",
    )
    precision: list[str] = option(
        f"{', '.join(LADDER)} or auto: bf16 on a GPU that has it, else fp32 (default auto)",
        ["auto"],
        metavar="P",
    )
    num_steps: int | None = option(
        f"timed steps a run (default {USUAL.timed}, on a CPU {ON_A_CPU.timed})", None
    )
    warmup_steps: int | None = option(
        f"steps before them (default {USUAL.warmup}, on a CPU {ON_A_CPU.warmup})", None
    )
    repeats: int = option("processes a version", REPEATS)
    jobs: int | None = option(
        "processes that prepare at the same time; each is timed alone (default 1, on a CPU 2)", None
    )
    device: str = option("auto, cpu, cuda or cuda:N (default auto: GPU if any)", "auto")
    data: str = option("where batches are drawn from", "text", choices=("text", "synthetic"))
    seed: int = option("of weights and batches", 42, type=seed_number)
    deterministic: bool = option(deterministic.HELP)
    output_dir: Path = option(
        "the runs go to OUTPUT_DIR/runs/ (default: results/ of this checkout)",
        results.DEFAULT_FOLDER,
    )


@dataclass(frozen=True)
class VersionPlan:
    """One process to run."""

    version: str
    config: str
    precision: str
    repeat: int = 0
    kind: results.Kind = "run"
    interpreted: bool = False
    """Triton's interpreter runs it: one process, which passes the gate and times nothing."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Differences from the preset: `batch_size`, `seq_len` or fields of TinyLlamaConfig."""
    options: Options = field(default_factory=dict)
    """Differences from the version's defaults: `compile`, `cuda_graph` or its switches, as a
    result file records them."""
    name: str = ""
    """Distinguishes it from others of its version, size and precision."""
    skipped: str = ""
    """Why it is not run, but recorded as skipped."""
    prediction: Mapping[str, float] = field(default_factory=dict)
    """The numbers behind `skipped`, for the record's options."""
    again: bool = False
    """Whether it repeats a run that other programs disturbed."""

    @property
    def label(self) -> str:
        name = f", {self.name}" if self.name else ""
        return f"{self.version} {self.config} {self.precision}{name}"

    def shape(self) -> tuple[str, dict[str, int]]:
        """The config's name, "custom" unless it is the preset's, and all sizes."""
        preset = presets.get_preset(self.config)
        own = preset.model() | {"batch_size": preset.batch_size, "seq_len": preset.seq_len}
        sizes = {**own, **self.sizes}
        return (self.config if sizes == own else "custom"), sizes

    def model_config(self) -> tuple[Any, int, int]:
        """V1's config, which every candidate gets whole; batch size and sequence length."""
        _, sizes = self.shape()
        batch_size, seq_len = sizes.pop("batch_size"), sizes.pop("seq_len")
        config = versions.load(versions.BASELINE).TinyLlamaConfig(**sizes)
        return config, batch_size, seq_len

    def flags(self) -> list[str]:
        """The flags of the version's command line for its size, precision and options."""
        words = ["--config", self.config, "--precision", self.precision]
        for name, size in self.sizes.items():
            words += [flag(name), str(size)]
        for name, value in self.options.items():
            if isinstance(value, str):
                words += [flag(name), value]
            elif not value:
                words.append(flag(f"no_{name}"))
            elif not name.startswith("fuse_"):  # a switch is on unless it is switched off
                words.append(flag(name))
        return words

    def schedule(self, asked: Asked) -> trainer.Schedule:
        """Its steps: of an interpreted run none, as its gate has shown what it can show."""
        return trainer.Schedule(0, 0, 0) if self.interpreted else timed_steps(asked)


def timed_steps(asked: Asked) -> trainer.Schedule:
    """The steps of a process that is timed."""
    usual = USUAL if hardware.get_device(asked.device).type == "cuda" else ON_A_CPU
    timed = asked.num_steps or usual.timed
    return trainer.Schedule(asked.warmup_steps or usual.warmup, timed, min(usual.phases, timed))


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def record(plan: VersionPlan, asked: Asked, session: str, beside: int = 0) -> RunResult:
    """The record of a process that has not measured yet: what was asked for.

    Args:
        beside: the number of others that prepare at the same time.
    """
    version, device = versions.get_version(plan.version), hardware.get_device(asked.device)
    config, batch_size, seq_len = plan.model_config()
    mode, graph = plan.options.get("compile"), plan.options.get("cuda_graph")
    compile_mode, cuda_graph = execution(
        version,
        None if mode is None else str(mode),
        None if graph is None else bool(graph),
        device,
        plan.interpreted,
        notify=lambda _: None,
    )
    options: dict[str, str | int | float | bool | None] = {
        "compile": compile_mode,
        "cuda_graph": cuda_graph,
        "learning_rate": LEARNING_RATE,
        "seed": asked.seed,
        "num_steps": plan.schedule(asked).timed,
        **dict.fromkeys(versions.switches(version), True),
        **plan.options,
        **plan.prediction,
    }
    if version.triton:
        options["interpreted"] = plan.interpreted
    if asked.deterministic:
        options["deterministic"] = True
    if plan.again:
        options["again"] = True
    return RunResult(
        version=plan.version,
        config_name=plan.shape()[0],
        config=dataclasses.asdict(config),
        batch_size=batch_size,
        seq_len=seq_len,
        precision=plan.precision,
        warmup_steps=plan.schedule(asked).warmup,
        kind=plan.kind,
        options=options,
        prepared_beside=beside,
        command=["python", version.path.name, *plan.flags()],
        **begun(device, session),
    )

"""A run as it is asked for: flags, checked arguments, batches, memory, the empty record."""

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from workshop import results
from workshop.arguments import add_options, option, seed_number
from workshop.errors import OutOfMemory, WorkshopError
from workshop.results import RunResult, Value
from workshop.run import data, deterministic, flops, hardware, interpreter, trainer
from workshop.run.precision import LADDER, Precision, get_precision
from workshop.run.presets import PRESETS, check_sizes, default_preset, get_preset
from workshop.versions import Version

_SIZES = (*results.MODEL_SIZES, "max_seq_len")
PHASES = 10
"""Steps, at most, in which the phases are timed."""
USUAL = trainer.Schedule(warmup=5, timed=20, phases=PHASES)
"""The steps of a run, and of each process of a comparison, by default."""
ON_A_CPU = trainer.Schedule(warmup=3, timed=10, phases=3)
"""Those of each process of a comparison without a GPU, whose steps take a hundred times longer."""
_INTERPRETED = trainer.Schedule(warmup=1, timed=3, phases=0)
"""The same in Triton's interpreter: enough to see the loss fall. A phase's time says nothing."""
_WARMUP_OF_PROFILE = trainer.EAGER_STEPS_BEFORE_CAPTURE
"""None that replays a captured step: Proton would count its kernels with those of the profiled."""
PROFILES = results.DEFAULT_FOLDER / "profiles"


@dataclass(frozen=True)
class Request:
    """A run that has been checked: everything in it exists here and fits together."""

    module: ModuleType
    version: Version
    config_name: str
    config: Any
    batch_size: int
    seq_len: int
    precision: Precision
    device: torch.device
    compile_mode: str
    cuda_graph: bool
    interpreted: bool
    """Whether Triton's interpreter runs its kernels."""
    schedule: trainer.Schedule
    switches: dict[str, bool]
    output_dir: Path
    arguments: argparse.Namespace

    def build(self) -> nn.Module:
        """The model as it will be timed: its switches set, on the device, compiled if asked."""
        model = self.build_on(self.device)  # the weights are loaded later: draw these quickly
        if self.compile_mode != "none":
            trainer.part_of_version(model, "compile_model")(model, self.compile_mode)
        return model

    def build_on(self, device: torch.device) -> nn.Module:
        """The model with its switches set. Raises WorkshopError: the version has no code for these
        sizes."""
        options = {"fusions": self.module.Fusions(**self.switches)} if self.switches else {}
        try:
            with torch.device(device):
                model: nn.Module = self.module.TinyLlama(self.config, **options)
        except ValueError as error:
            raise WorkshopError(str(error)) from None
        return model


# --- arguments -----------------------------------------------------------------------------------


@dataclass
class Flags:
    """The flags of every version, except its sizes and its switches."""

    batch_size: int | None = option("sequences a step (default: the preset's)")
    seq_len: int | None = option("tokens of a sequence (default: the preset's)")
    num_steps: int | None = option(
        f"timed steps (default {USUAL.timed}; {_INTERPRETED.timed} in Triton's interpreter)"
    )
    warmup_steps: int | None = option(
        f"steps before the clock starts (default {USUAL.warmup}; {_INTERPRETED.warmup} in "
        "Triton's interpreter)"
    )
    learning_rate: float = option("AdamW's", 3e-4)
    seed: int = option("of weights and batches", 42, type=seed_number)
    deterministic: bool = option(deterministic.HELP)
    precision: str = option(
        f"{', '.join(LADDER)} (docs/fp8.md); auto is bf16 on a GPU that has it, else fp32 "
        "(default auto)",
        "auto",
    )
    device: str = option("auto, cpu, cuda, cuda:N (default auto: GPU if any)", "auto")
    data: str = option("where batches are drawn from", "text", choices=("text", "synthetic"))
    text_file: Path | None = option(
        "the text, byte by byte (default: the Python standard library's sources)", metavar="PATH"
    )
    compile: str | None = option(
        "torch.compile's mode (default: the version's own)",
        nargs="?",
        const="default",
        choices=trainer.COMPILE_MODES,
    )
    cuda_graph: bool | None = option(
        "capture the whole step, CUDA or HIP, and replay it (default: V3 and V4 do, on a GPU)",
        action=argparse.BooleanOptionalAction,
    )
    output_dir: Path | None = option(
        "the result goes to OUTPUT_DIR/runs/ (default: results/ of this checkout)"
    )
    profile_steps: int | None = option(
        f"for a profiler: after {_WARMUP_OF_PROFILE} steps of warm-up train N steps with marker "
        "ranges, between the calls that start and stop NVIDIA's profilers; no gate, no clock; what "
        "was profiled goes to OUTPUT_DIR/run.jsonl (default there: results/profiles/VERSION/steps)"
    )
    candidate: bool = option(argparse.SUPPRESS)  # see workshop/judge
    no_gate: bool = option("skip the comparison with V1; the result says so and earns no speed-up")


def build_parser(version: Version, module: ModuleType) -> argparse.ArgumentParser:
    """The flags of one version; `Fusions` in its module adds a `--no-...` switch a field."""
    parser = argparse.ArgumentParser(
        description=f"Trains Tiny-LLaMA {version.key} ({version.title}), after showing that it "
        "is V1's model, and prints what a step takes.",
        epilog="Exit status: 0 done, 1 the gate failed or memory ran out, 2 wrong usage, "
        f"{'77 Triton is missing, ' if version.triton else ''}130 interrupted by Ctrl-C "
        "or SIGTERM (the timed steps so far are saved).",
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--config",
        metavar="PRESET",
        help=f"{', '.join(PRESETS)}: model, batch size and sequence length, which the flags below "
        "override (default: tiny without a GPU, else small)",
    )
    for name in _SIZES:
        default = " (default 2048)" if name == "max_seq_len" else ""
        flag = f"--{name.replace('_', '-')}"
        model.add_argument(flag, type=int, metavar="N", help=f"overrides the preset's{default}")
    add_options(parser.add_argument_group("training"), Flags)
    if switches := _switches(module):
        group = parser.add_argument_group("ablation: run plain PyTorch for one part")
        for name in switches:
            flag = f"--no-{name.replace('_', '-')}"
            group.add_argument(flag, dest=name, action="store_false")
    return parser


def _switches(module: ModuleType) -> list[str]:
    fusions = getattr(module, "Fusions", None)
    return [field.name for field in dataclasses.fields(fusions)] if fusions else []


def check_arguments(version: Version, module: ModuleType, arguments: argparse.Namespace) -> Request:
    """Raises WorkshopError, one line, for anything that can't run."""
    _check_flags(arguments)
    if arguments.deterministic:
        deterministic.switch_on()
    device = hardware.get_device(arguments.device)
    interpreter.check_device(version, device)
    interpreted = interpreter.serves(version, device)
    precision = get_precision(arguments.precision, device, LADDER)
    config_name, config, batch_size, seq_len = _sizes(module, arguments, device.type)
    compile_mode, cuda_graph = execution(
        version, arguments.compile, arguments.cuda_graph, device, interpreted, notify=print
    )
    folder = PROFILES / version.key / "steps" if arguments.profile_steps else results.DEFAULT_FOLDER
    trainer.check_options(device, precision, compile_mode, cuda_graph)
    return Request(
        module=module,
        version=version,
        config_name=config_name,
        config=config,
        batch_size=batch_size,
        seq_len=seq_len,
        precision=precision,
        device=device,
        compile_mode=compile_mode,
        cuda_graph=cuda_graph,
        interpreted=interpreted,
        schedule=schedule(
            arguments.warmup_steps, arguments.num_steps, interpreted, arguments.profile_steps
        ),
        switches={name: getattr(arguments, name) for name in _switches(module)},
        output_dir=arguments.output_dir or folder,
        arguments=arguments,
    )


def _check_flags(arguments: argparse.Namespace) -> None:
    positive = "batch_size seq_len num_steps warmup_steps profile_steps learning_rate"
    for name in positive.split():
        value = getattr(arguments, name)
        if value is not None and not 0 < value < 1e30:  # what AdamW computes with in fp32
            flag = name.replace("_", "-")
            raise WorkshopError(f"--{flag} {value}: it must be a positive number below 1e30")
    if arguments.text_file is not None and arguments.data != "text":
        raise WorkshopError("--text-file goes with --data text")
    if arguments.profile_steps and (arguments.num_steps or arguments.no_gate):
        raise WorkshopError("--num-steps and --no-gate have no effect with --profile-steps")


def _sizes(
    module: ModuleType, arguments: argparse.Namespace, device_type: str
) -> tuple[str, Any, int, int]:
    """The preset's name, or "custom"; config, batch size and sequence length."""
    config_name = arguments.config or default_preset(device_type)
    preset = get_preset(config_name)
    batch_size = arguments.batch_size or preset.batch_size
    seq_len = arguments.seq_len or preset.seq_len
    as_named = module.TinyLlamaConfig(**preset.model())
    given = {name: n for name in _SIZES if (n := getattr(arguments, name)) is not None}
    config = dataclasses.replace(as_named, **given)
    check_sizes(config)
    if seq_len > config.max_seq_len:
        raise WorkshopError(
            f"--seq-len {seq_len} is longer than the model's max_seq_len {config.max_seq_len}: "
            "lower it or raise --max-seq-len"
        )
    if seq_len == 1:
        raise WorkshopError(
            "--seq-len 1: attention over one token gives q and k no gradient; use at least 2"
        )
    if (config, batch_size, seq_len) != (as_named, preset.batch_size, preset.seq_len):
        config_name = "custom"
    return config_name, config, batch_size, seq_len


def schedule(
    warmup: int | None, timed: int | None, interpreted: bool, profiled: int | None = None
) -> trainer.Schedule:
    """The steps that were asked for, else those of a default."""
    default = _INTERPRETED if interpreted else USUAL
    if profiled and not interpreted:
        default = trainer.Schedule(_WARMUP_OF_PROFILE, profiled, phases=0)
    timed = profiled or timed or default.timed
    return trainer.Schedule(warmup or default.warmup, timed, phases=min(default.phases, timed))


def execution(
    version: Version,
    compile_mode: str | None,
    cuda_graph: bool | None,
    device: torch.device,
    interpreted: bool,
    notify: trainer.Notify,
) -> tuple[str, bool]:
    """Compile mode and graph: what was asked for, else the version's defaults where they work.
    Raises WorkshopError: a graph was asked for of kernels that are interpreted."""
    if compile_mode is None:
        compile_mode = version.compile
        missing = trainer.missing_for_compile(device) if compile_mode != "none" else None
        if missing:
            notify(f"note: {missing} not found, so this runs without torch.compile")
            compile_mode = "none"
    if cuda_graph is None:
        cuda_graph = version.cuda_graph and device.type == "cuda" and not interpreted
    if cuda_graph and interpreted and device.type == "cuda":
        raise WorkshopError(
            "--cuda-graph can't capture what Triton's interpreter does on the host; use "
            f"--no-cuda-graph, or unset {interpreter.VARIABLE}"
        )
    return compile_mode, cuda_graph


Data = tuple[Tensor, dict[str, str | int]]
"""The batches of all steps, int64 (n, 2, B, T) on the host, and what they were cut from."""


def load_data(request: Request) -> Data:
    """Draws the batches of a request's steps. Raises WorkshopError: there is no text for them."""
    arguments = request.arguments
    source = data.Source(arguments.data, arguments.text_file)
    batches = source.draw(
        steps=request.schedule.batches,
        batch_size=request.batch_size,
        seq_len=request.seq_len,
        vocab_size=request.config.vocab_size,
        seed=arguments.seed,
    )
    return batches, source.record


# --- memory -----------------------------------------------------------------------------------


def within_memory(request: Request, work: Callable[[], int], shards: int = 1) -> int:
    """Does the work that a request asks for; its exit status.

    Args:
        shards: over how many processes the training state is spread.

    Raises:
        OutOfMemory: it can't fit, or did not.
        WorkshopError: the version has no code for these sizes.
    """
    _check_memory(request, shards)
    request.build_on(torch.device("meta"))  # says at once, and for nothing, if the sizes won't do
    with trainer.memory_failure_as(partial(_out_of_memory, request)):
        return work()


def _check_memory(request: Request, shards: int) -> None:
    """Raises OutOfMemory, at once, for what can't fit.

    The bound is a low one: the training state, RoPE's tables, and of the activations the
    feed-forward layers' two products alone, which every version keeps for its backward pass; on
    the host the batches, drawn before the clock starts.
    """
    c = request.config
    tokens = request.batch_size * request.seq_len
    bytes_each = 2 if request.precision.autocast_dtype else 4
    on_device = {
        "--hidden-dim, --num-layers or --vocab-size": flops.parameter_count(c)
        * flops.ADAMW_STATE_BYTES_PER_PARAMETER
        / shards,
        "--max-seq-len": 2 * 4 * c.max_seq_len * c.head_dim,
        "--batch-size or --seq-len": tokens * c.num_layers * 2 * c.intermediate_dim * bytes_each,
    }
    steps = request.schedule.batches
    windows = 3 * 8 * tokens * steps  # in int64, beside the tokens and targets cut from them
    on_host = {"--num-steps, --warmup-steps or --batch-size": windows}
    for device, parts in ((request.device, on_device), (torch.device("cpu"), on_host)):
        explain = partial(_out_of_memory, request, lower=max(parts, key=lambda k: parts[k]))
        trainer.check_memory(device, sum(parts.values()), explain)


def _out_of_memory(
    request: Request, what: str, lower: str = "--batch-size or --seq-len"
) -> OutOfMemory:
    state = flops.parameter_count(request.config) * flops.ADAMW_STATE_BYTES_PER_PARAMETER
    return OutOfMemory(
        f"out of memory on {hardware.device_name(request.device)}: {what} at batch size "
        f"{request.batch_size}, sequence length {request.seq_len}, hidden dimension "
        f"{request.config.hidden_dim} (weights, gradients and AdamW alone take "
        f"{state / 1e9:,.2f} GB); lower {lower}, or take a smaller --config"
    )


# --- the record ------------------------------------------------------------------------------


def begun(device: torch.device, session: str = "") -> dict[str, Any]:
    """The fields of a record that say where, when, from which commit and by what command.

    Args:
        session: "" begins a new one.
    """
    return {
        "session": session or results.new_session(),
        "device": hardware.describe(device),
        "software": results.describe_software(),
        "git_commit": results.git_commit(),
        "created": results.now(),
        "parent_command": results.own_command(),
    }


def new_result(request: Request, data_record: dict[str, str | int]) -> RunResult:
    """The record of a run that has not measured yet."""
    options: dict[str, Value] = {
        "compile": request.compile_mode,
        "cuda_graph": request.cuda_graph,
        "learning_rate": request.arguments.learning_rate,
        "seed": request.arguments.seed,
        "num_steps": request.schedule.timed,
        **request.switches,
    }
    if request.version.triton:
        options["interpreted"] = request.interpreted
    if request.arguments.deterministic:
        options["deterministic"] = True
    return RunResult(
        version=request.version.key,
        config_name=request.config_name,
        config=dataclasses.asdict(request.config),
        batch_size=request.batch_size,
        seq_len=request.seq_len,
        precision=request.precision.name,
        warmup_steps=request.schedule.warmup,
        options=options,
        command=results.own_command(),
        data=data_record,
        **begun(request.device),
    )


def print_configuration(request: Request, data_record: dict[str, str | int]) -> None:
    """Says what is about to run, before the first slow thing."""
    c, sequences = request.config, "sequence" if request.batch_size == 1 else "sequences"
    print(f"Tiny-LLaMA {request.version.key}: {request.version.title}")
    print_lines({
        "model": f"{request.config_name}: hidden {c.hidden_dim}, FFN {c.intermediate_dim}, "
        f"{c.num_layers} layers, {c.num_heads} heads, {c.num_kv_heads} kv heads, "
        f"vocab {c.vocab_size} ({flops.parameter_count(c) / 1e6:,.1f} M parameters)",
        "batch": f"{request.batch_size} {sequences} of {request.seq_len} tokens",
        "device": hardware.device_name(request.device),
        "precision": request.precision.name,
        "compile": request.compile_mode,
        "graph": "whole step captured" if request.cuda_graph else "no",
        "kernels": "in Triton's interpreter, slow" * request.interpreted,
        "data": str(data_record["name"]),
        "switched off": ", ".join(name for name, on in request.switches.items() if not on),
    })  # fmt: skip


def print_lines(values: Mapping[str, str]) -> None:
    """Values by their labels; empty ones are left out."""
    for label, value in values.items():
        if value:
            print(f"  {label:<18} {value}")


def first_and_last(losses: list[float | None]) -> str:
    """A run's loss in step 1 and in the last timed step, as `trainer.Schedule` numbers them."""
    first, last = ("not finite" if x is None else f"{x:.4f}" for x in (losses[0], losses[-1]))
    return f"{first} in step 1, before any update; {last} in step {len(losses)}"

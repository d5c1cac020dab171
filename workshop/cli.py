"""The command line of every `tiny_llama_vN.py`: check the arguments, gate, train, print, save."""

import argparse
import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from workshop import errors, results, versions
from workshop.arguments import parse
from workshop.errors import OutOfMemory, WorkshopError
from workshop.gate import audit, gate_size, parity, plausibility
from workshop.results import RunResult
from workshop.run import chips, data, first_use, flops, hardware, interpreter, timing, trainer
from workshop.run.precision import Precision, get_precision
from workshop.run.presets import PRESETS, check_sizes, default_preset, get_preset
from workshop.versions import Version

_SIZES = (
    "vocab_size",
    "hidden_dim",
    "intermediate_dim",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "max_seq_len",
)
_PROGRESS_LINES = 10
_SECONDS_OF_SILENCE = 10.0
_WARMUP_STEPS, _NUM_STEPS, _MAX_PHASE_STEPS = 10, 50, 10
_WARMUP_OF_PROFILE = trainer.EAGER_STEPS_BEFORE_CAPTURE
"""None that replays a captured step: Proton would count its kernels with those of the profiled."""
_INTERPRETED_STEPS = trainer.Schedule(warmup=1, timed=3, phases=0)
"""What Triton's interpreter trains by default: enough to see the loss fall."""
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
        """The model with its switches set.

        Raises:
            WorkshopError: the version has no code for these sizes.
        """
        options = {}
        if self.switches:
            options["fusions"] = self.module.Fusions(**self.switches)
        try:
            with torch.device(device):
                model: nn.Module = self.module.TinyLlama(self.config, **options)
        except ValueError as error:
            raise WorkshopError(str(error)) from None
        return model


def main(module: ModuleType, argv: list[str] | None = None) -> int:
    """Runs a version's module from the command line; returns the exit status."""
    version = versions.of_file(Path(str(module.__file__)))
    arguments = parse(build_parser(version, module), argv)
    return errors.exit_status(
        lambda: _run(check_arguments(version, module, arguments)),
        interrupted="interrupted before a timed step was complete: nothing saved",
    )


def leave_if_missing(key: str) -> None:
    """Ends the process, in one line and with the status for it, if the version needs what this
    machine lacks. For a version's file to call before it imports that."""
    lack = versions.missing(versions.ALL[key])
    if lack:
        print(f"error: {lack}", file=sys.stderr)
        sys.exit(errors.NOT_ON_THIS_MACHINE)


# --- arguments -----------------------------------------------------------------------------------


def build_parser(version: Version, module: ModuleType) -> argparse.ArgumentParser:
    """The flags of one version; `Fusions` in its module adds a `--no-...` switch a field."""
    parser = argparse.ArgumentParser(
        description=f"Trains Tiny-LLaMA {version.key} ({version.title}), after showing that it "
        "is V1's model, and prints what a step takes.",
        epilog="Exit status: 0 done, 1 the gate is red or memory ran out, 2 wrong usage, "
        f"{'77 Triton is missing, ' if version.triton else ''}130 interrupted by Ctrl-C "
        "or SIGTERM (the timed steps so far are saved).",
    )
    _add_model_flags(parser.add_argument_group("model"))
    _add_training_flags(parser.add_argument_group("training"), version)
    fields = dataclasses.fields(module.Fusions) if hasattr(module, "Fusions") else ()
    if fields:
        group = parser.add_argument_group("ablation: run plain PyTorch for one part")
        for field in fields:
            flag = f"--no-{field.name.replace('_', '-')}"
            group.add_argument(flag, dest=field.name, action="store_false")
    return parser


def _add_model_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--config",
        metavar="PRESET",
        help=f"{', '.join(PRESETS)}: model, batch size and sequence length, which the flags below "
        "override (default: tiny without a GPU, else small)",
    )
    for name in _SIZES:
        flag = f"--{name.replace('_', '-')}"
        default = " (default 2048)" if name == "max_seq_len" else ""
        group.add_argument(flag, type=int, metavar="N", help=f"overrides the preset's{default}")


def _add_training_flags(group: argparse._ArgumentGroup, version: Version) -> None:
    add = group.add_argument
    add("--batch-size", type=int, metavar="N", help="sequences a step (default: the preset's)")
    add("--seq-len", type=int, metavar="N", help="tokens of a sequence (default: the preset's)")
    few = _INTERPRETED_STEPS
    warmup, timed = (
        f"{usual}; {least} in Triton's interpreter" if version.triton else str(usual)
        for usual, least in ((_WARMUP_STEPS, few.warmup), (_NUM_STEPS, few.timed))
    )
    add("--num-steps", type=int, metavar="N", help=f"timed steps (default {timed})")
    add(
        "--warmup-steps",
        type=int,
        metavar="N",
        help=f"steps trained before the clock starts (default {warmup})",
    )
    add("--learning-rate", type=float, default=3e-4, help="AdamW's (default %(default)s)")
    add("--seed", type=int, default=42, help="of weights and batches (default %(default)s)")
    add(
        "--precision",
        default="auto",
        help="fp32, tf32, bf16, fp16; auto is bf16 on a GPU that has it, else fp32 (default auto)",
    )
    add("--device", default="auto", help="auto, cpu, cuda, cuda:N (default auto: GPU if any)")
    add("--data", choices=("text", "synthetic"), default="text", help="default %(default)s")
    add(
        "--text-file",
        type=Path,
        metavar="PATH",
        help="the text, byte by byte (default: the Python standard library's sources)",
    )
    add(
        "--compile",
        nargs="?",
        const="default",
        choices=trainer.COMPILE_MODES,
        help=f"torch.compile's mode (default here: {version.compile})",
    )
    add(
        "--cuda-graph",
        action=argparse.BooleanOptionalAction,
        help="capture the whole step, CUDA or HIP, and replay it "
        f"(default here: {'on a GPU' if version.cuda_graph else 'no'})",
    )
    add(
        "--output-dir",
        type=Path,
        help="the result goes to OUTPUT_DIR/runs/ (default: results/ of this checkout)",
    )
    add(
        "--profile-steps",
        type=int,
        metavar="N",
        help=f"for a profiler: after {_WARMUP_OF_PROFILE} steps of warm-up train N steps with "
        "marker ranges, between the calls that start and stop NVIDIA's profilers; no gate, no "
        "clock; what was profiled goes to OUTPUT_DIR/run.json (default there: "
        f"results/profiles/{version.key}/steps)",
    )
    add(
        "--gate-shape",
        type=int,
        nargs=2,
        metavar=("BATCH", "SEQ"),
        help="what the gate runs on (default: the run's own batch size and sequence length, or as "
        "much as V1 in high precision has the memory for)",
    )
    # compare_versions.py names the session, what the run is for, and the file that it reads then.
    add("--session", help=argparse.SUPPRESS)
    add("--kind", choices=results.KINDS, default=results.KINDS[0], help=argparse.SUPPRESS)
    add("--result-file", type=Path, help=argparse.SUPPRESS)
    add("--audit", type=Path, help=argparse.SUPPRESS)  # where its V1 leaves what others are held to
    add(
        "--no-gate",
        action="store_true",
        help="skip the comparison with V1; the result says so and earns no speed-up",
    )
    add(
        "--validate-setup",
        action="store_true",
        help="check machine, arguments and gate, then stop without timing anything",
    )


def check_arguments(version: Version, module: ModuleType, arguments: argparse.Namespace) -> Request:
    """Turns arguments into a Request.

    Raises:
        WorkshopError: something is wrong with them, in one line.
    """
    positive = "batch_size seq_len num_steps warmup_steps profile_steps learning_rate"
    for name in positive.split():
        value = getattr(arguments, name)
        if value is not None and not 0 < value < 1e30:  # what AdamW computes with in fp32
            flag = name.replace("_", "-")
            raise WorkshopError(f"--{flag} {value}: it must be a positive number below 1e30")
    if not 0 <= arguments.seed < 2**63:
        raise WorkshopError(f"--seed {arguments.seed}: it must lie between 0 and 2^63")
    if arguments.text_file is not None and arguments.data != "text":
        raise WorkshopError("--text-file goes with --data text")
    for name in ("num_steps", "no_gate", "validate_setup", "gate_shape"):
        if arguments.profile_steps and getattr(arguments, name):
            flag = name.replace("_", "-")
            raise WorkshopError(f"--{flag} has no effect under a profiler: leave it out")
    device = hardware.get_device(arguments.device)
    interpreter.check_device(version, device)
    interpreted = interpreter.serves(version, device)
    precision = get_precision(arguments.precision, device)
    preset = get_preset(arguments.config or default_preset(device.type))
    config, config_name = _model_config(module, arguments, device)
    seq_len = arguments.seq_len or preset.seq_len
    if seq_len > config.max_seq_len:
        raise WorkshopError(
            f"--seq-len {seq_len} is longer than the model's max_seq_len {config.max_seq_len}: "
            "lower it or raise --max-seq-len"
        )
    if seq_len == 1:
        raise WorkshopError(
            "--seq-len 1: attention over one token gives q and k no gradient; use at least 2"
        )
    _check_gate_shape(arguments.gate_shape, config.max_seq_len)
    compile_mode, cuda_graph = _execution(version, arguments, device, interpreted)
    switches = {}
    if hasattr(module, "Fusions"):
        names = [field.name for field in dataclasses.fields(module.Fusions)]
        switches = {name: getattr(arguments, name) for name in names}
    request = Request(
        module=module,
        version=version,
        config_name=config_name,
        config=config,
        batch_size=arguments.batch_size or preset.batch_size,
        seq_len=seq_len,
        precision=precision,
        device=device,
        compile_mode=compile_mode,
        cuda_graph=cuda_graph,
        interpreted=interpreted,
        schedule=_schedule(arguments, interpreted),
        switches=switches,
        output_dir=arguments.output_dir or _default_folder(version, arguments),
        arguments=arguments,
    )
    trainer.check_options(device, precision, compile_mode, cuda_graph)
    return request


def _check_gate_shape(shape: list[int] | None, max_seq_len: int) -> None:
    if shape is not None and not (shape[0] >= 1 and 2 <= shape[1] <= max_seq_len):
        raise WorkshopError(
            f"--gate-shape {shape[0]} {shape[1]}: use at least 1 sequence, of 2 to {max_seq_len} "
            "tokens"
        )


def _default_folder(version: Version, arguments: argparse.Namespace) -> Path:
    return PROFILES / version.key / "steps" if arguments.profile_steps else results.DEFAULT_FOLDER


def _model_config(
    module: ModuleType, arguments: argparse.Namespace, device: torch.device
) -> tuple[Any, str]:
    """The model's sizes and their name: a preset's, or `custom` once a flag differs from it."""
    name = arguments.config or default_preset(device.type)
    preset = get_preset(name)
    sizes = preset.model()
    given = {size: getattr(arguments, size) for size in _SIZES}
    overrides = {size: value for size, value in given.items() if value is not None}
    config = module.TinyLlamaConfig(**(sizes | overrides))
    check_sizes(config)
    batch_size = arguments.batch_size or preset.batch_size
    seq_len = arguments.seq_len or preset.seq_len
    as_named = config == module.TinyLlamaConfig(**sizes) and (batch_size, seq_len) == (
        preset.batch_size,
        preset.seq_len,
    )
    return config, name if as_named else "custom"


def _schedule(arguments: argparse.Namespace, interpreted: bool) -> trainer.Schedule:
    """The steps that were asked for, else those that a user has the patience for; the parts of
    an interpreted step tell nobody anything."""
    usual = trainer.Schedule(_WARMUP_STEPS, _NUM_STEPS, _MAX_PHASE_STEPS)
    if arguments.profile_steps:
        usual = trainer.Schedule(_WARMUP_OF_PROFILE, arguments.profile_steps, phases=0)
    default = _INTERPRETED_STEPS if interpreted else usual
    timed = arguments.profile_steps or arguments.num_steps or default.timed
    return trainer.Schedule(
        warmup=arguments.warmup_steps or default.warmup,
        timed=timed,
        phases=min(default.phases, timed),
    )


def _execution(
    version: Version, arguments: argparse.Namespace, device: torch.device, interpreted: bool
) -> tuple[str, bool]:
    """Compile mode and graph: what was asked for, else the version's defaults where they work.

    Raises:
        WorkshopError: a graph was asked for of kernels that are interpreted.
    """
    compile_mode = arguments.compile
    if compile_mode is None:
        compile_mode = version.compile
        missing = trainer.missing_for_compile(device) if compile_mode != "none" else None
        if missing:
            print(f"note: {missing} not found, so this runs without torch.compile")
            compile_mode = "none"
    cuda_graph = arguments.cuda_graph
    if cuda_graph is None:
        cuda_graph = version.cuda_graph and device.type == "cuda" and not interpreted
    if cuda_graph and interpreted and device.type == "cuda":
        raise WorkshopError(
            "--cuda-graph can't capture what Triton's interpreter does on the host; use "
            f"--no-cuda-graph, or unset {interpreter.VARIABLE}"
        )
    return compile_mode, cuda_graph


# --- the run -------------------------------------------------------------------------------------


def _run(request: Request) -> int:
    if request.arguments.profile_steps:
        from workshop.profilers import profile_run  # which takes its requests from here

        return profile_run.profile(request)
    return within_memory(request, lambda: _gate_train_save(request))


def within_memory(request: Request, work: Callable[[], int]) -> int:
    """Does the work that a request asks for; its exit status.

    Raises:
        OutOfMemory: it can't fit, or did not.
        WorkshopError: the version has no code for these sizes.
    """
    _check_memory(request)
    request.build_on(torch.device("meta"))  # says at once, and for nothing, if the sizes won't do
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        asked = trainer.memory_asked_for(error)
        if asked is None:
            raise
        raise OutOfMemory(_out_of_memory(request, f"a further {asked} was asked for")) from None


def _gate_train_save(request: Request) -> int:
    arguments = request.arguments
    batches, data_record = load_data(request)
    results.prepare_folder(request.output_dir)  # after all that is checked without it
    result = new_result(request, data_record)
    result.peak_tflops, result.peak_source = peak(request)
    print_configuration(request, data_record)
    first_use.watch_compilers(torch_compile=request.compile_mode != "none")
    model = request.build()
    if not arguments.no_gate:
        start = time.perf_counter()
        report = _gate(request, model)
        gate_s = time.perf_counter() - start - first_use.compile_seconds()
        result.setup_s["gate"] = max(0.0, gate_s)
        result.parity = report.record()
        if not report.passed:
            result.status = "gate failed"
            return _finish(request, result, errors.ANSWER_IS_NO)
    if arguments.validate_setup:
        print("This machine is ready. Nothing was timed.")
        return errors.DONE
    training, course = _train(request, model, batches)
    _record_training(request, result, training, model)
    if training.interrupted:
        result.status = "interrupted"
        if not training.step_ms:
            raise KeyboardInterrupt
        return _finish(request, result, errors.INTERRUPTED)
    del model  # its memory goes to the truth that V1's process trains
    try:
        result.audit = _audit(request, data_record, batches, course)
    except KeyboardInterrupt:  # the timed steps are complete
        result.status = "interrupted"
        return _finish(request, result, errors.INTERRUPTED)
    if result.audit.status == "fail":
        result.status = "audit failed"
        return _finish(request, result, errors.ANSWER_IS_NO)
    return _finish(request, result, errors.DONE)


Data = tuple[Tensor, dict[str, str | int]]
"""The batches of all steps, int64 (n, 2, B, T) on the host, and what they were cut from."""


def load_data(request: Request) -> Data:
    """Draws the batches of a request's steps.

    Raises:
        WorkshopError: there is no text for them.
    """
    arguments = request.arguments
    shape: dict[str, int] = {
        "steps": request.schedule.batches,
        "batch_size": request.batch_size,
        "seq_len": request.seq_len,
        "vocab_size": request.config.vocab_size,
        "seed": arguments.seed,
    }
    if arguments.data == "synthetic":
        return data.synthetic_batches(**shape), {"name": "synthetic: uniformly random tokens"}
    corpus = data.read_corpus(arguments.text_file)
    record: dict[str, str | int] = {
        "name": corpus.name,
        "bytes": len(corpus.data),
        "sha256": corpus.sha256,
    }
    return data.text_batches(corpus, **shape), record


def _setting(request: Request) -> parity.Setting:
    """The run's own."""
    return parity.Setting(
        config=request.config,
        precision=request.precision,
        device=request.device,
        seed=request.arguments.seed,
        batch_size=request.batch_size,
        seq_len=request.seq_len,
    )


def _gate(request: Request, model: nn.Module) -> parity.ParityReport:
    shape = of_the_run = (request.batch_size, request.seq_len)
    setting = _setting(request)
    if request.arguments.gate_shape is not None:
        shape = tuple(request.arguments.gate_shape)
    elif request.interpreted:
        shape = interpreter.gate_shape(*shape)
    else:
        shape = gate_size.of_setting(setting)
    smaller = f", at {shape[0]} x {shape[1]} tokens only" if shape != of_the_run else ""
    first = ", first in fp32 on a small model" if request.precision.name != "fp32" else ""
    print(
        f"gate: comparing logits, loss, gradients and training with V1{smaller}{first} ...",
        flush=True,
    )
    setting = dataclasses.replace(setting, batch_size=shape[0], seq_len=shape[1])
    with first_use.graphs_of_no_use() if smaller else contextlib.nullcontext():
        report = parity.check_model(
            model,
            setting,
            request.module.configure_optimizer,
            cuda_graph=request.cuda_graph,
            build=lambda c: dataclasses.replace(request, config=c).build_on(request.device),
            tell=_now_and_then(),
        )
    print(f"gate: {report.summary()}")
    for failure in report.failures:
        print(f"  {failure}")
    return report


def _now_and_then() -> parity.Tell:
    """Prints what the gate is at, but nothing of one that is done in seconds."""
    last = time.monotonic()

    def tell(what: str) -> None:
        nonlocal last
        if time.monotonic() - last >= _SECONDS_OF_SILENCE:
            last = time.monotonic()
            print(f"gate: {what} ...", flush=True)

    return tell


def _train(
    request: Request, model: nn.Module, batches: Tensor
) -> tuple[trainer.Training, audit.Course | None]:
    """Trains the run's steps; with what the audit needs of the timed ones, if there will be one."""
    arguments = request.arguments
    courses: list[audit.Course] = []
    parity.load_canonical(model, parity.canonical_state(request.config, arguments.seed))
    request.precision.set_matmul_mode()
    print(f"warming up for {request.schedule.warmup} steps ...", flush=True)
    training = trainer.train(
        model,
        request.module.configure_optimizer(model, arguments.learning_rate),
        batches,
        request.precision,
        schedule=request.schedule,
        cuda_graph=request.cuda_graph,
        progress=_progress(request),
        after_clock=lambda losses: (
            courses.append(audit.record(model, _setting(request), losses))
            if arguments.audit
            else None
        ),
    )
    return training, courses[0] if courses else None


def _audit(
    request: Request,
    data_record: dict[str, str | int],
    batches: Tensor,
    course: audit.Course | None,
) -> results.Audit:
    arguments = request.arguments
    if course is None:
        return results.Audit()
    steps = len(course.losses)
    path = audit.reference_path(
        arguments.audit,
        config=dataclasses.asdict(request.config),
        batch=[request.batch_size, request.seq_len, steps],
        precision=request.precision.name,
        device=str(request.device),
        seed=arguments.seed,
        learning_rate=arguments.learning_rate,
        data=data_record,
    )
    may_lead = request.version.key == versions.BASELINE
    may_lead &= request.compile_mode == "none" and not request.cuda_graph
    print(f"audit: comparing the {steps} steps with V1's own ...", flush=True)
    found = audit.of_run(
        course, _setting(request), batches, arguments.learning_rate, path, may_lead=may_lead
    )
    print(f"audit: {audit.summary(found)}")
    for failure in found.failures:
        print(f"  {failure}")
    return found


def _progress(request: Request) -> trainer.Progress:
    """Prints a line every few steps."""
    total = request.schedule.timed
    every = max(1, total // _PROGRESS_LINES)

    def report(step: int, loss: float, milliseconds: float, peak: Callable[[], int]) -> None:
        if step != 1 and step % every and step != total:
            return
        samples = request.batch_size / milliseconds * 1e3
        speed = (
            f"{samples:9,.1f} samples/s  {samples * request.seq_len:11,.0f} tokens/s  "
            f"{milliseconds:8.2f} ms"
        )
        print(
            f"step {step:>{len(str(total))}}/{total}  loss {loss:7.4f}  "
            f"{interpreter.NOT_COMPARABLE if request.interpreted else speed}  "
            f"peak {peak() / 1e6:,.0f} MB",
            flush=True,
        )

    return report


def _check_memory(request: Request) -> None:
    """Refuses at once what can't fit: a CPU that runs out of memory is killed without a word.

    The bound is a low one: the training state, RoPE's tables, and of the activations the
    feed-forward layers' two products alone, which every version keeps for its backward pass; on
    the host the batches, drawn before the clock starts.
    """
    c = request.config
    tokens = request.batch_size * request.seq_len
    bytes_each = 2 if request.precision.autocast_dtype else 4
    on_device = {
        "--hidden-dim, --num-layers or --vocab-size": flops.parameter_count(c)
        * flops.ADAMW_STATE_BYTES_PER_PARAMETER,
        "--max-seq-len": 2 * 4 * c.max_seq_len * c.head_dim,
        "--batch-size or --seq-len": tokens * c.num_layers * 2 * c.intermediate_dim * bytes_each,
    }
    steps = request.schedule.batches
    windows = 3 * 8 * tokens * steps  # in int64, beside the tokens and targets cut from them
    on_host = {"--num-steps, --warmup-steps or --batch-size": windows}
    for device, parts in ((request.device, on_device), (torch.device("cpu"), on_host)):
        available, total = hardware.memory_bytes(device), sum(parts.values())
        if available is not None and total > available:
            needed = f"at least {total / 1e9:,.1f} GB of {available / 1e9:,.1f} needed"
            raise OutOfMemory(_out_of_memory(request, needed, max(parts, key=lambda k: parts[k])))


def _out_of_memory(request: Request, what: str, lower: str = "--batch-size or --seq-len") -> str:
    state = flops.parameter_count(request.config) * flops.ADAMW_STATE_BYTES_PER_PARAMETER
    return (
        f"out of memory on {hardware.device_name(request.device)}: {what} at batch size "
        f"{request.batch_size}, sequence length {request.seq_len}, hidden dimension "
        f"{request.config.hidden_dim} (weights, gradients and AdamW alone take "
        f"{state / 1e9:,.2f} GB); lower {lower}, or take a smaller --config"
    )


# --- the result ----------------------------------------------------------------------------------


def new_result(request: Request, data_record: dict[str, str | int]) -> RunResult:
    """The record of a run that has not measured yet."""
    arguments = request.arguments
    options: dict[str, str | int | float | bool | None] = {
        "compile": request.compile_mode,
        "cuda_graph": request.cuda_graph,
        "learning_rate": arguments.learning_rate,
        "seed": arguments.seed,
        "num_steps": request.schedule.timed,
        **request.switches,
    }
    if request.version.triton:
        options["interpreted"] = request.interpreted
    return RunResult(
        version=request.version.key,
        session=arguments.session or results.new_session(),
        config_name=request.config_name,
        config=dataclasses.asdict(request.config),
        batch_size=request.batch_size,
        seq_len=request.seq_len,
        precision=request.precision.name,
        warmup_steps=request.schedule.warmup,
        device=hardware.describe(request.device),
        software=results.describe_software(),
        git_commit=results.git_commit(),
        created=results.now(),
        kind=arguments.kind,
        options=options,
        command=_command(),
        data=data_record,
    )


def _command() -> list[str]:
    """The command line, without the folders in which this machine keeps things."""
    return ["python", *(Path(word).name if word.startswith("/") else word for word in sys.argv)]


def peak(request: Request) -> tuple[float | None, str | None]:
    """TFLOP/s that a share is given of: the data sheet's, else what a large product reaches; and
    where the figure is from."""
    name = hardware.device_name(request.device)
    peaks = chips.find_peaks(name) if request.device.type == "cuda" else None
    if peaks and request.precision.name in peaks.tflops:
        return peaks.tflops[request.precision.name], peaks.source
    request.precision.set_matmul_mode()
    dtype = request.precision.autocast_dtype
    measured = hardware.measure_matmul_tflops(request.device, dtype)
    return measured, "measured: a large matrix product"


def _record_training(
    request: Request, result: RunResult, training: trainer.Training, model: nn.Module
) -> None:
    result.step_ms = training.step_ms
    result.forward_ms = training.forward_ms
    result.backward_ms = training.backward_ms
    result.optimizer_ms = training.optimizer_ms
    result.losses = results.finite(training.losses)
    result.memory_mb = training.memory_mb
    result.waited_share = training.waited_share
    result.setup_s |= {"compile": first_use.compile_seconds(), **training.setup_s}
    if training.no_memory_for_phases:
        print("note: no memory is left to time the parts of a step")
    # Either may have cut a backward pass short.
    if not (training.interrupted or training.no_memory_for_phases):
        result.gradients = parity.count_gradients(model)
    if result.step_ms:
        result.plausibility = plausibility.check(_claim(request, result))


def _claim(request: Request, result: RunResult) -> plausibility.Claim:
    peaks = None
    if request.device.type == "cuda":
        peaks = chips.find_peaks(hardware.device_name(request.device))
    # An interpreted run claims no time.
    step_ms = [] if request.interpreted else result.step_ms
    return plausibility.Claim(
        name=f"{request.version.key} {request.config_name} {request.precision.name}",
        model=request.config,
        batch_size=request.batch_size,
        seq_len=request.seq_len,
        step_ms=_median(step_ms),
        forward_ms=_median(result.forward_ms),
        backward_ms=_median(result.backward_ms),
        optimizer_ms=_median(result.optimizer_ms),
        memory_mb=float(result.memory_mb["peak"]) if result.memory_mb else None,
        memory_is_peak=True,
        params_with_grad=result.gradients.params_with_grad if result.gradients else None,
        loss_first=result.losses[0],
        # What a product reached here is no law of nature: only data sheets refute a figure.
        peak_tflops=peaks.tflops.get(request.precision.name) if peaks else None,
        bandwidth_gbs=peaks.bandwidth_gbs if peaks else None,
    )


def _median(samples: list[float]) -> float | None:
    return timing.median(samples) if samples else None


def _finish(request: Request, result: RunResult, status: int) -> int:
    target = request.arguments.result_file
    if target is None:
        path = results.save(result, request.output_dir)
    else:
        path = results.save_as(target, result)
    if result.step_ms:
        _print_summary(request, result)
    print(f"Result: {path}")
    return status


# --- printing ------------------------------------------------------------------------------------


def _print_lines(rows: list[tuple[str, str]]) -> None:
    for label, value in rows:
        print(f"  {label:<18} {value}")


def print_configuration(request: Request, data_record: dict[str, str | int]) -> None:
    """Says what is about to run, before the first slow thing."""
    c = request.config
    print(f"Tiny-LLaMA {request.version.key}: {request.version.title}")
    off = [name for name, on in request.switches.items() if not on]
    _print_lines(
        [
            (
                "model",
                f"{request.config_name}: hidden {c.hidden_dim}, FFN {c.intermediate_dim}, "
                f"{c.num_layers} layers, {c.num_heads} heads, {c.num_kv_heads} kv heads, "
                f"vocab {c.vocab_size} ({flops.parameter_count(c) / 1e6:,.1f} M parameters)",
            ),
            ("batch", f"{request.batch_size} sequences of {request.seq_len} tokens"),
            ("device", hardware.device_name(request.device)),
            ("precision", request.precision.name),
            ("compile", request.compile_mode),
            ("graph", "whole step captured" if request.cuda_graph else "no"),
            *([("kernels", "in Triton's interpreter, slow")] if request.interpreted else []),
            ("data", str(data_record["name"])),
            *([("switched off", ", ".join(off))] if off else []),
        ]
    )


def _print_summary(request: Request, result: RunResult) -> None:
    speed = [("speed", interpreter.NOT_COMPARABLE)]
    rate = []
    if not request.interpreted:
        speed = _speed_lines(request, result)
        rate = [("rate", _rate_line(request, result))]
    rows = [
        *speed,
        *_first_use_lines(result),
        ("loss", f"{_loss(result.losses[0])} first, {_loss(result.losses[-1])} final"),
        ("memory", _memory_line(result)),
        *rate,
        ("gradients", _gradients_line(result)),
        ("gate", "pass" if result.parity.status == "pass" else "NOT RUN: figures unverified"),
        ("audit", audit.summary(result.audit)),
    ]
    print(f"Summary{' of an interrupted run' if result.status == 'interrupted' else ''}")
    _print_lines(rows)
    for sentence in result.plausibility:
        print(f"  IMPLAUSIBLE: {sentence}")
    if result.disturbed and not result.interpreted:
        print(f"note: {results.DISTURBED}: run it again")


def _speed_lines(request: Request, result: RunResult) -> list[tuple[str, str]]:
    step_ms = timing.median(result.step_ms)
    samples = request.batch_size / step_ms * 1e3
    phases = (
        ("forward", result.forward_ms),
        ("backward", result.backward_ms),
        ("optimizer", result.optimizer_ms),
    )
    return [
        ("speed", f"{samples:,.1f} samples/s, {samples * request.seq_len:,.0f} tokens/s"),
        (
            "batch",
            f"{step_ms:.2f} ms (median of {len(result.step_ms)}, "
            f"half within {timing.spread(result.step_ms):.1%})",
        ),
        *((name, f"{timing.median(times):.2f} ms") for name, times in phases if times),
    ]


def _first_use_lines(result: RunResult) -> list[tuple[str, str]]:
    told = [
        f"{result.setup_s[name]:.1f} s to {name}"
        for name in ("compile", "capture")
        if result.setup_s.get(name, 0.0) >= 0.05
    ]
    return [("first use", ", ".join(told))] if told else []


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _memory_line(result: RunResult) -> str:
    m = result.memory_mb
    if not m:
        return "not measured"
    parts = ("weights", "gradients", "optimizer_state", "rest")
    split = ", ".join(f"{part.replace('_', ' ')} {m[part]:,.0f}" for part in parts)
    return f"{m['peak']:,.0f} MB peak ({split})"


def _rate_line(request: Request, result: RunResult) -> str:
    work = flops.step_flops(request.config, request.batch_size, request.seq_len)
    rate = work.total / (timing.median(result.step_ms) / 1e3) / 1e12
    line = f"{rate:,.3g} TFLOP/s"
    if result.peak_tflops:
        share, peak = rate / result.peak_tflops, result.peak_tflops
        line += f", {share:.1%} of {peak:,.3g} ({result.peak_source})"
    return line


def _gradients_line(result: RunResult) -> str:
    g = result.gradients
    if g is None:
        return "not counted"
    return (
        f"{g.tensors_with_grad}/{g.tensors_total} tensors, "
        f"{g.params_with_grad:,}/{g.params_total:,} parameters"
    )

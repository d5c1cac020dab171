"""The command line of every `tiny_llama_vN.py`: gate, train, print, save; or answer the judge."""

import contextlib
import dataclasses
import sys
import time
from pathlib import Path
from types import ModuleType

from torch import Tensor, nn

from workshop import errors, progress, records, results, versions
from workshop.arguments import parse
from workshop.gate import canonical, gate_size, parity, plausibility
from workshop.judge import candidate
from workshop.judge.pipe import Pipe
from workshop.profilers import profile_run
from workshop.request import (
    Request,
    build_parser,
    check_arguments,
    first_and_last,
    load_data,
    new_result,
    print_configuration,
    print_lines,
    within_memory,
)
from workshop.results import PHASE_TIMES, RunResult
from workshop.run import flops, hardware, interpreter, startup, timing, trainer

_EXIT_STATUS = {
    "complete": errors.DONE,
    "gate failed": errors.ANSWER_IS_NO,
    "interrupted": errors.INTERRUPTED,
}
NOT_JUDGED = "not judged: this process timed itself; analysis_tools/compare_versions.py judges"
_PROGRESS_LINES = 10
_SECONDS_OF_SILENCE = 10.0
_TILE = 128
"""Tokens of a sequence for which a step takes as long in the interpreter as for one."""
_STEPS_OF_A_GATE = 10
"""The gate trains nine steps, and runs one forward pass more."""


def main(module: ModuleType, argv: list[str] | None = None) -> int:
    version = versions.of_file(Path(str(module.__file__)))
    arguments = parse(build_parser(version, module), argv)
    return errors.exit_status(
        lambda: _run(check_arguments(version, module, arguments)),
        interrupted="interrupted before a timed step was complete: nothing saved",
    )


def leave_if_missing(key: str) -> None:
    """Ends the process, in one line and with the status for it, if the version needs what this
    machine does not have. For a version's file to call before it imports that."""
    missing = versions.missing(versions.ALL[key])
    if missing:
        print(f"error: {missing}", file=sys.stderr)
        sys.exit(errors.NOT_ON_THIS_MACHINE)


# --- the run -------------------------------------------------------------------------------------


def _run(request: Request) -> int:
    if request.arguments.profile_steps:
        return profile_run.profile(request)
    if request.arguments.candidate:
        with contextlib.closing(Pipe.to_judge()) as pipe:
            return within_memory(request, lambda: candidate.serve(request, pipe))
    return within_memory(request, lambda: _gate_train_save(request))


def _gate_train_save(request: Request) -> int:
    arguments = request.arguments
    batches, data_record = load_data(request)
    results.prepare_folder(request.output_dir)  # after all that is checked without it
    result = new_result(request, data_record)
    result.peak_tflops, result.peak_source = hardware.peak(request.device, request.precision)
    print_configuration(request, data_record)
    startup.watch_compilers(torch_compile=request.compile_mode != "none")
    model = request.build()
    if request.interpreted:
        _say_how_long(request, model, batches)
    if not arguments.no_gate:
        start = time.perf_counter()
        report = _gate(request, model)
        gate_s = time.perf_counter() - start - startup.compile_seconds()
        result.setup_s["gate"] = max(0.0, gate_s)
        result.gate = report.record()
        if not report.passed:
            result.status = "gate failed"
            return _finish(request, result)
    canonical.load_canonical(model, canonical.canonical_state(request.config, arguments.seed))
    request.precision.set_matmul_mode()
    schedule = request.schedule
    clock = f"the clock starts after step {schedule.warmup}"
    print(f"training {schedule.steps} steps; {clock} ...", flush=True)
    training = trainer.train(
        model,
        request.module.configure_optimizer(model, arguments.learning_rate),
        batches,
        request.precision,
        schedule=schedule,
        cuda_graph=request.cuda_graph,
        progress=_progress(request),
    )
    _record_training(result, training, model)
    if training.interrupted:
        result.status = "interrupted"
        if not training.step_ms:
            raise KeyboardInterrupt
    return _finish(request, result)


def _gate(request: Request, model: nn.Module) -> parity.ParityReport:
    setting = candidate.setting_of(request, request.arguments.seed)
    of_the_run = (request.batch_size, request.seq_len)
    if request.interpreted:
        shape = interpreter.gate_shape(*of_the_run)
    else:
        shape = gate_size.of_setting(setting)
    smaller = f", at {shape[0]} x {shape[1]} tokens only" if shape != of_the_run else ""
    first = ", first in fp32 on a small model" if request.precision.name != "fp32" else ""
    print(
        f"gate: comparing logits, loss, gradients and training with V1{smaller}{first} ...",
        flush=True,
    )
    setting = candidate.setting_of(request, request.arguments.seed, *shape)
    with startup.not_counted() if smaller else contextlib.nullcontext():
        report = parity.check_model(
            model,
            setting,
            request.module.configure_optimizer,
            cuda_graph=request.cuda_graph,
            build=lambda c: dataclasses.replace(request, config=c).build_on(request.device),
            notify=_now_and_then(),
        )
    print("\n  ".join([f"gate: {report.summary()}", *report.failures]))
    return report


def _say_how_long(request: Request, model: nn.Module, batches: Tensor) -> None:
    """Trains one step of a single sequence in Triton's interpreter, and says from its time how long
    the run will take. The model's weights are replaced after that."""
    own = (request.batch_size, request.seq_len, request.schedule.steps)
    length = min(request.seq_len, _TILE)
    print(f"training one step of 1 x {length} tokens, to see how long it takes ...", flush=True)
    optimizer = request.module.configure_optimizer(model, request.arguments.learning_rate)
    start = time.perf_counter()
    trainer.train_losses(model, optimizer, batches[:1, :, :1, :length], request.precision)
    step_s = time.perf_counter() - start

    def seconds(batch_size: int, seq_len: int, steps: int) -> float:
        """The time grows with the number of the kernels' programs, and that with both sizes."""
        of_gate, _ = interpreter.gate_shape(batch_size, seq_len)
        gate_steps = 0 if request.arguments.no_gate else _STEPS_OF_A_GATE * of_gate
        # One more step measures the memory.
        return step_s * (gate_steps + (steps + 1) * batch_size * max(1, seq_len / _TILE))

    text = f"it took {progress.about(step_s)}: {own[2]} steps of {own[0]} x {own[1]} tokens"
    gate = "" if request.arguments.no_gate else " and the gate"
    print(f"{text}{gate} will take about {progress.about(seconds(*own))}")
    quick = (min(own[0], 2), min(own[1], 33), request.schedule.warmup + 2)
    if seconds(*quick) < seconds(*own) / 2:
        flags = f"--batch-size {quick[0]} --seq-len {quick[1]} --num-steps 2"
        print(f"for a quicker run try {flags}: about {progress.about(seconds(*quick))}")


def _now_and_then() -> trainer.Notify:
    """Prints what the gate is at, but nothing of one that is done in seconds."""
    last = time.monotonic()

    def report(what: str) -> None:
        nonlocal last
        if time.monotonic() - last >= _SECONDS_OF_SILENCE:
            last = time.monotonic()
            print(f"gate: {what} ...", flush=True)

    return report


def _progress(request: Request) -> trainer.Progress:
    """Prints a line for the first step, whose loss is that of the initial weights, and for some of
    the timed ones."""
    warmup, last = request.schedule.warmup, request.schedule.steps
    every = 1 if request.interpreted else max(1, request.schedule.timed // _PROGRESS_LINES)

    def report(step: int, loss: float, milliseconds: float | None) -> None:
        if milliseconds is None:
            speed = "warm-up, not timed"
        elif step not in (warmup + 1, last) and (step - warmup) % every:
            return
        elif request.interpreted:
            speed = f"interpreted{progress.left(last - step, milliseconds / 1e3)}"
        else:
            tokens = request.batch_size * request.seq_len / milliseconds * 1e3
            speed = f"time {milliseconds:.2f}ms, {tokens:,.0f} tokens/s"
        print(f"step {step}: loss {loss:.4f}, {speed}", flush=True)

    return report


# --- the result ----------------------------------------------------------------------------------


def _record_training(result: RunResult, training: trainer.Training, model: nn.Module) -> None:
    for name in ("step_ms", *PHASE_TIMES, "memory_mb", "waited_share"):
        setattr(result, name, getattr(training, name))
    result.losses = results.finite(training.losses)
    result.setup_s |= {"compile": startup.compile_seconds(), **training.setup_s}
    if training.no_memory_for_phases:
        print("note: no memory is left to time the parts of a step")
    # Either may have cut a backward pass short.
    if not (training.interrupted or training.no_memory_for_phases):
        result.gradients = canonical.count_gradients(model)
    if result.step_ms:
        result.plausibility = plausibility.check(plausibility.claim(result))


def _finish(request: Request, result: RunResult) -> int:
    path = records.add(result, request.output_dir)
    if result.step_ms:
        _print_summary(request, result)
    print(f"Result: {path}")
    return _EXIT_STATUS[result.status]


# --- printing ------------------------------------------------------------------------------------


def _print_summary(request: Request, result: RunResult) -> None:
    g, interpreted = result.gradients, interpreter.NOT_COMPARABLE * request.interpreted
    startup_parts = [
        f"{result.setup_s[name]:.1f} s to {name}"
        for name in ("compile", "capture")
        if result.setup_s.get(name, 0.0) >= 0.05
    ]
    print(f"Summary{' of an interrupted run' if result.status == 'interrupted' else ''}")
    print_lines({
        **({"speed": interpreted} if interpreted else _speeds(request, result)),
        "startup": ", ".join(startup_parts),
        "loss": first_and_last(result.losses),
        "memory": interpreted or _memory(result),
        "rate": "" if interpreted else _rate(request, result),
        "gradients": f"{g.tensors_with_grad}/{g.tensors_total} tensors, "
        f"{g.params_with_grad:,}/{g.params_total:,} parameters" if g else "not counted",
        "gate": "pass" if result.gate.status == "pass" else "NOT RUN: figures unverified",
        "verdict": NOT_JUDGED,
    })  # fmt: skip
    for sentence in result.plausibility:
        print(f"  IMPLAUSIBLE: {sentence}")
    if result.disturbed and not request.interpreted:
        print(f"note: {results.DISTURBED}: run it again")


def _speeds(request: Request, result: RunResult) -> dict[str, str]:
    step_ms, spread = timing.median(result.step_ms), timing.spread(result.step_ms)
    samples = request.batch_size / step_ms * 1e3
    phases = {name.removesuffix("_ms"): getattr(result, name) for name in PHASE_TIMES}
    return {
        "speed": f"{samples:,.1f} samples/s, {samples * request.seq_len:,.0f} tokens/s",
        "step": f"{step_ms:.2f} ms (median of {len(result.step_ms)} steps, interquartile range "
        f"{spread:.1%})",
        **{name: f"{timing.median(times):.2f} ms" for name, times in phases.items() if times},
    }


def _memory(result: RunResult) -> str:
    m = result.memory_mb
    parts = ("weights", "gradients", "optimizer_state", "rest")
    split = ", ".join(f"{part.replace('_', ' ')} {m[part]:,.0f}" for part in parts if m)
    return f"{m['peak']:,.0f} MB peak ({split})" if m else "not measured"


def _rate(request: Request, result: RunResult) -> str:
    step_ms = timing.median(result.step_ms)
    rate = flops.step_tflops(request.config, request.batch_size, request.seq_len, step_ms)
    line = f"{rate:,.3g} TFLOP/s"
    if result.peak_tflops:
        share, peak = rate / result.peak_tflops, result.peak_tflops
        if share > 1 and not result.plausibility:
            return f"{line}, share unknown: other programs ran while the peak was measured"
        line += f", {share:.1%} of {peak:,.3g} ({result.peak_source})"
    return line

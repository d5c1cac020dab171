"""Output of a run: its settings, its iterations, its summary."""

import argparse
import statistics
from collections.abc import Callable

import torch

from labs.group import Group
from labs.inference_benchmark.measure import Bench
from labs.inference_benchmark.modes import Setting, Variant
from workshop.labs import LabRun, percentile
from workshop.run import hardware, timing

RULE = "=" * 40
UNSTEADY = 0.1
"""Share of the mean: a standard deviation above it says that something disturbed the run."""
Say = Callable[[str], object]


def speaker(group: Group, device: torch.device) -> Say:
    """Prints lines, with the process's number where there are several."""
    head = f"[{_each(device.type)} {group.rank}] " if group.size > 1 else ""
    return lambda line: print(f"{head}{line}" if line else line, flush=True)


def _each(device: str) -> str:
    """The device that a process of a group has for itself: on a CPU they share one."""
    return "GPU" if device == "cuda" else "process"


def configuration(
    say: Say, arguments: argparse.Namespace, setting: Setting, variant: Variant, group: Group
) -> None:
    say(f"Using network: {setting.network.name}")
    say(f"Batch size: {arguments.batch_size}")
    if group.size > 1:
        say(f"Local batch size: {setting.batch_size}")
        say(f"Global batch size: {arguments.batch_size}")
    if arguments.profile_steps is None:  # a profiler's script adds some that it does not record
        say(f"Iterations: {arguments.iterations}")
    say(f"FP16: {variant.precision == 'fp16'}")
    say(f"Precision: {variant.precision.upper()}{' autocast' if variant.autocast else ''}")
    say(f"Mode: {arguments.mode}")
    say(f"Device: {setting.device} ({hardware.device_name(setting.device)})")
    if variant.compile is not None:
        say(f"PyTorch Compile: ENABLED (mode={variant.compile.get('mode') or 'default'})")
    say(f"Variant: {variant.label}")
    say("")
    say(f"Warming up ({arguments.warmup_iterations} iterations) ...")


def iterations(say: Say, bench: Bench) -> None:
    lines = [("Warmup iteration", i, ms) for i, ms in enumerate(bench.warmup_ms)]
    lines += [("Epoch", i, ms) for i, ms in enumerate(bench.run.step_ms)]
    for (name, i, ms), loss in zip(lines, bench.run.losses, strict=False):
        if (name, i) == ("Epoch", 0):
            say("Warmup complete.")
            say("")
            say("Running timed iterations...")
        known = "" if loss is None else f"Loss = {loss:.4f}, "
        say(f"{name} {i}: {known}Time = {ms / 1e3:.4f} seconds")
    say("")


def summary(say: Say, bench: Bench, group: Group) -> None:
    """The guide's lines, and what else the run has measured; of a run that failed only why."""
    run = bench.run
    say(RULE)
    say(f"Performance Summary{' (all processes)' if group.size > 1 else ''}:")
    say(RULE)
    lines = [
        f"Network: {bench.setting.network.name}",
        f"Batch size: {run.units_per_step}",
        f"Iterations: {len(run.step_ms)} (excluding warmup)",
        f"Precision: {bench.variant.precision.upper()}",
    ]
    if group.size > 1:
        lines += [
            f"Global batch size: {run.units_per_step}",
            f"Local batch size: {bench.setting.batch_size}",
            f"World size: {group.size}",
        ]
    lines += ["", *_gate(run)]
    if run.gate.status == "pass":
        lines += ["", *_speed(run, group), "", *_memory(run), "", *_work(run)]
    lines += [f"IMPLAUSIBLE: {sentence}" for sentence in run.plausibility]
    for line in (*lines, RULE):
        say(line)


def _gate(run: LabRun) -> list[str]:
    closest = run.gate.closest()
    words = f"Gate: {run.gate.status}"
    if closest is not None:
        name, error, allowed = closest
        words += f"; {name}: error {error:.1e} of {allowed:.1e} allowed ({run.gate.reference})"
    for name, measure in run.gate.measures.items():
        if measure["allowed"] == 0:  # a count
            words += f"; {name}: {measure['error']}"
    lines = [words, *(f"FAIL, no throughput: {why}" for why in run.gate.failures)]
    if "top1_agreement" in run.metrics:
        lines.append(f"Top-1 agreement with fp32: {run.metrics['top1_agreement']:.1%}")
    return lines


def _speed(run: LabRun, group: Group) -> list[str]:
    ordered = sorted(run.step_ms)
    mean = statistics.fmean(ordered)
    deviation = statistics.stdev(ordered) if len(ordered) > 1 else 0.0
    p50, p90, p99 = timing.median(ordered), percentile(ordered, 0.9), percentile(ordered, 0.99)
    per_s = run.units_per_step / p50 * 1e3
    whole = " (global)" if group.size > 1 else ""
    lines = [
        f"Average time per iteration: {mean / 1e3:.4f} seconds",
        f"Standard deviation: {deviation / 1e3:.4f} seconds ({deviation / mean:.1%})",
        f"Latency: p50 {p50:.3f} ms, p90 {p90:.3f} ms, p99 {p99:.3f} ms",
        f"Throughput: {per_s:,.1f} samples/sec{whole}, from the median",
        f"Images per second: {per_s:,.1f}",
        f"Microseconds per sample: {p50 / run.units_per_step * 1e3:,.1f}",
    ]
    if deviation / mean > UNSTEADY:
        lines.append(f"Unsteady: the times scatter by more than {UNSTEADY:.0%}; run it again")
    if group.size > 1:
        each = _each(str(run.device["type"]))
        efficiency = float(run.metrics["scaling_efficiency"] or 0.0)
        lines += [
            f"Per-{each} throughput: {per_s / group.size:,.1f} samples/sec",
            f"One {each} alone: {run.metrics['one_process_per_s']:,.1f} samples/sec",
            f"Scaling efficiency: {_share(efficiency, 'the one alone')}",
        ]
    if compile_s := run.setup_s.get("compile"):
        lines.append(f"Compilation time: {compile_s:.1f} seconds")
    if "plain_ms" in run.metrics:
        batches = run.metrics["break_even_batches"]
        after = f"after {batches:,} batches" if batches else "never: it is not faster"
        lines.append(f"Break-even: {after} (plain {run.metrics['plain_ms']:.3f} ms a batch)")
    return lines


def _memory(run: LabRun) -> list[str]:
    peak = float(run.memory_mb["peak"])
    words = ", ".join(
        f"{name.replace('_', ' ')} {amount:,.0f}"
        for name, amount in run.memory_mb.items()
        if name not in ("peak", "source", "reserved") and amount
    )
    per_s = run.units_per_step / timing.median(run.step_ms) * 1e3 / run.processes
    where = "GPU " if run.device["type"] == "cuda" else ""
    return [
        f"{where}Memory Usage: {peak:,.0f} MB at its peak ({words})",
        f"Images per second per GB: {per_s / peak * 1e3:,.1f}",
    ]


def _work(run: LabRun) -> list[str]:
    flops = run.flops_per_step or 0.0
    rate = flops / timing.median(run.step_ms) / 1e9
    lines = [
        f"Operations of a batch: {flops / 1e9:,.1f} GFLOP "
        f"({flops / run.units_per_step / 1e9:.2f} an image)",
        f"Achieved: {rate:,.3g} TFLOP/s",
        f"Arithmetic intensity: {run.metrics['flop_per_byte']:,.1f} FLOP a byte, layer by layer",
    ]
    if run.peak_tflops:
        share = rate / run.peak_tflops / run.processes
        lines.append(f"Share of the data sheet's {run.peak_tflops:,.0f} TFLOP/s: {share:.1%}")
    if run.ceiling_tflops:
        words = _share(rate / run.ceiling_tflops / run.processes, "the product")
        lines.append(f"Share of a large product's {run.ceiling_tflops:,.3g} TFLOP/s: {words}")
    return lines


def _share(share: float, of: str) -> str:
    """As in "97.4%"; above 100%, why that can be."""
    high = f" (above 100%: {of} was measured at a busier moment; run it again)"
    return f"{share:.1%}{high if share > 1 else ''}"

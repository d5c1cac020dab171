"""Several runs: the variants of a comparison in alternating processes, and the largest batch."""

import argparse
import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from labs.inference_benchmark import measure, modes, networks, request, single
from labs.inference_benchmark.modes import Setting, Variant
from workshop import errors, labs, results
from workshop.compare import lab_table, tables
from workshop.errors import WorkshopError
from workshop.labs import LabRow, LabRun
from workshop.run import hardware, memory, processes, timing, trainer

PROGRAM = Path(__file__).with_name("micro_benchmarking_pytorch.py")
GPU_BATCHES, CPU_BATCHES = (8, 32, 128, 256), (1, 4, 16)
SECONDS_TO_STOP = 30
MOST_IMAGES = 2**17
ALL = "all"
"""As a name: each of the benchmark's networks."""
Flags = tuple[str, ...]
"""Of the program, for one variant."""
FREE_SHARE = 0.9
"""Of a CPU's free memory that a batch may take: beyond it the system ends the process."""


def run(arguments: argparse.Namespace) -> int:
    """Does the study that was asked for; its exit status."""
    wanted = [arguments.compare, arguments.ladder, arguments.find_max_batch]
    if sum(map(bool, wanted)) > 1 or "RANK" in os.environ:
        raise WorkshopError("--compare, --ladder, --find-max-batch: one at a time, and no torchrun")
    if arguments.peer:
        raise WorkshopError("--peer is for a single run; --compare peers runs all of them")
    device = hardware.get_device(arguments.device)
    if arguments.network == ALL:
        arguments.study = "all networks"
        errors.require("rich")
        return _all_networks(arguments, device)
    networks.get_network(arguments.network)
    single.check(arguments, single.variant_of(arguments), device)
    if arguments.find_max_batch:
        return _find_max_batch(arguments, device)
    errors.require("rich", "matplotlib")
    arguments.study = f"compare {arguments.compare}" if arguments.compare else "ladder"
    plans = ladder(arguments, device) if arguments.ladder else compared(arguments, device)
    return _alternate(plans, arguments)


# --- what is compared ----------------------------------------------------------------------------


def compared(arguments: argparse.Namespace, device: torch.device) -> list[Flags]:
    """The variants of --compare, the baseline first; the other flags hold for all of them."""
    if arguments.compare == "peers":
        return peers(arguments, device)
    common = _speed_flags(arguments, without=arguments.compare)
    on_gpu = device.type == "cuda"
    if arguments.compare == "precision":
        names = [name for name in ("fp32", "tf32", "bf16", "fp16") if _has(name, device)]
        return [(*common, "--precision", name) for name in names]
    if arguments.compare == "memory-format":
        return [common, (*common, "--channels-last")]
    if arguments.compare == "batch-size":
        batches = GPU_BATCHES if on_gpu else CPU_BATCHES
        return [(*common, "--batch-size", str(batch)) for batch in batches]
    # On a CPU reduce-overhead is the default mode.
    names = ["", "reduce-overhead", "max-autotune"] if on_gpu else ["", "max-autotune"]
    contexts = [("--compileContext", f"{{'mode': '{name}'}}") if name else () for name in names]
    return [common, *((*common, "--compile", *context) for context in contexts)]


def peers(arguments: argparse.Namespace, device: torch.device) -> list[Flags]:
    """At one precision: plain, the peers as their users run them for speed, and ours."""
    if arguments.mode == "training":
        raise WorkshopError("--compare peers is for --mode inference")
    common = ("--precision", single.variant_of(arguments).precision)
    graphs = ("--compileContext", "{'mode': 'reduce-overhead'}") if device.type == "cuda" else ()
    tuned = ("--compileContext", "{'mode': 'max-autotune'}")
    torch_, timm = (("--peer", peer, "--channels-last") for peer in request.PEERS)
    theirs: list[Flags] = [(*torch_, "--compile", *graphs), timm, (*timm, "--compile", *tuned)]
    # Of two --precision the last one counts.
    ours = [rung for rung in ladder(arguments, device) if "--compile" in rung][-1]
    return [common, *((*flags, *common) for flags in (*theirs, ours))]


def ladder(arguments: argparse.Namespace, device: torch.device) -> list[Flags]:
    """From fp32 in eager mode, one change at a time; each rung keeps those before it."""
    on_gpu, half = device.type == "cuda", _half(device)
    rungs: list[Flags] = [()]
    kept: Flags
    if _has("tf32", device):
        rungs.append(("--precision", "tf32"))
    rungs.append(kept := ("--precision", half))
    rungs.append(kept := (*kept, "--channels-last"))
    rungs.append(kept := (*kept, "--fold-norms"))
    graph = ("--cuda-graph",) if on_gpu else ()
    rungs.append((*kept, "--compile"))
    if on_gpu:
        rungs.append((*kept, "--compile", *graph))
    rungs.append((*kept, "--export", "aoti", *graph))
    return rungs


def _half(device: torch.device) -> str:
    return "fp16" if _has("fp16", device) else "bf16"


def _has(precision: str, device: torch.device) -> bool:
    try:
        modes.check_precision(precision, device)
    except WorkshopError:
        return False
    return True


def _speed_flags(arguments: argparse.Namespace, without: str) -> tuple[str, ...]:
    """The flags that hold for all variants: those given, but for the one that is compared."""
    flags: list[str] = []
    if without != "precision":
        precision = arguments.precision or ("fp16" if arguments.fp16 else "fp32")
        flags += ["--precision", precision]
    if without != "memory-format" and arguments.channels_last:
        flags.append("--channels-last")
    if without != "compile" and arguments.compile:
        flags += ["--compile", "--compileContext", arguments.compile_context or "{}"]
    for name in ("fold_norms", "cuda_graph"):
        if getattr(arguments, name):
            flags.append(f"--{name.replace('_', '-')}")
    if arguments.export:
        flags += ["--export", arguments.export]
    return tuple(flags)


# --- alternating processes -----------------------------------------------------------------------


def _alternate(plans: list[Flags], arguments: argparse.Namespace) -> int:
    folder = results.prepare_folder(arguments.output_dir)
    common = _common_flags(arguments, results.new_session())
    common += ["--baseline", single.planned([*common, *plans[0]]).variant]
    runs: list[LabRun] = []
    dead: set[Flags] = set()
    interrupted = False
    try:
        for repeat in range(arguments.repeats):
            for plan in plans if repeat % 2 == 0 else plans[::-1]:
                if plan in dead:
                    continue
                found = _child([*common, *plan], folder)
                runs.append(found)
                if found.status != "complete":
                    dead.add(plan)
                count = f"run {repeat + 1} of {arguments.repeats}"
                print(f"{found.variant}, {count}: {_outcome(found)}", flush=True)
    except KeyboardInterrupt:
        interrupted = True
        if not runs:
            raise
    rows = labs.build_rows(runs)
    _write(rows, folder, arguments.study.replace(" ", "_").replace("-", "_"))
    if interrupted:
        print("interrupted: the table holds what was completed", file=sys.stderr)
        return errors.INTERRUPTED
    return errors.ANSWER_IS_NO if any(row.failed for row in rows) else errors.DONE


def _outcome(run: LabRun) -> str:
    if run.status == "complete":
        return f"{timing.median(run.step_ms):.3f} ms an iteration; proof {run.proof.status}"
    return "; ".join([run.status, *run.proof.failures, *([run.error] if run.error else [])])


def _common_flags(arguments: argparse.Namespace, session: str) -> list[str]:
    """Of all processes of a study."""
    flags = ["--network", arguments.network, "--mode", arguments.mode, "--session", session]
    for name in ("batch_size", "iterations", "warmup_iterations", "seed", "device", "output_dir"):
        flags += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    return [*flags, "--study", arguments.study]


def _child(flags: list[str], folder: Path) -> LabRun:
    """Runs one variant in a process of its own; its result, or a record of its failure."""
    planned = single.planned(flags)
    path = labs.new_path(planned, folder)
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), *flags, "--result-file", str(path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    with processes.ended_with_us(process):
        try:
            _, complaint = process.communicate()
        except KeyboardInterrupt:
            processes.stop(process, SECONDS_TO_STOP)
            raise
    if path.exists():
        return labs.load(path)
    lines = [line for line in complaint.splitlines() if line.strip()] or ["no message"]
    missing = process.returncode == errors.NOT_ON_THIS_MACHINE
    planned.status = "skipped" if missing else "failed"
    planned.error = lines[-1].removeprefix("error: ")[:300]
    labs.save(planned, path)
    return planned


def _write(rows: list[LabRow], folder: Path, name: str) -> None:
    report = lab_table.of_labs([rows])
    report.show("table")
    draw(rows, folder / f"{name}.png")
    results.write_together(
        {
            folder / f"{name}.md": tables.markdown(report.tables),
            folder / f"{name}.json": results.json_text(report.as_json()),
        }
    )
    print(f"Written: {', '.join(str(folder / f'{name}.{end}') for end in ('md', 'json', 'png'))}")


def draw(rows: list[LabRow], target: Path) -> None:
    """Throughput of each variant, as bars; those without a time have the reason in its place."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(11, 1.6 + 0.55 * len(rows)), layout="constrained")
    rates = [row.units_per_s or 0.0 for row in rows]
    axes.barh(range(len(rows)), rates, color="#0072B2")
    most = max(rates) or 1.0
    for place, row in enumerate(rows):
        words = "no throughput"
        if row.units_per_s:
            words = f"{row.units_per_s:,.0f}"
            words += f"  ({row.speedup.value:.2f}x)" if row.speedup else ""
        axes.text(rates[place] + 0.01 * most, place, words, va="center", fontsize=12)
    axes.set_yticks(range(len(rows)), [row.first.variant for row in rows], fontsize=12)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * most)
    axes.set_xlabel(f"{rows[0].first.unit} a second, median", fontsize=12)
    title = lab_table.title(rows)
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    with results.atomic_path(target) as path:
        figure.savefig(path, dpi=120)
    plt.close(figure)


# --- all networks --------------------------------------------------------------------------------


def _all_networks(arguments: argparse.Namespace, device: torch.device) -> int:
    """Each network in half precision, as it is and as fast as it gets: a table."""
    folder = results.prepare_folder(arguments.output_dir)
    session = results.new_session()
    plain: Flags = ("--precision", _half(device))
    # A compiler that may change weights folds norms itself.
    graph = ("--cuda-graph",) if device.type == "cuda" else ()
    fast = (*plain, "--channels-last", "--compile", *graph)
    names = dict.fromkeys(networks.ALIASES.get(name, name) for name in networks.NAMES)
    pairs: list[tuple[str, LabRow, LabRow]] = []
    for number, name in enumerate(names, 1):
        arguments.network = name
        common = _common_flags(arguments, session)
        runs = []
        for flags in (plain, fast):
            try:
                runs.append(_child([*common, *flags], folder))
            except errors.NotOnThisMachine as missing:
                print(f"{name}: skipped: {missing}")
                break
        else:
            for run in runs:
                run.baseline = runs[0].variant
            pairs.append((name, *labs.build_rows(runs)))  # type: ignore[arg-type]
            outcome = "; ".join(f"{run.variant}: {_outcome(run)}" for run in runs)
            print(f"{number}/{len(names)} {name}: {outcome}", flush=True)
    table = all_table(pairs)
    tables.print_tables([table])
    results.write_text(folder / "all_networks.md", tables.markdown([table]))
    print(f"Written: {folder / 'all_networks.md'}")
    red = any(row.failed for _, *rows in pairs for row in rows)
    return errors.ANSWER_IS_NO if red else errors.DONE


def all_table(pairs: list[tuple[str, LabRow, LabRow]]) -> tables.Table:
    """A line for each network: plain, and as fast as it gets."""
    lines = []
    for name, plain, fast in pairs:
        share = "-"
        if fast.tflops and fast.first.ceiling_tflops:
            share = f"{fast.tflops / fast.first.ceiling_tflops:.1%}"
        cells = [name, tables.number(plain.units_per_s, ",.0f"),
                 tables.number(fast.units_per_s, ",.0f"),
                 f"{fast.speedup.value:.2f}x" if fast.speedup else "-", share,
                 f"{lab_table.proof(plain)}, {lab_table.proof(fast)}"]  # fmt: skip
        lines.append(tables.Line(cells, "red" if plain.failed or fast.failed else None))
    header = ("network", "plain images/s", "fast images/s", "speed-up", "of ceiling", "proof")
    notes = [f"{name}: {row.note()}" for name, *rows in pairs for row in rows if row.note()]
    first = pairs[0][1].first
    title = f"{first.units_per_step} images, {first.options['precision']}, {first.device['name']}"
    return tables.Table(title, header, lines, notes, left=(0, 5))


# --- the largest batch ---------------------------------------------------------------------------


def largest(fits: Callable[[int], bool], most: int = MOST_IMAGES) -> int:
    """The largest batch that fits, to a 32nd: doubled until one does not fit, then bisected. 0 if
    a single image does not fit."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    while low and high - low > max(1, low // 32):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _find_max_batch(arguments: argparse.Namespace, device: torch.device) -> int:
    variant = single.variant_of(arguments)
    network = networks.get_network(arguments.network)
    training = arguments.mode == "training"
    modes.set_arithmetic(variant.precision)
    model = networks.build(network, arguments.seed, device)

    def try_batch(batch: int) -> bool:
        setting = Setting(network, device, batch, arguments.seed)
        if device.type == "cpu":
            enough = needed(model, variant, setting, training) <= limit
        else:
            enough = _runs(model, variant, setting, training)
        print(f"batch {batch:,}: {'fits' if enough else 'does not fit'}", flush=True)
        return enough

    limit = FREE_SHARE * (hardware.free_memory_bytes(device) or 0)
    needed = _Need()
    found = largest(try_batch)
    if not found:
        raise errors.OutOfMemory(f"{network.name}: a single image does not fit in memory")
    print(f"Largest batch: {found:,} ({variant.label}, {arguments.mode})")
    return errors.DONE


def _runs(model: torch.nn.Module, variant: Variant, setting: Setting, training: bool) -> bool:
    """Whether one iteration runs on a GPU; whatever it took is given back."""
    try:
        with trainer.memory_failure_as(lambda asked: errors.OutOfMemory(asked)):
            measure.make_iteration(model, variant, setting, training)()
            measure.wait(setting.device)
        return True
    except errors.OutOfMemory:
        return False
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def _image_bytes(network: networks.Network) -> int:
    """Of one image, in fp32."""
    return 4 * 3 * network.edge**2


class _Need:
    """What a batch needs on a CPU, in bytes: a straight line through the peaks of one and two
    images, since a system without memory left ends the process."""

    def __init__(self) -> None:
        self._line: tuple[float, float] | None = None

    def __call__(
        self, model: torch.nn.Module, variant: Variant, setting: Setting, training: bool
    ) -> float:
        if self._line is None:
            peaks = []
            for batch in (2, 4):
                few = Setting(setting.network, setting.device, batch, setting.seed)
                # Made before it is measured: converting weights takes more than so few images.
                iteration = measure.make_iteration(model, variant, few, training)
                copies = 1 if training else measure.BATCHES + 1
                held = copies * batch * _image_bytes(setting.network)
                peaks.append(memory.cpu_step_peak(iteration, lambda held=held: held))  # type: ignore[misc]
            slope = (peaks[1] - peaks[0]) / 2
            weights = memory.tensor_bytes([*model.parameters(), *model.buffers()])
            self._line = (2 * weights + peaks[0] - 2 * slope, slope)
        return self._line[0] + self._line[1] * setting.batch_size

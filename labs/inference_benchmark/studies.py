"""Several runs: the variants of a comparison in alternating processes, and the largest batch."""

import argparse
import gc
import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from labs import shared
from labs.inference_benchmark import group as groups
from labs.inference_benchmark import measure, modes, networks, request, single
from labs.inference_benchmark.modes import Setting, Variant
from workshop import errors, labs, records, results, tables
from workshop.errors import WorkshopError
from workshop.judge import studies
from workshop.labs import LabRow, LabRun
from workshop.run import hardware, memory, timing, trainer
from workshop.run.precision import set_arithmetic
from workshop.show import lab_table

PROGRAM = Path(__file__).with_name("micro_benchmarking_pytorch.py")
GPU_BATCHES, CPU_BATCHES = (8, 32, 128, 256), (1, 4, 16)
MOST_IMAGES = 2**17
ALL = "all"
"""As a name: each of the benchmark's networks."""
Flags = tuple[str, ...]
"""The program's flags for one variant."""
_OF_A_VARIANT = (
    *("precision", "compile", "channels_last", "fold_norms", "fuse_relus"),
    *("cuda_graph", "export"),
)
FREE_SHARE = 0.9
"""The share of a CPU's free memory that a batch may take: beyond it the system ends the process."""


def run(arguments: argparse.Namespace) -> int:
    """Does the study that was asked for; its exit status."""
    _refuse(arguments)
    device = groups.device_of(groups.find(arguments), arguments.device)
    arguments.device = str(device)  # for the processes of the study
    if arguments.network == ALL:
        arguments.study = "all networks"
        errors.require("rich")
        return _all_networks(arguments, device)
    networks.get_network(arguments.network)
    single.check(arguments, single.variant_of(arguments), device)
    if arguments.find_max_batch:
        return _find_max_batch(arguments, device)
    errors.require("rich")
    arguments.study = f"compare {arguments.compare}" if arguments.compare else "ladder"
    plans = ladder(device) if arguments.ladder else compared(arguments, device)
    return _alternate(plans, arguments)


def _refuse(arguments: argparse.Namespace) -> None:
    """Raises WorkshopError for flags that a study would pass over."""
    everything = arguments.network == ALL
    wanted = [everything, arguments.compare, arguments.ladder, arguments.find_max_batch]
    if sum(map(bool, wanted)) > 1 or "RANK" in os.environ:
        raise WorkshopError(
            "--network all, --compare, --ladder, --find-max-batch: one at a time, and no torchrun"
        )
    for flag in request.of_single_run(arguments):
        raise WorkshopError(f"{flag} is for a single run: leave it out of a study")
    if everything or arguments.ladder:
        if arguments.mode == "training":
            raise WorkshopError("--network all and --ladder are for --mode inference")
        given = [name for name in _OF_A_VARIANT if getattr(arguments, name)]
        if given:
            raise WorkshopError(
                f"--{given[0].replace('_', '-')}: leave it out, --network all and --ladder have "
                "variants of their own"
            )


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
    if arguments.compile:
        return [common, (*common, *_compile_flags(arguments))]
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
    torch_, timm = (("--peer", peer, "--channels-last") for peer in request.PEERS)
    compiled = ("--compile", *graphs)
    theirs: list[Flags] = [(*torch_, *compiled), timm, (*timm, *compiled)]
    # The last one of two --precision counts.
    theirs.append(fastest(device))
    return [common, *((*flags, *common) for flags in theirs)]


def ladder(device: torch.device) -> list[Flags]:
    """From fp32 in eager mode, one change at a time; each rung keeps those before it."""
    on_gpu, half = device.type == "cuda", _half(device)
    rungs: list[Flags] = [()]
    kept: Flags
    if _has("tf32", device):
        rungs.append(("--precision", "tf32"))
    rungs.append(kept := ("--precision", half))
    rungs.append(kept := (*kept, "--channels-last"))
    rungs.append(kept := (*kept, "--fold-norms"))
    rungs.append((*kept, "--fuse-relus"))
    rungs.append((*kept, "--fuse-relus", "--compile"))
    graph = ("--cuda-graph",) if on_gpu else ()
    if on_gpu:
        rungs.append((*kept, "--fuse-relus", "--compile", *graph))
    # AOTInductor does not know the fused operator.
    rungs.append((*kept, "--export", "aoti", *graph))
    return rungs


def fastest(device: torch.device) -> Flags:
    """The rung of the ladder with all that is compiled as it runs."""
    return [rung for rung in ladder(device) if "--compile" in rung][-1]


def _half(device: torch.device) -> str:
    return "fp16" if _has("fp16", device) else "bf16"


def _has(precision: str, device: torch.device) -> bool:
    try:
        modes.check_precision(precision, device)
    except WorkshopError:
        return False
    return True


def _compile_flags(arguments: argparse.Namespace) -> Flags:
    return ("--compile", "--compileContext", arguments.compile_context or "{}")


def _speed_flags(arguments: argparse.Namespace, without: str) -> tuple[str, ...]:
    """The flags that hold for all variants: those given, but for the one that is compared."""
    flags: list[str] = []
    if without != "precision":
        flags += ["--precision", single.variant_of(arguments).precision]
    if without != "memory-format" and arguments.channels_last:
        flags.append("--channels-last")
    if without != "compile" and arguments.compile:
        flags += _compile_flags(arguments)
    for name in ("fold_norms", "fuse_relus", "cuda_graph"):
        if getattr(arguments, name):
            flags.append(f"--{name.replace('_', '-')}")
    if arguments.export:
        flags += ["--export", arguments.export]
    return tuple(flags)


# --- alternating processes -----------------------------------------------------------------------


def _alternate(plans: list[Flags], arguments: argparse.Namespace) -> int:
    folder = results.prepare_folder(arguments.output_dir)
    session, common = results.new_session(), _common_flags(arguments)
    baseline = single.planned([*common, *plans[0]], arguments.study, session)[0].variant

    def plan(flags: Flags, repeat: int) -> studies.Plan:
        return _plan([*common, *flags], arguments, session, baseline)

    measured = shared.alternating(plans, arguments.repeats, plan, arguments.jobs)
    runs, interrupted = shared.told(measured, _outcome)
    rows = labs.build_rows(runs)
    _write(rows, folder, _file_name(arguments, rows[0].first))
    return shared.status_of(rows, interrupted)


def _file_name(arguments: argparse.Namespace, first: LabRun) -> str:
    """The name of a study's table; network, batch, precision and mode are in it."""
    words = [arguments.study, arguments.network]
    if arguments.compare != "batch-size":
        words.append(f"batch {arguments.batch_size}")
    if arguments.compare not in (None, "precision"):
        words.append(str(first.options["precision"]))
    if arguments.mode == "training":
        words.append(arguments.mode)
    return re.sub(r"\W", "_", " ".join(words))


def _outcome(run: LabRun) -> str:
    if run.status == "complete":
        return f"{timing.median(run.step_ms):.3f} ms an iteration; gate {run.gate.status}"
    return run.failure


def _common_flags(arguments: argparse.Namespace) -> list[str]:
    """The flags of all processes of a study."""
    flags = ["--network", arguments.network, "--mode", arguments.mode]
    for name in ("batch_size", "iterations", "warmup_iterations", "seed", "device", "output_dir"):
        flags += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    return flags


def _plan(
    flags: list[str], arguments: argparse.Namespace, session: str, baseline: str
) -> studies.Plan:
    run, check = single.planned(flags, arguments.study, session)
    run.baseline = baseline
    command = [sys.executable, str(PROGRAM), *flags]
    return studies.Plan(command, [run], arguments.output_dir, check=check)


def _write(rows: list[LabRow], folder: Path, name: str) -> None:
    report = lab_table.of_labs([rows])
    report.show("table")
    results.write_together(
        {
            folder / f"{name}.md": tables.markdown(report.tables),
            folder / f"{name}.json": results.json_text(report.as_json()),
        }
    )
    print(f"Written: {', '.join(str(folder / f'{name}.{end}') for end in ('md', 'json'))}")
    print(f"Result file: {records.path_in(folder, rows[0].first.session)}")


# --- all networks --------------------------------------------------------------------------------


def _all_networks(arguments: argparse.Namespace, device: torch.device) -> int:
    """Each network in half precision, as it is and as fast as it gets: a table, written anew after
    each group of networks."""
    folder = results.prepare_folder(arguments.output_dir)
    plain: Flags = ("--precision", _half(device))
    variants = (plain, fastest(device))
    names = _present(dict.fromkeys(networks.ALIASES.get(name, name) for name in networks.NAMES))
    session = results.new_session()
    runs: dict[str, list[LabRun]] = {}
    if arguments.resume:
        session, runs = _resumed(arguments, device, folder, session)
        print(f"Session {session}: {len(runs)} networks are complete")
    common = _common_flags(arguments)
    first = [*common, *plain, "--network", names[0]]
    baseline = single.planned(first, arguments.study, session)[0].variant
    left = [name for name in names if name not in runs]
    size = max(1, arguments.jobs // len(variants))
    try:
        for start in range(0, len(left), size):
            group = left[start : start + size]
            plans = [(*flags, "--network", name) for name in group for flags in variants]
            measured: dict[str, list[LabRun]] = {}
            made = [_plan([*common, *plan], arguments, session, baseline) for plan in plans]
            for plan, run in zip(plans, studies.in_turns(made, arguments.jobs), strict=True):
                name = plan[-1]
                measured.setdefault(name, []).append(run)
                if len(measured[name]) == len(variants):
                    runs[name] = measured[name]
                    outcome = "; ".join(f"{run.variant}: {_outcome(run)}" for run in runs[name])
                    print(f"{len(runs)}/{len(names)} {name}: {outcome}", flush=True)
            _write_all(names, runs, folder)
    except KeyboardInterrupt:
        if not runs:
            raise
        _write_all(names, runs, folder)
        print("interrupted: the table holds what was completed; --resume", file=sys.stderr)
        return errors.INTERRUPTED
    tables.print_tables([_write_all(names, runs, folder)])
    print(f"Written: {folder / 'all_networks.md'}")
    failed = any(row.failed for found in runs.values() for row in labs.build_rows(found))
    return errors.ANSWER_IS_NO if failed else errors.DONE


def _present(names: Iterable[str]) -> list[str]:
    """Those whose package is on this machine."""
    found = []
    for name in names:
        try:
            networks.get_network(name)
            found.append(name)
        except errors.NotOnThisMachine as missing:
            print(f"{name}: skipped: {missing}")
    return found


def _resumed(
    arguments: argparse.Namespace, device: torch.device, folder: Path, session: str
) -> tuple[str, dict[str, list[LabRun]]]:
    """The newest session of the same kind, or else the given one; its networks of which both runs
    are complete. The other runs are deleted: their networks run again."""
    wanted = {"batch_size": arguments.batch_size, "mode": arguments.mode,
              "precision": _half(device)}  # fmt: skip
    alike = [
        run
        for path in sorted(folder.glob("runs/*.jsonl"))
        for run in records.load_runs(path, LabRun)
        if run.subject.endswith(f", {arguments.study}")
        and wanted.items() <= run.options.items()
        and run.device["name"] == hardware.device_name(device)
        and run.software == results.describe_software()
    ]
    if not alike:
        return session, {}
    session = max(run.session for run in alike)
    by_network: dict[str, list[LabRun]] = {}
    for run in alike:
        if run.session == session:
            by_network.setdefault(str(run.options["network"]), []).append(run)
    complete = {
        name: sorted(runs, key=lambda run: run.options["compile"] is not None)
        for name, runs in by_network.items()
        if [run.status for run in runs] == ["complete", "complete"]
    }
    stored = records.path_in(folder, session)
    comparison = records.load(stored)
    comparison.runs = [run for runs in complete.values() for run in runs]
    comparison.write(stored)
    return session, complete


def _write_all(names: list[str], runs: dict[str, list[LabRun]], folder: Path) -> tables.Table:
    pairs: list[tuple[str, LabRow, LabRow]] = []
    for name in (name for name in names if name in runs):
        rows = sorted(labs.build_rows(runs[name]), key=lambda row: not row.is_baseline)
        pairs.append((name, *rows))  # type: ignore[arg-type]
    table = all_table(pairs)
    results.write_text(folder / "all_networks.md", tables.markdown([table]))
    return table


def all_table(pairs: list[tuple[str, LabRow, LabRow]]) -> tables.Table:
    """A line for each network: plain, and as fast as it gets."""
    lines = []
    for name, plain, fast in pairs:
        cells = [name, tables.number(plain.units_per_s, ",.0f"),
                 tables.number(fast.units_per_s, ",.0f"),
                 f"{fast.speedup.value:.2f}x" if fast.speedup else "-",
                 tables.number(fast.ceiling_share, ".1%"),
                 f"{plain.verdict}, {fast.verdict}"]  # fmt: skip
        lines.append(tables.Line(cells, "red" if plain.failed or fast.failed else None))
    header = ("network", "plain images/s", "fast images/s", "speed-up", "of ceiling", "verdict")
    notes = [f"{name}: {row.note}" for name, *rows in pairs for row in rows if row.note]
    first = pairs[0][1].first
    title = f"{first.units_per_step} images, {first.options['precision']}, {first.device['name']}"
    return tables.Table(title, header, lines, notes, left=(0, 5))


# --- the largest batch ---------------------------------------------------------------------------


def largest(fits: Callable[[int], bool], most: int = MOST_IMAGES) -> int:
    """The largest batch up to `most` that fits, to a 32nd: doubled until one does not fit, then
    bisected. 0 if a single image does not fit."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while low and high - low > max(1, low // 32):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _find_max_batch(arguments: argparse.Namespace, device: torch.device) -> int:
    variant = single.variant_of(arguments)
    network = networks.get_network(arguments.network)
    training = arguments.mode == "training"
    set_arithmetic(variant.precision)
    model = networks.build(network, arguments.seed, device)

    def try_batch(batch: int) -> bool:
        setting = Setting(network, device, batch, arguments.seed)
        if estimated:
            enough = needed(model, variant, setting, training) <= limit
        else:
            enough = _runs(model, variant, setting, training)
        print(f"batch {batch:,}: {words[enough]}", flush=True)
        return enough

    estimated = device.type == "cpu"
    words = ("does not fit", "fits")
    if estimated:
        words = ("should not fit (estimated)", "should fit (estimated)")
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
        torch._dynamo.reset()  # after eight shapes it would compile no more
        gc.collect()
        torch.cuda.empty_cache()


class _Need:
    """The bytes that a batch needs on a CPU: a straight line through the peaks of one and two
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
                copies = 2 if training else 3
                held = copies * batch * 4 * 3 * setting.network.edge**2  # images in fp32
                peaks.append(memory.cpu_step_peak(iteration, lambda held=held: held))  # type: ignore[misc]
            slope = (peaks[1] - peaks[0]) / 2
            weights = memory.tensor_bytes([*model.parameters(), *model.buffers()])
            self._line = (2 * weights + peaks[0] - 2 * slope, slope)
        return self._line[0] + self._line[1] * setting.batch_size

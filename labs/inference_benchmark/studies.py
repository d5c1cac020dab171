"""Several runs: the variants of a comparison in alternating processes, and the largest batch."""

import argparse
import dataclasses
import gc
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn

from labs import shared
from labs.inference_benchmark import measure, modes, networks, request, single
from labs.inference_benchmark.measure import Inference, Learning, Work
from labs.inference_benchmark.modes import Setting, Variant
from workshop import errors, labs, records, results, tables
from workshop.compare.rows import ratio
from workshop.errors import WorkshopError
from workshop.judge import studies
from workshop.labs import LabRow, LabRun
from workshop.run import deterministic, hardware, memory, trainer
from workshop.run.precision import set_arithmetic
from workshop.run.timing import Ratio
from workshop.show import lab_table

PROGRAM = Path(__file__).with_name("micro_benchmarking_pytorch.py")
GPU_BATCHES, CPU_BATCHES = (8, 32, 128, 256), (1, 4, 16)
MOST_IMAGES = 2**17
Flags = tuple[str, ...]
"""The program's flags for one variant."""
FREE_SHARE = 0.9
"""The share of a CPU's free memory that a batch may take: beyond it the system ends the process."""


def run(arguments: argparse.Namespace) -> int:
    """Does the study that was asked for; its exit status."""
    device = request.check(arguments)
    arguments.device = str(device)  # for the processes of the study
    if arguments.find_max_batch:
        return _find_max_batch(arguments, device)
    errors.require("rich")
    if arguments.network == request.ALL:
        arguments.study = "all networks"
        return _all_networks(arguments, device)
    arguments.study = f"compare {arguments.compare}" if arguments.compare else "ladder"
    variants = ladder(device) if arguments.ladder else compared(arguments, device)
    return _alternate(variants, arguments)


# --- what is compared ----------------------------------------------------------------------------


def compared(arguments: argparse.Namespace, device: torch.device) -> list[Flags]:
    """The variants of --compare, the baseline first; the other flags hold for all of them."""
    if arguments.compare == "peers":
        return peers(single_precision(arguments), device)
    common, on_gpu = _speed_flags(arguments, without=arguments.compare), device.type == "cuda"
    if arguments.compile:
        compiled = [_compile_flags(arguments)]
    else:  # on a CPU reduce-overhead is the default mode
        contexts = ["{'mode': 'reduce-overhead'}"] * on_gpu + ["{'mode': 'max-autotune'}"]
        compiled = [("--compile",), *(("--compile", "--compileContext", c) for c in contexts)]
    precisions = (name for name in ("fp32", "tf32", "bf16", "fp16") if _has(name, device))
    batches = GPU_BATCHES if on_gpu else CPU_BATCHES
    variants: dict[str, list[Flags]] = {
        "precision": [("--precision", name) for name in precisions],
        "memory-format": [(), ("--channels-last",)],
        "batch-size": [("--batch-size", str(batch)) for batch in batches],
        "compile": [(), *compiled],
    }
    return [(*common, *flags) for flags in variants[arguments.compare]]


def single_precision(arguments: argparse.Namespace) -> Flags:
    return ("--precision", request.variant_of(arguments).precision)


def peers(precision: Flags, device: torch.device) -> list[Flags]:
    """At one precision: plain, the peers as their users run them for speed, and ours."""
    graphs = ("--compileContext", "{'mode': 'reduce-overhead'}") if device.type == "cuda" else ()
    torch_, timm = (("--peer", peer, "--channels-last") for peer in request.PEERS)
    compiled = ("--compile", *graphs)
    theirs = [(*torch_, *compiled), timm, (*timm, *compiled)]
    # The last one of two --precision counts.
    return [precision, *((*flags, *precision) for flags in [*theirs, fastest(device)])]


def ladder(device: torch.device) -> list[Flags]:
    """From fp32 in eager mode, one change at a time; each rung keeps those before it."""
    graph = ("--cuda-graph",) if device.type == "cuda" else ()
    half = ("--precision", _half(device))
    folded = (*half, "--channels-last", "--fold-norms")
    fused = (*folded, "--fuse-relus")
    compiled = (*fused, "--compile")
    return [
        (),
        *([("--precision", "tf32")] if _has("tf32", device) else []),
        half,
        (*half, "--channels-last"),
        folded,
        fused,
        compiled,
        *([(*compiled, *graph)] if graph else []),
        (*folded, "--export", "aoti", *graph),  # which does not know the fused operator
    ]


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


def _speed_flags(arguments: argparse.Namespace, without: str) -> Flags:
    """The flags that hold for all variants: those given, without the one that is compared."""
    flags = {
        "precision": single_precision(arguments),
        "memory-format": ("--channels-last",) * arguments.channels_last,
        "compile": _compile_flags(arguments) if arguments.compile else (),
        "fold": ("--fold-norms",) * arguments.fold_norms,
        "fuse": ("--fuse-relus",) * arguments.fuse_relus,
        "graph": ("--cuda-graph",) * arguments.cuda_graph,
        "export": ("--export", arguments.export) if arguments.export else (),
    }
    return tuple(word for name, words in flags.items() if name != without for word in words)


# --- alternating processes -----------------------------------------------------------------------


def _alternate(variants: list[Flags], arguments: argparse.Namespace) -> int:
    names = request.names_of(arguments)
    cases: list[Flags] = [("--network", name, *flags) for name in names for flags in variants]
    folder = results.prepare_folder(arguments.output_dir)
    session, common = results.new_session(), _common_flags(arguments)
    baseline = single.planned([*common, *cases[0]], arguments.study, session)[0].variant

    def plan(flags: Flags, repeat: int) -> studies.Plan:
        return _plan([*common, *flags], arguments, session, baseline)

    measured = shared.alternating(cases, arguments.repeats, plan, arguments.jobs)
    runs, interrupted = shared.told(measured, _outcome)
    rows = labs.build_rows(runs)
    by_subject = defaultdict(list)
    for row in rows:
        by_subject[row.first.subject].append(row)
    report = lab_table.of_labs([*by_subject.values()])
    if len(names) > 1 and len(variants) == 2:
        report = dataclasses.replace(report, tables=[all_table(rows)])
    target = folder / f"{_file_name(arguments, rows[0].first)}.md"
    results.write_json(target.with_suffix(".json"), report.as_json())
    shared.show(report.tables, rows, target)
    print(f"Written: {target.with_suffix('.json')}")
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
    return shared.ms_and_gate(run, "an iteration")


def _common_flags(arguments: argparse.Namespace) -> list[str]:
    """The flags of all processes of a study."""
    flags = ["--mode", arguments.mode]
    for name in ("batch_size", "iterations", "warmup_iterations", "seed", "device", "output_dir"):
        flags += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    return flags + [deterministic.FLAG] * arguments.deterministic


def _plan(
    flags: list[str], arguments: argparse.Namespace, session: str, baseline: str
) -> studies.Plan:
    run, check = single.planned(flags, arguments.study, session)
    run.baseline = baseline
    command = [sys.executable, str(PROGRAM), *flags]
    return studies.Plan(command, [run], arguments.output_dir, check=check)


# --- all networks --------------------------------------------------------------------------------


def _all_networks(arguments: argparse.Namespace, device: torch.device) -> int:
    """Each network in half precision, as it is and as fast as it gets."""
    folder = results.prepare_folder(arguments.output_dir)
    variants = (("--precision", _half(device)), fastest(device))
    session, done = results.new_session(), list[LabRun]()
    if arguments.resume:
        session, done = _resumed(arguments, device, folder, session)
        print(f"Session {session}: {len(done) // 2} networks are complete")
    known = {run.options["network"] for run in done}
    names = _present(dict.fromkeys(networks.ALIASES.get(name, name) for name in networks.NAMES))
    cases = [
        [*_common_flags(arguments), *variant, "--network", name]
        for name in names
        if name not in known
        for variant in variants
    ]

    def plan(flags: list[str], repeat: int) -> studies.Plan:
        return _plan(flags, arguments, session, baseline)

    baseline = ""
    if cases:
        baseline = plan(cases[0], 0).planned[0].variant
    runs, interrupted = shared.told(shared.alternating(cases, 1, plan, arguments.jobs), _outcome)
    rows = labs.build_rows([*done, *runs])
    shared.show([all_table(rows)], rows, folder / "all_networks.md")
    return shared.status_of(rows, interrupted)


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
) -> tuple[str, list[LabRun]]:
    """The newest session of the same kind, or else the given one; its runs of networks of which
    both are complete. The others are deleted: their networks run again."""
    wanted = {
        "batch_size": arguments.batch_size, "mode": arguments.mode, "precision": _half(device)
    }  # fmt: skip
    alike = [
        run
        for path in sorted(folder.glob("runs/*.jsonl"))
        for run in records.load_runs(path, LabRun)
        if run.subject.endswith(f", {arguments.study}")
        and wanted.items() <= run.options.items()
        and run.device["name"] == hardware.device_name(device)
        and run.software == results.describe_software()
    ]
    session = max((run.session for run in alike), default=session)
    own = [run for run in alike if run.session == session]
    complete = Counter(run.options["network"] for run in own if run.status == "complete")
    done = [run for run in own if complete[run.options["network"]] == 2]
    if own:
        stored = records.path_in(folder, session)
        comparison = records.load(stored)
        comparison.runs = [*done]
        comparison.write(stored)
    return session, done


def _rate(row: LabRow) -> str:
    """With two decimals, where a CPU does a few images a second."""
    return tables.number(row.units_per_s, ",.2f" if (row.units_per_s or 0) < 100 else ",.0f")


def _gain(gain: Ratio | None) -> str:
    """With its interval, if there is one."""
    if gain is None or gain.interval:
        return ratio(gain, tables.SAME)
    return f"{gain.value:.2f}x"


def all_table(rows: Iterable[LabRow]) -> tables.Table:
    """A line for each network whose two runs are there: plain, and as fast as it gets."""
    by_network = defaultdict(list)
    for row in rows:
        by_network[str(row.first.options["network"])].append(row)
    lines, notes, title = [], [], ""
    for name, both in by_network.items():
        if len(both) != 2:
            continue
        plain, fast = sorted(both, key=lambda row: row.first.options["compile"] is not None)
        gain, first = labs.speedup(plain, fast), plain.first
        cells = [name, _rate(plain), _rate(fast), _gain(gain),
                 tables.number(fast.ceiling_share, ".1%"),
                 f"{plain.verdict}, {fast.verdict}"]  # fmt: skip
        lines.append(tables.Line(cells, "red" if plain.failed or fast.failed else None))
        notes += [f"{name}: {row.note}" for row in (plain, fast) if row.note]
        title = f"{first.units_per_step} images, {first.options['precision']}, one process each, "
        title += str(first.device["name"])
    header = ("network", "plain images/s", "fast images/s", "speed-up", "of ceiling", "verdict")
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
    variant = request.variant_of(arguments)
    network = networks.get_network(arguments.network)
    training = arguments.mode == "training"
    set_arithmetic(variant.precision)
    model = networks.build(network, arguments.seed, device)

    def make(batch: int) -> Work:
        setting = Setting(network, device, batch, arguments.seed)
        return make_work(model, variant, setting, training)

    estimated = device.type == "cpu"
    words = ("does not fit", "fits")
    if estimated:
        words = ("should not fit (estimated)", "should fit (estimated)")
        limit = FREE_SHARE * (hardware.free_memory_bytes(device) or 0)
        fixed, each = cpu_need(make, model, network.edge)

    def try_batch(batch: int) -> bool:
        enough = fixed + each * batch <= limit if estimated else runs_on_gpu(make, batch)
        print(f"batch {batch:,}: {words[enough]}", flush=True)
        return enough

    found = largest(try_batch)
    if not found:
        raise errors.OutOfMemory(f"{network.name}: a single image does not fit in memory")
    print(f"Largest batch: {found:,} ({variant.label}, {arguments.mode})")
    return errors.DONE


def make_work(model: nn.Module, variant: Variant, setting: Setting, training: bool) -> Work:
    """Iterations as the benchmark runs them, on black images, to see what memory they take."""
    if training:
        return Learning(setting, variant, model, black=True)
    work = Inference(setting, variant, model, black=True)
    work.capture()
    return work


def runs_on_gpu(make: Callable[[int], Work], batch: int) -> bool:
    """Whether an iteration runs; whatever it took is given back."""
    try:
        with trainer.memory_failure_as(lambda asked: errors.OutOfMemory(asked)):
            work = make(batch)
            work(0)
            measure.wait(work.inputs.batch.device)
        return True
    except errors.OutOfMemory:
        return False
    finally:
        work = None  # type: ignore[assignment]
        torch._dynamo.reset()  # after eight shapes it would compile no more
        gc.collect()
        torch.cuda.empty_cache()


def cpu_need(make: Callable[[int], Work], model: nn.Module, edge: int) -> tuple[float, float]:
    """The bytes that a batch needs on a CPU, fixed and for each image: a straight line through the
    peaks of two and four images, since a system without memory left ends the process."""
    peaks = []
    for batch in (2, 4):
        work = make(batch)  # not measured: converting weights takes more than so few images
        copies = 2 if isinstance(work, Learning) else 3
        held = copies * batch * 4 * 3 * edge**2  # images in fp32
        peaks.append(memory.cpu_step_peak(lambda: work(0), lambda: held))  # noqa: B023
    each = (peaks[1] - peaks[0]) / 2
    weights = memory.tensor_bytes([*model.parameters(), *model.buffers()])
    return 2 * weights + peaks[0] - 2 * each, each

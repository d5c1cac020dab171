"""A model of the step's time: computation, plus the communication that it can't hide.

Its inputs are measured in one process (the step and its phases) and on the links (the bandwidth of
the collectives). It leaves out a host that launches kernels late, processes that wait for the
slowest one, the engine's copies of gradients, and the part of the GPU that communication takes from
computation. For more GPUs than were measured, the picture adds what these cost in the largest
measured step.

DDP sends a bucket of gradients as soon as the backward pass has computed it: what lasts longer than
that pass can't be hidden, nor can the last bucket, which has the gradient of the embedding.
FSDP2 gathers the weights of a layer while the one before it computes, in both passes, and reduces
gradients beside the backward pass: what lasts longer than both passes can't be hidden, nor can the
first gather and the last reduction.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from labs.scale_out import collectives, scaling
from workshop import results, versions
from workshop.compare.tables import Line, Table, number
from workshop.labs import LabRow
from workshop.run import flops, presets

BUCKET_MB = 25
"""The size of DDP's buckets, in MiB of fp32; the first has 1 MiB."""
GPUS_A_HOST = 8
NETWORKS_GBS = (50.0, 12.5)
"""A GPU's share of its host's network: 400 and 100 Gbit/s."""
SIZES = tuple(2**power for power in range(3, 11))
"""Numbers of GPUs that the picture predicts."""
STRATEGIES = ("ddp", "fsdp")


class Link(NamedTuple):
    """A line fitted to a collective's times: a message takes `latency_ms`, plus `ms_a_byte` for
    each byte that the bus carries."""

    latency_ms: float
    ms_a_byte: float
    processes: int
    """Their number in the measurement."""


@dataclass(frozen=True)
class Model:
    """A training in one process, and the bytes it would send. Times in ms, sizes in bytes."""

    strategy: str
    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    gradients: float
    """Gradients of all weights, in fp32."""
    gathered: float
    """All layers' weights, as FSDP2 gathers them."""
    embedding: float
    """The embedding's weight, or its gradient; it is outside of the layers."""
    layers: int
    bucket: float = BUCKET_MB * 2.0**20
    """A bucket of DDP, in fp32."""
    sent: float = 1.0
    """The part of a gradient's bytes that is sent: half of them in bf16."""


def fit(curve: collectives.Curve, name: str, processes: int) -> Link:
    """Fits a line to a collective's times by least squares of the relative errors, so that small
    messages determine the latency and large ones the bandwidth."""
    carried = [size * collectives.bus_factor(name, processes) for size, _ in curve]
    points = [(x, x / gbs / 1e6) for x, (_, gbs) in zip(carried, curve, strict=True)]
    weights = [1 / ms**2 for _, ms in points]
    w = sum(weights)
    mean_x, mean_y = (
        sum(weight * point[i] for weight, point in zip(weights, points, strict=True)) / w
        for i in (0, 1)
    )
    both = sum(a * (x - mean_x) * (y - mean_y) for a, (x, y) in zip(weights, points, strict=True))
    square = sum(a * (x - mean_x) ** 2 for a, (x, _) in zip(weights, points, strict=True))
    slope = both / square if len(points) > 1 else mean_y / mean_x
    return Link(max(0.0, mean_y - slope * mean_x), slope, processes)


def message_ms(
    link: Link, name: str, size: float, processes: int, messages: int = 1,
    network_gbs: float = math.inf,
) -> float:  # fmt: skip
    """The time in ms of `messages` messages that have `size` bytes together.

    Latency grows with the logarithm of the number of processes, as in a tree. Beyond one host, the
    bus is limited by the network links of all GPUs of a host.
    """
    if processes == 1:
        return 0.0
    latency = link.latency_ms * math.log2(processes) / math.log2(link.processes)
    ms_a_byte = link.ms_a_byte
    if processes > GPUS_A_HOST:
        ms_a_byte = max(ms_a_byte, 1e-6 / (network_gbs * GPUS_A_HOST))
    return messages * latency + size * collectives.bus_factor(name, processes) * ms_a_byte


def step_ms(
    model: Model, links: dict[str, Link], processes: int, share: float = 1.0,
    network_gbs: float = math.inf,
) -> float:  # fmt: skip
    """The time in ms of a step with `processes` processes.

    Args:
        share: each process's batch, relative to that of one process alone: 1 for weak scaling.
    """

    def ms(name: str, size: float, messages: int = 1) -> float:
        return message_ms(links[name], name, size, processes, messages, network_gbs)

    forward, backward = model.forward_ms * share, model.backward_ms * share
    if model.strategy == "ddp":
        last = min(max(model.embedding, model.bucket), model.gradients) * model.sent
        buckets = math.ceil(model.gradients / model.bucket)
        all_ms = ms("all-reduce", model.gradients * model.sent, buckets)
        exposed = max(ms("all-reduce", last), all_ms - backward) if processes > 1 else 0.0
        return forward + backward + model.optimizer_ms + exposed
    gathers = 2 * ms("all-gather", model.gathered, model.layers) + ms("all-gather", model.embedding)
    reductions = ms("reduce-scatter", model.gradients * model.sent, model.layers + 1)
    ends = ms("all-gather", model.embedding + model.gathered / model.layers)
    ends += ms("reduce-scatter", model.embedding * model.sent)
    exposed = max(ends, gathers + reductions - forward - backward)
    return forward + backward + model.optimizer_ms / processes + exposed


# --- from the rows of a session ------------------------------------------------------------------


def model_of(row: LabRow) -> Model | None:
    """The model of a row of one process; None without its phases, or for another strategy."""
    run, step = row.first, row.step_ms
    parts = [row.metric(f"{name}_ms") for name in ("forward", "backward", "optimizer")]
    strategy = str(run.options.get("strategy"))
    if strategy not in STRATEGIES or step is None or None in parts:
        return None
    known = [part for part in parts if part is not None]
    scale = step / sum(known)  # the phases are measured separately, and their marks take time
    forward, backward, optimizer = (scale * part for part in known)
    sizes = presets.get_preset(str(run.options["config"])).model()
    layers = run.options.get("num_layers", sizes["num_layers"])
    config = versions.load("v1").TinyLlamaConfig(**sizes | {"num_layers": layers})
    weights = flops.parameter_count(config)
    embedding = config.vocab_size * config.hidden_dim
    low = 2 if run.options["precision"] == "bf16" else 4
    return Model(
        strategy,
        forward,
        backward,
        optimizer,
        gradients=4 * weights,
        gathered=low * (weights - embedding),
        embedding=4 * embedding,
        layers=config.num_layers,
        bucket=float(run.options.get("bucket_mb") or BUCKET_MB) * 2**20,
        sent=0.5 if run.options.get("reduce_dtype") == "bf16" else 1.0,
    )


def links_of(rows: Iterable[LabRow], device: str, processes: int) -> dict[str, Link]:
    """The links measured with this number of processes, else with the largest; {} if none."""
    found = {n: its for (name, n), its in collectives.curves(rows).items() if name == device}
    if not found:
        return {}
    n = processes if processes in found else max(found)
    return {name: fit(curve, name, n) for name, curve in found[n].items()}


@dataclass(frozen=True)
class Check:
    """A measured row, and the model's prediction for it."""

    row: LabRow
    kind: str
    measured_ms: float
    predicted_ms: float


def checks(rows: Sequence[LabRow], of_device: Sequence[LabRow] = ()) -> list[Check]:
    """All rows of several processes for which there is a prediction, from the links that `rows`
    have, or else `of_device`."""
    found = []
    for row in rows:
        peers = [one for one in rows if _together(one, row)]
        one, n = scaling.alone(row, peers), row.first.processes
        model = model_of(one) if one else None
        links = links_of(rows, row.device, n) or links_of(of_device, row.device, n)
        if one is None or model is None or n == 1 or row.step_ms is None or len(links) < 3:
            continue
        if row.first.options["strategy"] != model.strategy:  # p2p, compared with ddp's one process
            continue
        share = scaling.sequences(row) / scaling.sequences(one)
        kind = scaling.kind(row, peers)
        found.append(Check(row, kind, row.step_ms, step_ms(model, links, n, share)))
    return found


def _together(one: LabRow, other: LabRow) -> bool:
    return (one.device, one.first.subject) == (other.device, other.first.subject)


def check_table(found: Sequence[Check]) -> Table:
    lines = [
        Line([check.row.first.subject.split(",")[0], scaling.training_of(check.row),
              str(check.row.first.processes), check.kind, number(check.measured_ms, ",.2f"),
              number(check.predicted_ms, ",.2f"),
              f"{check.predicted_ms / check.measured_ms - 1:+.1%}"])
        for check in found
    ]  # fmt: skip
    header = ("model", "training", "processes", "scaling", "measured ms", "predicted ms", "off by")
    title = f"the step's time, predicted from one process and the links: {found[0].row.device}"
    return Table(title, header, lines, left=(0, 1, 3))


def draw(rows: Sequence[LabRow], target: Path) -> bool:
    """Draws the efficiency of weak scaling, predicted and measured; returns whether there was
    something to draw. The rows are of one device."""
    models: dict[tuple[str, str], tuple[LabRow, Model, list[LabRow]]] = {}
    for row in rows:
        if row.first.processes == 1 and (model := model_of(row)):
            weak, key = _weak(row, model, rows), (row.first.subject, scaling.training_of(row))
            if key not in models or len(weak) >= len(models[key][2]):  # of several sessions
                models[key] = row, model, weak
    links = links_of(rows, rows[0].device, 0)
    if not models or len(links) < 3:
        return False
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    subjects = list(dict.fromkeys(subject for subject, _ in models))
    figure, axes = plt.subplots(
        1, len(subjects), figsize=(2 + 6 * len(subjects), 6), layout="constrained", squeeze=False,
        sharey=True,
    )  # fmt: skip
    measured_to = max(row.first.processes for row in rows)
    sizes = [n for n in (2, 4, *SIZES) if n >= measured_to]
    for axis, subject in zip(axes[0], subjects, strict=True):
        trainings = [(name, *found) for (of, name), found in models.items() if of == subject]
        for place, (name, one, model, weak) in enumerate(trainings):
            series = list(dict.fromkeys(map(scaling.training_of, weak))) or [name]
            for label, marker in zip(series, "os", strict=False):
                measured = [row for row in weak if scaling.training_of(row) == label]
                _draw_training(
                    axis,
                    one,
                    measured,
                    (model, links, sizes),
                    label=label,
                    marker=marker,
                    color=f"C{place}",
                )
        axis.axvspan(measured_to, SIZES[-1], color="0.95", zorder=0)
        axis.set_xscale("log", base=2)
        ticks = (1, 2, *SIZES[::2], SIZES[-1])
        axis.set_xticks(ticks, [f"{n:,}" for n in ticks])
        axis.set_ylim(0, 119)
        axis.set_xlabel("GPUs, each with the batch of one")
        axis.set_title(subject, loc="left", fontsize=10)
        axis.text(0.98, 0.97, "grey: PREDICTED, not measured", transform=axis.transAxes, ha="right",
                  va="top", fontsize=10, fontweight="bold")  # fmt: skip
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, loc="lower left")
    axes[0][0].set_ylabel("efficiency of weak scaling, %")
    figure.suptitle(f"{rows[0].device}\n{assumptions(links)}", x=0.01, ha="left", fontsize=9)
    with results.atomic_path(target) as path:
        figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def _weak(one: LabRow, model: Model, rows: Sequence[LabRow]) -> list[LabRow]:
    """The rows of weak scaling that are compared with the row `one`."""
    its = [row for row in rows if _together(one, row) and row.first.session == one.first.session]
    return [
        row
        for row in its
        if row.first.baseline == one.first.variant
        and row.first.options["strategy"] == model.strategy
        and scaling.kind(row, its) == "weak"
        and scaling.efficiency(row)
    ]


def _draw_training(
    axis: Any, one: LabRow, weak: Sequence[LabRow],
    inputs: tuple[Model, dict[str, Link], list[int]], **look: str,
) -> None:  # fmt: skip
    """Draws a training's measured efficiencies, and the prediction that begins at the last of them:
    what that step took beyond the model's time is added to the model's time of each larger size."""
    model, links, sizes = inputs
    rows = sorted(weak, key=lambda row: row.first.processes)
    points = [(row.first.processes, 100 * found.value) for row in rows
              if (found := scaling.efficiency(row))]  # fmt: skip
    axis.plot(*zip((1, 100.0), *points, strict=True), "-", **look)
    last = rows[-1] if rows else one
    beyond = (last.step_ms or 0.0) - step_ms(model, links, last.first.processes)
    alone_ms = step_ms(model, links, 1)
    for style, network in zip(("--", ":"), NETWORKS_GBS, strict=True):
        rates = [100 * alone_ms / (step_ms(model, links, n, network_gbs=network) + beyond)
                 for n in sizes]  # fmt: skip
        axis.plot(sizes, rates, style, color=look["color"])


def assumptions(links: dict[str, Link]) -> str:
    """The text above the picture."""
    link = links["all-reduce"]
    rate, latency = 1e-6 / link.ms_a_byte, 1e3 * link.latency_ms
    fast, slow = (8 * gbs for gbs in NETWORKS_GBS)
    return "\n".join([
        "Points: measured. Lines beyond: the step of one GPU, the communication that it can't hide,"
        " and what the last measured",
        "step took beyond both (copies of gradients, kernels slowed by communication beside them), "
        "assuming no slow process,",
        f"{GPUS_A_HOST} GPUs a host, between hosts a network of {fast:g} Gbit/s a GPU (dashed) or "
        f"{slow:g} (dotted), all of which a collective uses;",
        f"all-reduce at {rate:,.3g} GB/s on the bus and {latency:,.0f} µs a message, as measured "
        f"with {link.processes} processes, latency growing with log2",
    ])  # fmt: skip

"""Several GPUs: predictions and findings against the participant's own runs of torchrun."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from labs.group import Group
from labs.inference_benchmark.own_runs import images_per_s, text_option
from workshop.exercises.frame import Item, Missing, Work
from workshop.exercises.predict import Chosen, Found, Predicted, Question, ask, disturbed
from workshop.labs import LabRun

PROGRAM = "labs/inference_benchmark/micro_benchmarking_pytorch.py"
GROUP = f"OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 {PROGRAM}"
NETWORK = "--network resnet18 --iterations 10"


@dataclass(frozen=True)
class Measured:
    """The newest runs of a group: of inference with a batch that its processes share equally and
    with one that leaves a remainder, and of training."""

    even: LabRun
    """With training's network and batch."""
    uneven: LabRun
    training: LabRun
    batches: Sequence[LabRun]
    """As `even` with three batches or more, the smallest first."""
    networks: Sequence[LabRun]
    """As `even` with three networks or more, the one with the fewest operations first."""

    @property
    def parts(self) -> tuple[int, ...]:
        """Images of each process in the uneven run."""
        return Group(size=self.uneven.processes).parts(self.uneven.units_per_step)

    @property
    def most(self) -> float:
        """The efficiency that the uneven parts allow, in percent."""
        return 100 * sum(self.parts) / (len(self.parts) * max(self.parts))


def check(work: Work) -> Iterator[Item]:
    return ask(work, measured, (_runs, *QUESTIONS))


def percent(run: LabRun) -> float:
    """Efficiency."""
    return 100 * float(run.metrics["scaling_efficiency"] or 0)


def points(runs: Sequence[LabRun]) -> float:
    """The last one's efficiency over the first one's, in percentage points."""
    return percent(runs[-1]) - percent(runs[0])


QUESTIONS: tuple[Question[Measured], ...] = (
    Predicted("predict.inference_percent", "predicted: efficiency in inference", "%",
              lambda m: percent(m.even),
              "Replicas exchange nothing. What they share takes the rest: the host's processors, "
              "on a CPU its memory and caches; and a group is as slow as its slowest process.",
              within=0.15),
    Predicted("predict.training_percent", "predicted: efficiency in training", "%",
              lambda m: percent(m.training),
              "Each step waits until the gradients of all weights have gone round: the fewer "
              "images a process has for each exchange, the more that costs.", within=0.15),
    Found("found.images_per_s", "all processes together", "images/s",
          lambda m: images_per_s(m.even),
          "The line `Throughput: ... (global)` of the newest run with a batch that divides."),
    Found("found.alone_per_s", "one process alone", "images/s",
          lambda m: float(m.even.metrics["one_process_per_s"] or 0),
          "The line `One GPU alone` (CPU: `One process alone`), of the same run."),
    Found("found.efficiency_percent", "efficiency in inference", "%", lambda m: percent(m.even),
          "Throughput of all over that of one alone and the number of processes, times 100.",
          slips=lambda m: [(
              percent(m.even) * m.even.processes,
              "that is the speed-up in percent: divide it by the number of processes",
          )]),
    Found("found.first_has", "images of the first process", "images", lambda m: m.parts[0],
          "The line `Local batch size` of GPU (or process) 0, of the run with a remainder.",
          within=0),
    Found("found.second_has", "images of the second process", "images", lambda m: m.parts[1],
          "The second process's line `Local batch size`; together they have the whole batch.",
          within=0),
    Found("found.most_percent", "the most that a remainder allows", "%", lambda m: m.most,
          "The group takes as long as the process with the most images. How many images could all "
          "processes do in that time?", within=0.01,
          slips=lambda m: [(100.0, "the process with fewer images waits for the other")]),
    Found("found.training_percent", "efficiency in training", "%", lambda m: percent(m.training),
          "The line `Scaling efficiency` of the run with --mode training."),
    Found("found.exchanged_mb", "gradients of a step", "MB",
          lambda m: float(m.training.memory_mb["gradients"]),
          "One for each weight, in fp32: the line `Memory Usage` of the run in training names "
          "them.", within=0.05),
    Chosen("found.exchange", "what training exchanges", ("images", "gradients", "logits"),
           lambda m: "gradients",
           "each process has images of its own, and its loss is its own too; what must be equal "
           "are the weights after the step"),
    Chosen("found.with_batch", "the exchange with a larger batch", ("grow", "shrink", "stay"),
           lambda m: "stay", "the number of gradients depends on the network, not on the batch",
           lambda m: "stays, so that a larger batch has more work for each exchange"),
    Found("tables.batch_points", "efficiency, the largest batch's less the smallest's", "points",
          lambda m: points(m.batches),
          "The percentage of the table's last batch less that of its first.", margin=0.6),
    Found("tables.network_points", "efficiency, the largest network's less the smallest's",
          "points", lambda m: points(m.networks),
          "The percentage of the table's last network less that of its first.", margin=0.6),
    Chosen("tables.by_exchange", "whether an exchange explains it", ("yes", "no"), lambda m: "no",
           "in inference the processes send each other nothing while the clock runs"),
)  # fmt: skip


def _runs(work: Work) -> Iterator[Item]:
    m = measured(work)
    note = (
        f"{images_per_s(m.even):,.1f} images/s at {percent(m.even):.0f}%, with a remainder "
        f"{percent(m.uneven):.0f}% of at most {m.most:.0f}%, in training {percent(m.training):.0f}%"
    )
    yield Item(True, f"your runs: {m.even.options['network']}, {m.even.device['name']}", note)
    for name, runs in (("batches", m.batches), ("networks", m.networks)):
        lines = (
            f"{run.options['network']}, {run.units_per_step // run.processes} a process: one alone "
            f"{float(run.metrics['one_process_per_s'] or 0):,.1f}, {run.processes} processes "
            f"{images_per_s(run):,.1f} images/s, efficiency {percent(run):.1f}%"
            for run in runs
        )
        yield Item(True, f"your table of {name}", "\n".join(lines))
    yield from disturbed((m.even, m.uneven, m.training, *m.batches, *m.networks))


# --- the participant's runs ----------------------------------------------------------------------


def measured(work: Work) -> Measured:
    """Raises Missing: one of the runs is not there."""
    groups = [run for run in work.lab_runs("inference_benchmark") if run.processes > 1]
    inference = [run for run in groups if run.options["mode"] == "inference"]
    evens = [run for run in inference if not _remainder(run)]
    if not evens:
        raise Missing("no inference of several processes yet:", f"{GROUP} {NETWORK} --batch-size 8")
    uneven = next((run for run in inference if _remainder(run)), None)
    if uneven is None:
        raise Missing("no batch with a remainder yet:", f"{GROUP} {NETWORK} --batch-size 5")
    trained = {_work(run): run for run in groups[::-1] if run.options["mode"] == "training"}
    even = next((run for run in evens if _work(run) in trained), None)
    if even is None:
        network, batch = _work(evens[-1])
        flags = f"--network {network} --iterations 10 --batch-size {batch}"
        raise Missing("no training of the same batch yet:", f"{GROUP} {flags} --mode training")
    network, batch = _work(even)
    newest = {_work(run): run for run in evens[::-1] if run.variant == even.variant}
    batches = [run for (name, _), run in newest.items() if name == network]
    networks = [run for (_, size), run in newest.items() if size == batch]
    for found, flags in (
        (batches, f"--network {network} --iterations 10 --batch-size {2 * batch}"),
        (networks, f"--network resnet50 --iterations 10 --batch-size {batch}"),
    ):
        if len(found) < 3:
            raise Missing("three batches and three networks are needed:", f"{GROUP} {flags}")
    batches.sort(key=lambda run: run.units_per_step)
    networks.sort(key=lambda run: run.flops_per_step or 0.0)
    return Measured(even, uneven, trained[_work(even)], batches, networks)


def _work(run: LabRun) -> tuple[str, int]:
    return text_option(run, "network"), run.units_per_step


def _remainder(run: LabRun) -> int:
    return run.units_per_step % run.processes

"""Memory: predictions and findings against the participant's runs of V1 at three lengths."""

from collections.abc import Iterator

from workshop.exercises.frame import Item, Missing, Work, setting
from workshop.exercises.predict import Chosen, Found, Predicted, Question, ask
from workshop.results import RunResult, model_sizes
from workshop.run import flops

RUN = (
    "python version1_pytorch_baseline/tiny_llama_v1.py --num-steps 2 --warmup-steps 1 "
    "--batch-size {batch} --seq-len {length}"
)
BATCH = 2
SHORT, MIDDLE, LONG = 128, 256, 512
STATE = ("weights", "gradients", "optimizer_state")
BYTES_OF_FP32 = 4
GPU_MB = 16_000
SQUARE = "softmax of the scores"
TENSORS = ("gate and up", "keys and values", SQUARE, "logits")

Measured = dict[int, RunResult]
"""The newest run of each length, all of one model on one device."""


def check(work: Work) -> Iterator[Item]:
    return ask(work, measured, (_runs, *QUESTIONS))


def state_mb(run: RunResult) -> float:
    return sum(float(run.memory_mb[part]) for part in STATE)


def rest_mb(run: RunResult) -> float:
    return float(run.memory_mb["rest"])


def square_mb(run: RunResult) -> float:
    """Memory of the softmax's results in all layers, in fp32."""
    elements = run.batch_size * run.config["num_heads"] * run.seq_len**2
    return float(run.config["num_layers"] * elements * BYTES_OF_FP32 / 1e6)


def weights(run: RunResult) -> int:
    return flops.parameter_count(model_sizes(run.config))


QUESTIONS: tuple[Question[Measured], ...] = (
    Predicted(
        "predict.bytes_a_weight", "predicted: bytes for each weight", "bytes",
        lambda run: state_mb(run[LONG]) * 1e6 / weights(run[LONG]),
        "Weight, gradient and two moments, in fp32. An optimizer without moments needs 8; bf16 "
        "autocast changes nothing here, since the weights themselves stay fp32.", within=0.05,
    ),
    Predicted(
        "predict.state_mb", "predicted: the state", "MB", lambda run: state_mb(run[LONG]),
        "It follows from the number of weights alone: no batch is small enough to avoid it.",
        within=0.05,
    ),
    Predicted(
        "predict.rest_512_mb", "predicted: `rest` with 512 tokens", "MB",
        lambda run: rest_mb(run[LONG]),
        "Twice the last one is right for all tensors with a row a token, four times for the one "
        "that has a column a token too: two points do not yet show how much of which there is.",
        within=0.15,
    ),
    Found(
        "found.state_mb", "the state", "MB", lambda run: state_mb(run[LONG]),
        "Weights, gradients and optimizer state of the line `memory`, added up.",
    ),
    Found(
        "found.rest_growth", "`rest`, from 256 to 512 tokens", "x",
        lambda run: rest_mb(run[LONG]) / rest_mb(run[MIDDLE]),
        "`rest` of the run with 512 tokens over that of the run with 256.",
    ),
    Found(
        "found.state_growth", "the state, from 256 to 512 tokens", "x",
        lambda run: state_mb(run[LONG]) / state_mb(run[MIDDLE]),
        "Weights, gradients and optimizer state, of both runs.",
    ),
    Found(
        "found.square_mb", "the tensor that grows with the square, in all layers", "MB",
        lambda run: square_mb(run[LONG]),
        "Its shape is (batch, heads, T, T): with 2 sequences, times the layers, times 4 bytes.",
    ),
    Found(
        "found.square_percent", "its share of `rest`", "%",
        lambda run: 100 * square_mb(run[LONG]) / rest_mb(run[LONG]),
        "Its MB over the MB of `rest`, with 512 tokens; in percent, not as a fraction.",
        within=0.06,
    ),
    Found(
        "found.sequences_in_16_gb", "sequences of 512 tokens in 16 GB", "",
        lambda run: BATCH * (GPU_MB - state_mb(run[LONG])) / rest_mb(run[LONG]),
        "What the state leaves of 16,000 MB, over the `rest` of one sequence: half of that of two.",
        within=0.08,
    ),
    Chosen(
        "found.square", "which tensor grows with the square", TENSORS, lambda run: SQUARE,
        "its rows are tokens, but are its columns tokens too?",
    ),
)  # fmt: skip


def _runs(work: Work) -> Iterator[Item]:
    run = measured(work)
    rests = ", ".join(f"{rest_mb(run[length]):.4g}" for length in (SHORT, MIDDLE, LONG))
    newest = run[LONG]
    yield Item(
        True,
        f"your three runs: {weights(newest):,} weights, {newest.device['name']}",
        f"`rest` with {SHORT}, {MIDDLE} and {LONG} tokens: {rests} MB",
    )


def measured(work: Work) -> Measured:
    """Raises Missing: there is no run of one of the lengths."""
    runs = [run for run in work.runs("v1", batch_size=BATCH) if "rest" in run.memory_mb]
    newest: Measured = {}
    for run in runs:
        if run.seq_len in (SHORT, MIDDLE, LONG) and setting(run) == setting(runs[0]):
            newest.setdefault(run.seq_len, run)
    for length in (SHORT, MIDDLE, LONG):
        if length not in newest:
            command = RUN.format(batch=BATCH, length=length)
            raise Missing(f"no run of V1 with {BATCH} sequences of {length} tokens yet:", command)
    return newest

"""The record of one process, and the writing of files: whole or not at all.

A record is a dataclass, which needs PyTorch alone; `convert` lets msgspec check one that was read.
"""

import contextlib
import dataclasses
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from workshop import errors
from workshop.errors import WorkshopError
from workshop.versions import ALL, ROOT, Sizes, available

try:
    from msgspec import Meta
except ModuleNotFoundError:  # PyTorch alone runs a version and writes its record

    def Meta(**_limits: float) -> None:  # type: ignore[no-redef]
        """In place of limits, which are for records that are read."""


PHASE_TIMES = ("forward_ms", "backward_ms", "optimizer_ms")
"""A run's times of a step's parts, each timed apart."""
MODEL_SIZES = tuple(size.name for size in dataclasses.fields(Sizes))
LEAST, MOST = 1e-9, 1e15  # no time in ms, memory in MB, rate or size lies outside
Positive = Annotated[float, Meta(ge=LEAST, le=MOST)]
NotNegative = Annotated[float, Meta(ge=0, le=MOST)]
Count = Annotated[int, Meta(ge=1, le=10**15)]
Value = str | int | float | bool | None
Kind = Literal["run", "waterfall rung", "sweep point"]
KINDS = get_args(Kind)
Status = Literal[
    "complete", "interrupted", "gate failed", "audit failed", "failed", "skipped", "profiled"
]
MOST_WAITED = 0.5
DISTURBED = "disturbed: it had to wait for a processor for most of the time"
PASS, NOT_AUDITED, FAIL, SKIPPED = "pass", "not audited", "FAIL", "skipped"
"""The verdicts on a row of the ladder, a lab or a benchmark: all checks passed; the timed run was
not compared with V1's; a check failed, or the run did; this machine can't run it."""
DEFAULT_FOLDER = (ROOT if available() else Path()) / "results"
"""In the checkout; without one, in the working folder, as ROOT is where pip installs packages."""

T = TypeVar("T")


def verdict(*, failed: bool, skipped: bool, passed: bool) -> str:
    """The verdict on a row.

    Args:
        passed: whether the gate and the audit did, or the one of them that its command has.
    """
    if failed:
        return FAIL
    if skipped:
        return SKIPPED
    return PASS if passed else NOT_AUDITED


def worst_status(
    statuses: Iterable[str], order: Iterable[str] = ("fail", "not run", "pass")
) -> str:
    """The status of a check of several processes: the first in `order` that one of them has;
    "not run" without any."""
    found = set(statuses)
    return next((status for status in order if status in found), "not run")


@dataclass
class Gradients:
    """The reach of the last timed step's backward pass: tensors under V1's names, and weights."""

    tensors_total: int
    tensors_with_grad: int
    params_total: int
    params_with_grad: int

    @classmethod
    def of(cls, sizes: Mapping[str, int], reached: Sequence[str]) -> "Gradients":
        """`sizes` has the number of weights of each tensor, `reached` the names of some."""
        weights = sum(sizes[name] for name in reached)
        return cls(len(sizes), len(reached), sum(sizes.values()), weights)


@dataclass
class Parity:
    """The gate's verdict; `failures` are sentences, `measures` the errors behind it."""

    status: Literal["not run", "pass", "fail"] = "not run"
    failures: list[str] = field(default_factory=list)
    batch_size: int | None = None
    seq_len: int | None = None
    reference: str | None = None
    measures: dict[str, dict[str, float | str | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.status == "fail" and not self.failures:
            raise ValueError("failures is empty, though the check failed")

    def closest(self) -> tuple[str, float, float] | None:
        """The measure nearest to its limit: name, error, limit. A file's null is an infinite error.
        None where nothing was measured."""
        shares = []
        for name, measure in self.measures.items():
            error, allowed = measure.get("error"), measure.get("allowed")
            if isinstance(allowed, (int, float)) and allowed > 0:
                error = float(error) if isinstance(error, (int, float)) else math.inf
                shares.append((error / allowed, name, error, float(allowed)))
        return max(shares)[1:] if shares else None


@dataclass
class Audit(Parity):
    """The audit's verdict on the timed run itself."""

    steps: int | None = None
    """Trained up to the last timed one, warm-up included."""
    seconds: float | None = None
    """Duration of the audit, after the clock had stopped."""
    why: str = NOT_AUDITED
    """Why a run was not audited."""


@dataclass(kw_only=True)
class Run:
    """One process: what every part of the workshop records. Times in ms, memory in MB (10^6 bytes).

    The defaults are for a run that has not measured yet.
    """

    session: str
    """The comparison that it is a part of."""
    device: dict[str, Value]
    software: dict[str, str | None]
    git_commit: str | None
    created: str
    parent_command: list[str] = field(default_factory=list)
    """The command of the comparison; empty where that was not recorded."""
    command: list[str] = field(default_factory=list)
    options: dict[str, Value] = field(default_factory=dict)
    status: Status = "complete"
    """An "interrupted" run has fewer steps than requested, a "skipped" one could not run on this
    machine, a "profiled" one ran under a profiler and was not timed."""
    error: str | None = None
    """Why a run failed or was skipped."""
    step_ms: list[Positive] = field(default_factory=list)
    """Each timed step, by the process's own clock on the device."""
    judge_ms: Positive | None = None
    """The judge's time for a step; None where no judge timed the run."""
    setup_s: dict[str, NotNegative] = field(default_factory=dict)
    """Seconds before the first timed step, by part."""
    memory_mb: dict[str, NotNegative | str] = field(default_factory=dict)
    """`peak`, and what it is made of; `source` says how it was found."""
    losses: list[float | None] = field(default_factory=list)
    """null where one was not finite."""
    gate: Parity = field(default_factory=Parity)
    """The check that the timed steps do the work."""
    audit: Audit = field(default_factory=Audit)
    plausibility: list[str] = field(default_factory=list)
    peak_tflops: Positive | None = None
    """At the precision of the run."""
    peak_source: str | None = None

    @property
    def refused(self) -> tuple[str, list[str]] | None:
        """The check that failed, "gate" or "audit", with its reasons."""
        for check, found in (("gate", self.gate), ("audit", self.audit)):
            if found.status == "fail":
                return check, found.failures
        return None

    @property
    def interpreted(self) -> bool:
        """Whether Triton's interpreter ran its kernels. Its times, if it has any, may not be
        compared."""
        return False

    def wrong(self) -> Iterator[str]:
        """Contradictions in a finished run whose fields are right alone. Readers take medians and
        divide without another check."""
        if self.status == "complete" and not self.step_ms and not self.interpreted:
            yield "step_ms is empty in a complete run"
        for part, amount in self.memory_mb.items():
            if isinstance(amount, str) != (part == "source"):
                yield f"memory_mb.{part} should be a number, and source a text: {amount!r:.40}"
        if float(self.memory_mb.get("peak", LEAST)) < LEAST:
            yield f"memory_mb.peak is {self.memory_mb['peak']}"


@dataclass(kw_only=True)
class RunResult(Run):
    """One training run of one version.

    `losses` are those of all steps, from step 1, the first of the warm-up, to the last timed one.
    `setup_s` has `gate` and `warm_up`, without `compile` (in both) and `capture` (of the graph).
    """

    version: str
    config_name: str
    config: dict[str, int | float]
    batch_size: Count
    seq_len: Count
    precision: str
    warmup_steps: int
    kind: Kind = "run"
    """A run of a whole version, a rung of a waterfall, or a point of a sweep."""
    data: dict[str, str | int] = field(default_factory=dict)
    forward_ms: list[float] = field(default_factory=list)
    backward_ms: list[float] = field(default_factory=list)
    optimizer_ms: list[float] = field(default_factory=list)
    prepared_beside: int = 0
    """Other processes that prepared at the same time, which lengthens `setup_s`."""
    gradients: Gradients | None = None
    waited_share: NotNegative | None = None
    """The share of the timed steps in which the thread that waited longest was ready to run but
    had no processor; None where the system doesn't count that."""

    def wrong(self) -> Iterator[str]:
        yield from super().wrong()
        if self.version not in ALL:
            yield f"version is {self.version!r:.40}, not one of {', '.join(ALL)}"
        if self.memory_mb and "peak" not in self.memory_mb:
            yield "memory_mb.peak is missing"
        if len(self.losses) < len(self.step_ms):
            yield "losses is shorter than step_ms"
        for name in MODEL_SIZES:
            if not 1 <= self.config.get(name, 0) <= MOST:
                yield f"config.{name} is not a size: {self.config.get(name)!r:.40}"

    @property
    def disturbed(self) -> bool:
        """Whether other programs took the processor for most of the timed steps."""
        return self.waited_share is not None and self.waited_share > MOST_WAITED

    @property
    def interpreted(self) -> bool:
        on_cpu = ALL[self.version].triton and self.device.get("type") == "cpu"
        return on_cpu or bool(self.options.get("interpreted"))


TOLD = (
    *("status", "error", "losses", "setup_s", "memory_mb", "metrics", "options", "software"),
    *("flops_per_step", "ceiling_tflops", "plausibility", "gate", "audit"),
)
"""The fields of a LabRun that its process tells the judge: the others are what it was asked for,
and its times."""


@dataclass(kw_only=True)
class LabRun(Run):
    """One process of a lab."""

    lab: str
    """The lab's folder, such as "inference_benchmark"."""
    subject: str
    """The work: runs of one subject may be compared, such as "resnet50, 32 x 3 x 224 x 224"."""
    variant: str
    """How it ran, such as "fp16, channels-last, compiled"."""
    unit: str
    """The units of a step's work, in the plural: "images"."""
    units_per_step: Count
    baseline: str = ""
    """The variant of the same session whose time every speed-up is derived from, if there is
    one."""
    single_step_ms: list[float] = field(default_factory=list)
    """Where `step_ms` has the means of whole epochs."""
    phase_ms: dict[str, list[Positive]] = field(default_factory=dict)
    """Times of a step's parts, where each is timed alone."""
    flops_per_step: float | None = None
    bytes_per_step: float | None = None
    """Read and written, of a step whose rate is in bytes."""
    ceiling_tflops: Positive | None = None
    """The rate that a large matrix product reached on this device at this precision."""
    ceiling_gbs: Positive | None = None
    """The same of a large copy."""
    metrics: dict[str, Value] = field(default_factory=dict)
    """Measures of this lab alone."""

    @property
    def not_audited(self) -> bool:
        """Whether it lacks an audit that its lab has: `error` says so, and why. Other labs' runs
        have none to lack."""
        return (self.error or "").startswith(NOT_AUDITED)

    @property
    def failure(self) -> str:
        """In words, of a run that is not complete."""
        reasons = self.refused[1] if self.refused else []
        return "; ".join([self.status, *reasons, *([self.error] if self.error else [])])

    @property
    def processes(self) -> int:
        """The number of processes that share a step, each on another device."""
        return int(self.metrics.get("processes") or 1)


def model_sizes(config: Mapping[str, float]) -> Sizes:
    """The sizes that FLOPs and memory follow from, of a result's config."""
    return Sizes(**{name: int(config[name]) for name in MODEL_SIZES})


def new_session() -> str:
    """A unique name for a run or a comparison, which sorts by time."""
    return f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:6]}"


def now() -> str:
    """To the millisecond: runs are shown in the order in which they began."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def finite(values: list[float]) -> list[float | None]:
    """JSON has no NaN: a value that is not finite becomes null."""
    return [value if math.isfinite(value) else None for value in values]


def describe_software() -> dict[str, str | None]:
    """Versions of the software that a step's time depends on."""
    import torch  # not above: files are read without it, too

    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "triton": triton_version,
        "system": f"{platform.system()} {platform.machine()}",
    }


def git_commit() -> str | None:
    """$GIT_COMMIT, which CI systems set; else the checkout's commit, with "-dirty" for uncommitted
    changes; None outside of a checkout."""
    if commit := os.environ.get("GIT_COMMIT"):
        return commit
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def own_command() -> list[str]:
    """The command line, without the folders in which this machine keeps things."""
    return ["python", *(Path(word).name if word.startswith("/") else word for word in sys.argv)]


# --- writing ------------------------------------------------------------------------------


def prepare_folder(folder: Path, flag: str = "--output-dir") -> Path:
    """Makes the folder and checks that a file can be written there, before any work is done. Raises
    WorkshopError: it can't be made or written; it names the `flag` that chooses another."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # nameless: nothing to leave behind
            pass
    except OSError as error:
        raise WorkshopError(
            f"output folder {folder} can't be written ({error.strerror}): choose another {flag}"
        ) from None
    return folder


def prepare_file(path: Path, flag: str) -> None:
    """Checks that a file can be written, before any work is done; raises WorkshopError."""
    if path.is_dir():
        raise WorkshopError(f"{flag} {path} is a folder: name a file")
    prepare_folder(path.parent, flag)


@contextlib.contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """A temporary path beside `target` that takes its place if the block succeeds, and vanishes if
    it fails or is interrupted. It keeps the suffix, from which writers guess the format. What the
    block makes there is a file or a folder; a folder takes an older one's place. Raises
    WorkshopError: there is no room or no right to write."""
    temporary = target.with_name(f".{target.stem}.{uuid.uuid4().hex[:8]}{target.suffix}")
    try:
        yield temporary
        if temporary.is_dir() and target.is_dir():
            shutil.rmtree(target)
        temporary.replace(target)
    except OSError as error:
        why = error.strerror or error  # the libraries that draw have other errors
        raise WorkshopError(f"{target} can't be written: {why}") from None
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        temporary.unlink(missing_ok=True)


def write_text(target: Path, text: str) -> None:
    """Raises WorkshopError where there is no room or no right to write; nothing is left then."""
    write_together({target: text})


Content = str | Callable[[Path], object]
"""A text, or a function that writes a file to the given path."""


def write_together(contents: Mapping[Path, Content], gone: Iterable[Path] = ()) -> None:
    """Writes all files, or none if one of them can't be written: the old ones stay then.

    Args:
        gone: files of an earlier set, deleted if they are not among those written.

    Raises:
        WorkshopError: there is no room or no right to write.
    """
    with contextlib.ExitStack() as stack:
        for target, content in contents.items():
            path = stack.enter_context(atomic_path(target))
            if isinstance(content, str):
                path.write_text(content, encoding="utf-8")
            else:
                content(path)
    for target in set(gone) - contents.keys():
        target.unlink(missing_ok=True)


def write_json(target: Path, content: dict[str, Any]) -> None:
    write_text(target, json_text(content))


def json_text(content: dict[str, Any]) -> str:
    """As `write_json` writes it."""
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


# --- reading ------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; WorkshopError names the file and what is wrong with it."""
    content = parse_json(path)
    if not isinstance(content, dict):
        raise WorkshopError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def parse_json(path: Path) -> Any:
    """As `read_json`, for any JSON value."""

    def no_constant(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=no_constant)
    except OSError as error:
        raise WorkshopError(f"{path}: can't be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # truncated, no UTF-8, NaN
        raise WorkshopError(f"{path}: no valid JSON ({error!s:.60})") from None


def convert(kind: type[T], content: Any, where: str) -> T:
    """Builds a dataclass from parsed JSON, checking the type and the limits of each field.

    Args:
        where: begins the message, such as a file and a line.

    Raises:
        WorkshopError: a field is missing, has the wrong type or an impossible value.
        NotOnThisMachine: msgspec is not installed.
    """
    errors.require("msgspec")
    import msgspec

    names = {field_.name for field_ in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if isinstance(content, dict) and (unknown := sorted(content.keys() - names)):
        raise WorkshopError(f"{where}: field {unknown[0]} is unknown")
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        field_ = f"field {place.strip('.`')}: " if place else ""
        raise WorkshopError(f"{where}: {field_}{what[0].lower()}{what[1:]}") from None

"""Result files: one JSON a run, with everything needed to print its numbers again.

Files are written whole or not at all, under names that no second run takes. Loading checks every
field's type, so that a broken file is named, with the field, instead of failing somewhere later.
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
import types
import typing
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

from workshop import file_kinds
from workshop.errors import WorkshopError
from workshop.run import flops
from workshop.versions import ALL, ROOT, available

SCHEMA_VERSION = 1
MODEL_SIZES = tuple(size.name for size in dataclasses.fields(flops.Sizes))
LEAST, MOST = 1e-9, 1e15  # no time in ms, memory in MB, rate or size lies outside
KINDS = ("run", "waterfall rung", "sweep point")
STATUSES = (
    "complete", "interrupted", "gate failed", "audit failed", "failed", "skipped", "profiled",
)  # fmt: skip
MOST_WAITED = 0.5
DISTURBED = "disturbed: it had to wait for a processor for most of the time"
PARITY_STATUSES = ("not run", "pass", "fail")
PASS, NOT_AUDITED, FAIL, SKIPPED = "pass", "not audited", "FAIL", "skipped"
"""The verdicts on a row of the ladder, a lab or a benchmark: all checks passed; the timed run was
not compared with V1's; a check failed, or the run did; this machine can't run it."""
DEFAULT_FOLDER = (ROOT if available() else Path()) / "results"
"""In the checkout; without one, in the working folder, as ROOT is where pip installs packages."""

NEWER = {"newer": True}
"""Marks a field that older files don't have."""

T = TypeVar("T")


@dataclass
class Gradients:
    """The reach of the last timed step's backward pass: tensors under V1's names, and weights."""

    tensors_total: int
    tensors_with_grad: int
    params_total: int
    params_with_grad: int


@dataclass
class Parity:
    """The gate's verdict; `failures` are sentences, `measures` the errors behind it."""

    status: str = "not run"  # or "pass", "fail"
    failures: list[str] = field(default_factory=list)
    batch_size: int | None = None
    seq_len: int | None = None
    reference: str | None = None
    measures: dict[str, dict[str, float | str | None]] = field(default_factory=dict)

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


@dataclass
class RunResult:
    """One training run of one version. Times in ms, memory in MB (10^6 bytes).

    The defaults are for a run that has not measured yet. A file has every field; only those marked
    NEWER may be missing.
    """

    version: str
    session: str
    config_name: str
    config: dict[str, int | float]
    batch_size: int
    seq_len: int
    precision: str
    warmup_steps: int
    device: dict[str, str | int | float | None]
    software: dict[str, str | None]
    git_commit: str | None
    created: str
    schema_version: int = SCHEMA_VERSION
    kind: str = field(default="run", metadata=NEWER)
    """One of KINDS: a run of a whole version, a rung of a waterfall, or a point of a sweep."""
    status: str = "complete"
    """One of STATUSES; "interrupted" has fewer steps than requested, "skipped" could not run on
    this machine, "profiled" ran under a profiler and was not timed."""
    error: str | None = None
    """Why a run failed or was skipped."""
    options: dict[str, str | int | float | bool | None] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    data: dict[str, str | int] = field(default_factory=dict)
    step_ms: list[float] = field(default_factory=list)
    forward_ms: list[float] = field(default_factory=list)
    backward_ms: list[float] = field(default_factory=list)
    optimizer_ms: list[float] = field(default_factory=list)
    setup_s: dict[str, float] = field(default_factory=dict)
    """Seconds before the first timed step: `gate` and `warm_up`, without `compile` (in both) and
    `capture` (of the graph). Older files have `warm_up` alone."""
    prepared_beside: int = field(default=0, metadata=NEWER)
    """Other processes that prepared at the same time, which lengthens `setup_s`."""
    memory_mb: dict[str, float | str] = field(default_factory=dict)
    losses: list[float | None] = field(default_factory=list)
    """Losses of all steps, from step 1, the first of the warm-up, to the last timed one; null where
    one was not finite."""
    gradients: Gradients | None = None
    parity: Parity = field(default_factory=Parity)
    audit: Audit = field(default_factory=Audit, metadata=NEWER)
    plausibility: list[str] = field(default_factory=list)
    peak_tflops: float | None = None
    peak_source: str | None = None
    judge_ms: float | None = field(default=None, metadata=NEWER)
    """The time of a step by the judge's clock, which `step_ms` must agree with."""
    waited_share: float | None = field(default=None, metadata=NEWER)
    """The share of the timed steps in which the thread that waited longest was ready to run but
    had no processor; None where the system doesn't count that."""

    @property
    def disturbed(self) -> bool:
        """Whether other programs took the processor for most of the timed steps."""
        return self.waited_share is not None and self.waited_share > MOST_WAITED

    @property
    def refused(self) -> tuple[str, list[str]] | None:
        """The check that failed, "gate" or "audit", with its reasons."""
        for check, verdict in (("gate", self.parity), ("audit", self.audit)):
            if verdict.status == "fail":
                return check, verdict.failures
        return None

    @property
    def interpreted(self) -> bool:
        """Whether Triton's interpreter ran its kernels, as it always does on a CPU. Its times may
        not be compared."""
        on_cpu = ALL[self.version].triton and self.device.get("type") == "cpu"
        return on_cpu or bool(self.options.get("interpreted"))


def model_sizes(config: Mapping[str, float]) -> flops.Sizes:
    """The sizes that FLOPs and memory follow from, of a result's config."""
    return flops.Sizes(**{name: int(config[name]) for name in MODEL_SIZES})


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


# --- writing ------------------------------------------------------------------------------


def prepare_folder(folder: Path, flag: str = "--output-dir") -> Path:
    """Makes the folder and checks that a file can be written there, before any work is done.

    Raises:
        WorkshopError: it can't be made or written; it names the `flag` that chooses another.
    """
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
    """A temporary path beside `target` that takes its place if the block succeeds, and vanishes
    if it fails or is interrupted. It keeps the suffix, from which writers guess the format. What
    the block makes there is a file or a folder; a folder takes an older one's place.

    Raises:
        WorkshopError: there is no room or no right to write.
    """
    temporary = target.with_name(f".{target.stem}.{uuid.uuid4().hex[:8]}{target.suffix}")
    try:
        yield temporary
        if temporary.is_dir() and target.is_dir():
            shutil.rmtree(target)
        temporary.replace(target)
    except OSError as error:
        why = error.strerror or error  # the libraries that draw have errors of their own
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
    file_kinds.check(content)
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def new_path(folder: Path, session: str, version: str, config_name: str, precision: str) -> Path:
    """`folder/runs/SESSION/VERSION_CONFIG_PRECISION_ID.json`, which no other run takes."""
    name = f"{version}_{config_name}_{precision}_{uuid.uuid4().hex[:6]}.json"
    return folder / "runs" / session / name


def save(result: RunResult, folder: Path) -> Path:
    """Writes a result file at a new path below the folder; its path."""
    r = result
    return save_as(new_path(folder, r.session, r.version, r.config_name, r.precision), result)


def save_as(target: Path, result: RunResult) -> Path:
    """Writes one result file; its path."""
    prepare_folder(target.parent)
    write_json(target, {"schema_version": result.schema_version} | dataclasses.asdict(result))
    return target


# --- reading ------------------------------------------------------------------------------


def load(path: Path) -> RunResult:
    """Reads one result file.

    Raises:
        WorkshopError: it can't be read, is no JSON, has another schema, or a field is missing, has
            the wrong type or an impossible value; the message names the file and the field.
    """
    content = read_json(path)
    version = content.get("schema_version")
    if version != SCHEMA_VERSION:
        raise WorkshopError(
            f"{path}: schema_version is {version!r}, this workshop reads {SCHEMA_VERSION}; "
            "run it again with this checkout"
        )
    result = decode(RunResult, content, path, "")
    for where, wrong in senseless(result):
        raise WorkshopError(f"{path}: field {where} {wrong}")
    return result


def senseless(run: RunResult) -> Iterator[tuple[str, str]]:
    """Fields of the right type with impossible values, and what is wrong with them. Readers of a
    result divide by its values and take medians without another check."""
    choices: tuple[tuple[str, str, Collection[str]], ...] = (
        ("version", run.version, ALL),
        ("kind", run.kind, KINDS),
        ("status", run.status, STATUSES),
        ("parity.status", run.parity.status, PARITY_STATUSES),
        ("audit.status", run.audit.status, PARITY_STATUSES),
    )
    for where, value, known in choices:
        if value not in known:
            yield where, f"is {value!r:.40}, not one of {', '.join(known)}"
    for where, check, verdict in (("parity", "gate", run.parity), ("audit", "audit", run.audit)):
        if verdict.status == "fail" and not verdict.failures:
            yield f"{where}.failures", f"is empty, though the {check} failed"
    if run.status == "complete" and not run.step_ms:
        yield "step_ms", "is empty in a complete run"
    if len(run.losses) < len(run.step_ms):
        yield "losses", "is shorter than step_ms"
    if "peak" not in run.memory_mb and (run.memory_mb or run.status == "complete"):
        yield "memory_mb.peak", "is missing"
    for part, amount in run.memory_mb.items():
        if isinstance(amount, str) != (part == "source"):
            wrong = f"should be a number (and source a text), found {amount!r:.40}"
            yield f"memory_mb.{part}", wrong
    for where, number, least in _bounded_numbers(run):
        if not isinstance(number, (int, float)) or not least <= number <= MOST:
            yield where, f"should lie between {least:g} and {MOST:g}, found {number!r:.40}"


def _bounded_numbers(run: RunResult) -> Iterator[tuple[str, object, float]]:
    """Numbers that others divide by, and the least that each can be."""
    yield from (("batch_size", run.batch_size, 1), ("seq_len", run.seq_len, 1))
    yield from ((f"config.{name}", run.config.get(name), 1) for name in MODEL_SIZES)
    yield from ((f"step_ms[{i}]", time, LEAST) for i, time in enumerate(run.step_ms))
    yield from ((f"setup_s.{part}", seconds, 0) for part, seconds in run.setup_s.items())
    if "peak" in run.memory_mb:
        yield "memory_mb.peak", run.memory_mb["peak"], LEAST
    if run.peak_tflops is not None:
        yield "peak_tflops", run.peak_tflops, LEAST
    if run.waited_share is not None:
        yield "waited_share", run.waited_share, 0


def load_folder(folder: Path) -> list[RunResult]:
    """All runs of a folder, oldest session first: `folder/*.json` and what lies in any `runs`
    folder below it. Other files of the workshop are passed over.

    Raises:
        WorkshopError: there is none, or one of them is broken.
    """
    if folder.is_file():
        return [load(folder)]
    if not folder.is_dir():
        raise WorkshopError(f"results {folder}: no such folder")
    found = set(folder.glob("*.json"))
    for runs in [folder] if folder.name == "runs" else folder.rglob("runs"):
        found |= set(runs.rglob("*.json"))
    named = (path for path in sorted(found) if path.name[0] != ".")
    paths = [path for path in named if file_kinds.kind_of(path) in (file_kinds.RUN, "")]
    if not paths:
        raise WorkshopError(
            f"results {folder}: no result files (*.json, runs/SESSION/*.json) in it"
        )
    return sorted(map(load, paths), key=lambda result: result.session)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; WorkshopError names the file and what is wrong with it."""
    content = parse_json(path)
    if not isinstance(content, dict):
        raise WorkshopError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def parse_json(path: Path) -> Any:
    """As `read_json`, for any JSON value."""
    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
    except OSError as error:
        raise WorkshopError(f"{path}: can't be read: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise WorkshopError(
            f"{path}: no valid JSON at line {error.lineno}, column {error.colno} ({error.msg}); "
            "is the file truncated?"
        ) from None
    except (ValueError, RecursionError) as error:  # no UTF-8, NaN, a number of 5000 digits
        raise WorkshopError(f"{path}: no valid JSON ({error!s:.60})") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def decode(kind: type[T], content: Any, path: Path, where: str) -> T:
    """Builds the dataclass `kind` from parsed JSON, checking every field's type. Only those marked
    NEWER may be missing."""
    if not isinstance(content, dict):
        raise WorkshopError(f"{path}: field {where.rstrip('.')} should be an object")
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(typing.cast(Any, kind))}
    missing = [n for n, f in fields.items() if n not in content and not f.metadata.get("newer")]
    if missing:
        raise WorkshopError(f"{path}: field {where}{missing[0]} is missing")
    unknown = sorted(content.keys() - fields.keys())
    if unknown:
        raise WorkshopError(f"{path}: field {where}{unknown[0]} is unknown")
    values = {
        name: _check(hints[name], content[name], path, where + name)
        for name in fields
        if name in content
    }
    return kind(**values)


def _check(hint: Any, value: Any, path: Path, where: str) -> Any:
    """The value, decoded as the type hint says; WorkshopError where it does not fit."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return decode(typing.cast(Any, hint), value, path, f"{where}.")
    if origin in (types.UnionType, typing.Union):
        dataclass_options = [a for a in arguments if dataclasses.is_dataclass(a)]
        if dataclass_options and isinstance(value, dict):
            return _check(dataclass_options[0], value, path, where)
        if any(_fits(option, value) for option in arguments):
            return value
    elif origin is list and isinstance(value, list):
        return [_check(arguments[0], v, path, f"{where}[{i}]") for i, v in enumerate(value)]
    elif origin is dict and isinstance(value, dict):
        return {k: _check(arguments[1], v, path, f"{where}.{k}") for k, v in value.items()}
    elif _fits(hint, value):
        return value
    wanted = getattr(hint, "__name__", str(hint)) if origin is None else str(hint)
    raise WorkshopError(f"{path}: field {where} should be {wanted}, found {value!r:.40}")


def _fits(hint: Any, value: Any) -> bool:
    if hint is float:  # JSON writes 2.0 as 2; a bool is an int to Python, and neither here
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return is_number and abs(value) <= sys.float_info.max  # 1e999 reads as infinity
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint) if isinstance(hint, type) else False

"""Parts that the tests share: a model small enough for a CPU and odd enough to show mistakes."""

import importlib.util
import os
import random
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from workshop import versions
from workshop.run import waiting

# Before PyTorch is imported, here and in the programs that tests start.
os.environ.update(waiting.short_spin())
# And the workers of a parallel run share the cores out, NumPy's threads too.
os.environ.update(
    {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // int(workers)))}
    if (workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) != "1"
    else {}
)
# Some machines set it; it would hide that what a program printed is lost when it dies.
os.environ.pop("PYTHONUNBUFFERED", None)

import pytest
import torch

from workshop.run.precision import kept_matmul_mode

if not torch.cuda.is_available():  # before any test imports Triton, directly or not
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Variables by which a shell describes its terminal, or a CI system its log: a test has neither.
for _name in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
    os.environ.pop(_name, None)

# A shell's background job ignores Ctrl-C, and what the tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parents[1]
if importlib.util.find_spec("hypothesis"):  # which a GPU machine need not have
    from hypothesis import HealthCheck, settings

    # A test's examples may take as long as they take, on any machine and beside other work. They
    # are the same in each run: --hypothesis-profile search looks for others.
    slow = [HealthCheck.too_slow]
    settings.register_profile("search", deadline=None, suppress_health_check=slow)
    settings.register_profile("any machine", settings.get_profile("search"), derandomize=True)
    settings.load_profile("any machine")

HANGS_S = 2400
"""A command that has not ended by then never will, however busy the machine."""

# No size is a power of two or a multiple of another's tile, except the head size (32), of which
# V3's attention has only a few.
ODD_SIZES = {
    "vocab_size": 311,
    "hidden_dim": 192,
    "intermediate_dim": 152,
    "num_layers": 2,
    "num_heads": 6,
    "num_kv_heads": 2,
    "max_seq_len": 128,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--keep-figures",
        type=Path,
        metavar="DIR",
        help="write what the measuring tests measured to DIR, as JSON",
    )


def pytest_xdist_auto_num_workers() -> int:
    """Workers of `-n auto`. A GPU is not shared: its tests measure time and memory."""
    return 0 if torch.cuda.is_available() else min(os.cpu_count() or 1, 4)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Files of most of a minute and more first: one that starts last would run alone.
    longest = """readme inspect_kernels notebook cli parity lab_scale_out lab_commands kernels
        waterfall lab_pipeline setup lab_text compare lab_cifar profile_run exercises_v4
        lab_group""".split()
    first = {f"test_{name}.py": place for place, name in enumerate(longest)}
    items.sort(key=lambda item: first.get(item.path.name, len(first)))
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture(autouse=True)
def same_start_for_every_test() -> Iterator[None]:
    """tf32 and the state of random numbers are the process's: a test would leave them to the next,
    which is another one in each parallel run."""
    random.seed(0)
    torch.manual_seed(0)
    with kept_matmul_mode():
        yield


@pytest.fixture
def odd_config() -> object:
    return versions.load("v1").TinyLlamaConfig(**ODD_SIZES)


@pytest.fixture
def copy_of() -> Callable[[str], ModuleType]:
    """Loads a version's file anew under another name, for a test to break."""

    def load(key: str) -> ModuleType:
        name = f"copy_{uuid.uuid4().hex}"
        path = versions.get_version(key).path
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    """Writes a text file of the test's own."""

    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


@pytest.fixture(scope="session")
def type_command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a command as a user types it, from a folder of the repository."""

    def run(
        *words: str | Path, folder: Path = ROOT, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable if word == "python" else str(word) for word in words]
        copy = {"PYTHONPATH": str(folder)} if (folder / "workshop").is_dir() else {}
        return subprocess.run(
            command,
            cwd=folder,
            env=os.environ | copy | environment,
            capture_output=True,
            text=True,
            timeout=HANGS_S,
        )

    return run


@pytest.fixture(autouse=True)
def broken_pipe_is_an_error() -> Iterator[None]:
    """As Python has it. A script of setup/ that runs within a test lets it end the process, and the
    next test that writes to a pipe without a reader would end the tests."""
    yield
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)

"""`python tiny_llama_vN.py` as a user types it: what is refused, shown, saved, and interrupted."""

import os
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import HANGS_S
from test_compare import NO_TRITON
from test_results import files

from workshop import cli, records, results, versions
from workshop.errors import WorkshopError
from workshop.request import USUAL, Request, build_parser, check_arguments
from workshop.results import RunResult
from workshop.run import hardware, precision, trainer

ROOT = Path(__file__).resolve().parents[1]
Finished = subprocess.CompletedProcess[str]
TypeCommand = Callable[..., Finished]
OUT = "out"

SIZES = "--hidden-dim 64 --intermediate-dim 128 --num-layers 1 --num-heads 4 --num-kv-heads 2"
SHAPE = "--vocab-size 300 --seq-len 16 --batch-size 2"
SMALL = ["--device", "cpu", *SIZES.split(), *SHAPE.split()]
SHORT = ["--num-steps", "3", "--warmup-steps", "1"]
# V3's attention is written for heads of 32, 64 and 128.
WIDE_HEADS = ["--num-heads", "2", "--num-kv-heads", "1"]
# Models this small are quickest on one core.
ONE_CORE = {"OMP_NUM_THREADS": "1"}


def script(key: str, root: Path = ROOT) -> dict[str, Path]:
    """The folder in which a version's command is typed, as `type_command` takes it."""
    return {"folder": root / versions.VERSIONS[key].folder}


def command(key: str, output: Path, *words: str | Path) -> list[str | Path]:
    return ["python", f"tiny_llama_{key}.py", *SMALL, *SHORT, "--output-dir", output, *words]


def typed(words: str, folder: Path) -> list[str]:
    """The words of a command, with the folder in the place of FOLDER."""
    return [word.replace("FOLDER", str(folder)) for word in words.split()]


def the_run(output: Path) -> RunResult:
    """The one result in a folder, in which nothing else lies."""
    (run,) = records.load_folder(output, RunResult)
    assert len(files(output)) == 1
    return run


# --- wrong input ------------------------------------------------------------------------------

# Words typed after a good command, and what the answer must name. FOLDER is the test's own.
# The values that are wrong for a flag in itself are in test_command_lines.py.
WRONG = {
    "heads do not divide": ("--num-heads 3", "hidden_dim 64 is not divisible by num_heads 3"),
    "kv heads do not divide": ("--num-kv-heads 3", "num_heads 4 .* by num_kv_heads 3"),
    "odd head size": ("--hidden-dim 12", "head size 3 .* is odd"),
    "sequence too long": ("--seq-len 4096", "--seq-len 4096 .* 2048: lower it or raise --max-seq"),
    "sequence of one": ("--seq-len 1", "--seq-len 1: .* at least 2"),
    "no rate in fp32": ("--learning-rate 1e+30", r"learning-rate 1e\+30: it must be a positive"),
    "precision": ("--precision fp16", "fp16: the CPU does not have it; choose from fp32, bf16"),
    "no GPU": ("--device cuda:97", "device cuda:97: "),
    "graph": ("--cuda-graph", "--cuda-graph needs a GPU; use --no-cuda-graph"),
    "text missing": (
        "--text-file FOLDER/absent",
        "--text-file FOLDER/absent can't be read: No such file",
    ),
    "text short": ("--text-file FOLDER/short", "short has 16 bytes, .* lower --seq-len"),
    "text and synthetic": ("--text-file FOLDER/short --data synthetic", "goes with --data text"),
    "vocabulary too small": ("--vocab-size 255", "vocab_size 255 .* 256 .* raise --vocab-size or"),
}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys) -> Callable[..., Finished]:
    """A version's command line, called here: its own process would take seconds to start. The
    result goes to OUT in the test's folder."""

    def call(key: str, *words: str) -> Finished:
        program, *argv = map(str, command(key, tmp_path / OUT, *words)[1:])
        monkeypatch.setattr(sys, "argv", [program, *argv])
        cores = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            status = cli.main(versions.load(key), argv)
        except SystemExit as refused:
            status = int(refused.code or 0)
        finally:
            torch.set_num_threads(cores)
        printed = capsys.readouterr()
        return Finished(argv, status, printed.out, printed.err)

    return call


@pytest.fixture
def start(tmp_path, type_command) -> Callable[..., Finished]:
    """The same in a separate process."""

    def call(key: str, *words: str, **environment: str) -> Finished:
        typed = command(key, tmp_path / OUT, *words)
        return type_command(*typed, **script(key), **(ONE_CORE | environment))

    return call


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_one_line_and_leaves_nothing(name, run, start, tmp_path) -> None:
    (tmp_path / "short").write_bytes(b"16 bytes of text")
    words, pattern = WRONG[name]
    finished = (start if name == "text missing" else run)("v1", *typed(words, tmp_path))
    (line,) = finished.stderr.splitlines()
    assert (finished.returncode, finished.stdout) == (2, "")
    assert re.match(f"error: .*{pattern}", line.replace(str(tmp_path), "FOLDER")), line
    assert files(tmp_path) == ["short"] and not (tmp_path / OUT).exists()


@pytest.mark.parametrize(
    ("words", "lower"),
    [
        ("--hidden-dim 200000", "--hidden-dim"),
        ("--batch-size 10000000 --seq-len 2048", "--batch-size or --seq-len"),
    ],
)
def test_too_large_says_how_large_and_what_to_lower(words, lower, run, tmp_path) -> None:
    finished = run("v1", *words.split())
    assert (finished.returncode, finished.stdout) == (1, "") and not (tmp_path / OUT).exists()
    message = (
        r"error: out of memory on .*: at least [\d,]+\.\d GB of [\d,.]+ needed at .*; lower .*"
    )
    assert re.match(message + lower, finished.stderr)


def behind(error: Exception) -> Exception:
    """The error that ends a graph's capture in which another one was raised."""
    try:
        try:
            raise error
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error")
    except RuntimeError as last:
        return last


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (RuntimeError("DefaultCPUAllocator: you tried to allocate 4000000000 bytes."), "4.00 GB"),
        (behind(torch.OutOfMemoryError("Tried to allocate 2.50 GiB.")), "2.50 GiB"),
        (MemoryError(), "block"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_memory_that_runs_out_on_the_way_is_one_line_too(
    error, asked, run, tmp_path, monkeypatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(trainer, "train", fail)
    finished = run("v1", "--no-gate")
    assert finished.returncode == 1
    assert re.fullmatch(
        rf"error: out of memory on .*: a further {asked} was asked for at batch size 2, "
        r"sequence length 16, .*; lower --batch-size or --seq-len, .*\n",
        finished.stderr,
    )
    assert files(tmp_path) == []
    monkeypatch.setattr(trainer, "train", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # another error is not called one of memory
        run("v1", "--no-gate")


@pytest.mark.parametrize(
    ("error", "exit_status", "status", "said"),
    [
        (
            *(behind(torch.OutOfMemoryError("Tried to allocate 2.50 GiB.")), 0, "complete"),
            "note: no memory is left to time the parts of a step\n",
        ),
        (KeyboardInterrupt(), 130, "interrupted", "Summary of an interrupted run"),
    ],
    ids=["memory", "Ctrl-C"],
)
def test_what_ends_a_run_after_the_last_step_costs_the_parts_alone(
    error, exit_status, status, said,
    run, tmp_path, monkeypatch
) -> None:  # fmt: skip
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(trainer.Runner, "phases", fail)
    finished = run("v1", "--no-gate")
    assert finished.returncode == exit_status and said in finished.stdout
    saved = the_run(tmp_path)
    assert (saved.status, len(saved.step_ms), saved.forward_ms) == (status, 3, [])
    assert saved.memory_mb["peak"] > 0 and saved.gradients is None and saved.plausibility == []


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_a_red_gate_ends_the_run_before_any_time_is_taken(
    precision, run, tmp_path, monkeypatch
) -> None:
    module = versions.load("v2")
    tables = module.rope_tables
    monkeypatch.setattr(module, "rope_tables", lambda c: tables(replace(c, rope_theta=10100.0)))
    finished = run("v2", "--precision", precision)
    assert (finished.returncode, finished.stderr) == (1, "")
    saved = the_run(tmp_path)
    assert (saved.status, saved.gate.status, saved.step_ms) == ("gate failed", "fail", [])
    failures = saved.gate.failures
    assert re.search(rf"^gate: FAIL, {len(failures)} reasons", finished.stdout, re.M)
    for sentence in failures:
        assert f"\n  {sentence}\n" in finished.stdout
        # bf16's roundings hide it, and the gate in fp32 goes first.
        assert (" (in fp32, hidden_dim 64, 2 x 16 tokens)" in sentence) == (precision == "bf16")
    for word in ("samples/s", "tokens/s", " ms", "Summary"):
        assert word not in finished.stdout


# --- a good run -------------------------------------------------------------------------------

# Python imports this at its start. Everything that may be missing beside a cluster's PyTorch:
ONLY_TORCH = """
from importlib.machinery import PathFinder

find_spec = PathFinder.find_spec
absent = {"rich", "matplotlib", "msgspec", "numpy", "pandas", "transformers"}

def find_present(name, path=None, target=None):
    return None if name.split(".")[0] in absent else find_spec(name, path, target)

PathFinder.find_spec = find_present
"""


def summary(finished: Finished) -> dict[str, str]:
    """The lines after `Summary`, by their labels."""
    _, _, text = finished.stdout.partition("\nSummary\n")
    rows = re.findall(r"^  (\S+) +(.+)$", text, re.M)
    assert len(rows) == len(dict(rows))
    return dict(rows)


@pytest.mark.parametrize("key", ["v1", "v2", pytest.param("v4", marks=pytest.mark.slow)])
def test_a_run_prints_what_it_saves(key, run, start, tmp_path) -> None:
    finished = (start if key == "v4" else run)(key)
    assert finished.returncode == 0, finished.stderr
    saved = the_run(tmp_path)
    step_ms = statistics.median(saved.step_ms)

    compile_mode, data_name = saved.options["compile"], saved.data["name"]
    for value in (saved.device["name"], saved.precision, compile_mode, data_name):
        assert f"{value}\n" in finished.stdout
    assert re.search(r"^gate: pass: gradients 11/11; closest .* allowed .*$", finished.stdout, re.M)
    assert (saved.setup_s["compile"] > 0) == (compile_mode != "none")

    numbers = re.findall(r"^step (\d+): loss ([\d.]+), (.*)$", finished.stdout, re.M)
    assert [(int(step), loss) for step, loss, _ in numbers] == [
        (step, f"{loss:.4f}") for step, loss in enumerate(saved.losses, 1)
    ]
    assert [took for *_, took in numbers] == ["warm-up, not timed"] + [
        f"time {ms:.2f}ms, {32e3 / ms:,.0f} tokens/s" for ms in saved.step_ms
    ]
    shown = summary(finished)
    assert shown["speed"] == f"{2e3 / step_ms:,.1f} samples/s, {32e3 / step_ms:,.0f} tokens/s"
    assert shown["step"].startswith(f"{step_ms:.2f} ms (median of 3 steps, ")
    for phase in ("forward", "backward", "optimizer"):
        median = statistics.median(getattr(saved, f"{phase}_ms"))
        assert shown[phase] == f"{median:.2f} ms"
    first, last = saved.losses[0], saved.losses[-1]
    assert shown["loss"] == f"{first:.4f} in step 1, before any update; {last:.4f} in step 4"
    memory = saved.memory_mb
    assert shown["memory"] == (
        f"{memory['peak']:,.0f} MB peak (weights {memory['weights']:,.0f}, gradients "
        f"{memory['gradients']:,.0f}, optimizer state {memory['optimizer_state']:,.0f}, rest "
        f"{memory['rest']:,.0f})"
    )
    assert saved.gradients == results.Gradients(11, 11, 56_256, 56_256)
    assert shown["gradients"] == "11/11 tensors, 56,256/56,256 parameters"
    assert shown["gate"] == "pass" == saved.gate.status


@pytest.mark.parametrize(
    "words",
    [
        "version3_triton/tiny_llama_v3.py",
        "-m workshop.parity --version v3 --device cpu",
        "-m workshop.kernels.benchmark",
        "-m workshop.kernels.inspect",
    ],
)
def test_without_triton_its_programs_say_what_they_need(words, type_command, tmp_path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_TRITON)
    finished = type_command("python", *words.split(), PYTHONPATH=str(tmp_path))
    assert (finished.returncode, finished.stdout) == (77, ""), finished.stderr
    missing = r"error: (.*Triton, which is not installed: |triton is missing).*\n"
    assert re.fullmatch(missing, finished.stderr)


def test_nothing_but_torch_is_needed(start, tmp_path) -> None:
    (tmp_path / "sitecustomize.py").write_text(ONLY_TORCH)
    finished = start("v1", PYTHONPATH=str(tmp_path))
    assert finished.returncode == 0, finished.stderr
    assert "Traceback" not in finished.stderr
    assert {"speed", "step", "loss", "memory", "rate", "gate"} <= summary(finished).keys()


def test_the_loss_falls_on_text(run, tmp_path) -> None:
    finished = run("v1", "--num-steps", "60", "--learning-rate", "3e-3", "--no-gate")
    match = re.fullmatch(r"([\d.]+) in step 1, .*; ([\d.]+) in step 61", summary(finished)["loss"])
    assert match, finished.stdout
    assert 4.5 < float(match[1]) < 6.2  # ln(300) is 5.7, less where spaces follow on spaces
    assert float(match[2]) < 4
    assert summary(finished)["gate"] == "NOT RUN: figures unverified"
    saved = the_run(tmp_path)
    assert saved.gate.status == "not run"
    assert saved.data["name"] == f"Python {sys.version.split()[0]} standard library"


def triton_request(monkeypatch: pytest.MonkeyPatch, device: str, *words: str) -> Request:
    """The request of a Triton version's arguments on a device that need not be here. V2's
    module replaces V3's: only sizes and switches are read from it."""
    monkeypatch.setattr(hardware, "get_device", torch.device)
    fp32 = precision.PRECISIONS["fp32"]
    monkeypatch.setattr("workshop.request.get_precision", lambda *_: fp32)
    version, module = versions.VERSIONS["v3"], versions.load("v2")
    arguments = build_parser(version, module).parse_args(["--device", device, *words])
    return check_arguments(version, module, arguments)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_interpreted_steps_are_few_unless_more_are_asked_for(device, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    request = triton_request(monkeypatch, device)
    assert request.interpreted and not request.cuda_graph
    assert request.schedule == trainer.Schedule(warmup=1, timed=3, phases=0)
    request = triton_request(monkeypatch, device, "--num-steps", "7", "--warmup-steps", "2")
    assert request.schedule == trainer.Schedule(warmup=2, timed=7, phases=0)
    with pytest.raises(WorkshopError, match=r"^--cuda-graph .*; use --no-cuda-graph"):
        triton_request(monkeypatch, device, "--cuda-graph")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--batch-size 8 --num-steps 20", ["21 steps of 8 x 128 tokens", "23 min", "3 min"]),
        ("--batch-size 2 --seq-len 33 --num-steps 2", ["3 steps of 2 x 33 tokens", "3 min"]),
        ("--batch-size 1 --seq-len 512 --no-gate", ["4 steps of 1 x 512 tokens", "2 min", "28 s"]),
    ],
)
def test_an_interpreted_run_says_how_long_it_will_take(words, said, monkeypatch, capsys) -> None:
    """One step of up to 128 tokens takes 7 s here."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    request = triton_request(monkeypatch, "cpu", *words.split())
    shapes, times = [], iter([0.0, 7.0])
    monkeypatch.setattr(trainer, "train_losses", lambda *a: shapes.append(a[2].shape))
    monkeypatch.setattr(cli.time, "perf_counter", lambda: next(times))
    batches = torch.zeros(4, 2, request.batch_size, request.seq_len, dtype=torch.int64)
    cli._say_how_long(request, request.build(), batches)
    assert shapes == [(1, 2, 1, min(request.seq_len, 128))]
    shown = capsys.readouterr().out
    assert said[0] in shown and re.findall(r"about (\d+ \w+)", shown) == said[1:]


def test_compiled_kernels_are_measured_like_any_others(monkeypatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    request = triton_request(monkeypatch, "cuda")
    assert not request.interpreted and request.cuda_graph
    assert request.schedule == USUAL
    with pytest.raises(WorkshopError, match="--device cpu: the kernels of version v3 are compiled"):
        triton_request(monkeypatch, "cpu")


# --- Ctrl-C -----------------------------------------------------------------------------------


# A process started in the background ignores Ctrl-C, as do those that it starts: not our command.
AT_A_KEYBOARD = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def interrupted(*typed: str | Path, after: str) -> Finished:
    """A program in V1's folder that gets a Ctrl-C once it has printed something."""
    process = subprocess.Popen(
        [sys.executable, "-c", AT_A_KEYBOARD, *map(str, typed)],
        cwd=script("v1")["folder"],
        env=os.environ | ONE_CORE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    shown = ""
    try:
        while after not in shown:
            line = process.stdout.readline()
            assert line, f"it ended before {after!r}"
            shown += line
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=HANGS_S)
    finally:
        process.kill()
    return Finished(process.args, process.returncode, shown + rest, errors)


def endless(output: Path) -> list[str | Path]:
    """The words of a run with very many steps."""
    return command("v1", output, "--num-steps", "100000")[1:]


def test_ctrl_c_saves_the_completed_steps(tmp_path) -> None:
    finished = interrupted(*endless(tmp_path), "--no-gate", after="\nstep 2: ")
    assert finished.returncode == 130, finished.stderr
    assert finished.stderr == ""
    run = the_run(tmp_path)  # valid, and the only file there
    assert run.status == "interrupted"
    assert 1 <= len(run.step_ms) < 100_000
    assert len(run.losses) == 1 + len(run.step_ms)  # the warm-up's too
    assert "Summary of an interrupted run" in finished.stdout
    assert f"(median of {len(run.step_ms)} steps, " in finished.stdout
    assert run.plausibility == []  # a backward pass cut short is no severed one


def test_ctrl_c_before_a_step_saves_nothing(tmp_path) -> None:
    finished = interrupted(*endless(tmp_path), after="gate: comparing")
    assert finished.returncode == 130
    assert finished.stderr == "interrupted before a timed step was complete: nothing saved\n"
    assert files(tmp_path) == []


@pytest.mark.parametrize("missing", ["compiler", "headers", "path"])
def test_v4_runs_uncompiled_where_something_is_missing_to_compile(
    missing, monkeypatch, capsys
) -> None:
    if missing == "compiler":
        monkeypatch.setenv("CXX", "no-such-compiler")
    elif missing == "path":
        monkeypatch.setattr(trainer.tempfile, "gettempdir", lambda: "/tmp/of mine")
    else:
        monkeypatch.setattr(trainer.sysconfig, "get_paths", lambda: {"include": "/nowhere"})
    module, version = versions.load("v4"), versions.VERSIONS["v4"]
    parser = build_parser(version, module)
    request = check_arguments(version, module, parser.parse_args(["--device", "cpu"]))
    assert request.compile_mode == "none"
    assert "not found, so this runs without torch.compile" in capsys.readouterr().out
    with pytest.raises(WorkshopError, match="--compile needs"):
        check_arguments(
            version, module, parser.parse_args(["--device", "cpu", "--compile", "default"])
        )

"""The program that profilers watch: steps with marker ranges that train exactly as the timed ones
do, and run_pytorch_profiler.py as a user types it."""

import csv
import dataclasses
import gzip
import json
import re
import threading
from argparse import Namespace
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_cli import ONE_CORE, SMALL, WIDE_HEADS, TypeCommand, interrupted, script
from test_compare import needs_triton

from workshop import records, versions
from workshop.errors import NotOnThisMachine, OutOfMemory, WorkshopError
from workshop.gate import canonical
from workshop.profilers import profile_run, runner_files
from workshop.request import Request, load_data
from workshop.run import markers, trainer
from workshop.run.precision import get_precision

EAGER = ["v1", "v2", pytest.param("v3", marks=[needs_triton, pytest.mark.slow])]
CPU = torch.device("cpu")


def make_request(key: str, *flags: str, steps: int = 2, **other: object) -> Request:
    """A request of a small model on the CPU; `other`: fields that no flag sets here."""
    wide = WIDE_HEADS if key == "v3" else []
    request = profile_run.make_request(versions.VERSIONS[key], [*SMALL, *wide, *flags], steps)
    return dataclasses.replace(request, **other)


def prepare(key: str, *flags: str, range_=markers.for_torch_profiler, **options: object):
    request = make_request(key, *flags, **options)
    return profile_run.prepare(request, load_data(request), range_=range_)


class Ranges:
    """Marker ranges that note what was open when each was opened."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self._open: list[str] = []

    @contextmanager
    def __call__(self, name: str):
        self._open.append(name)
        self.opened.append("/".join(self._open))
        yield
        assert self._open.pop() == name


@pytest.mark.parametrize("key", EAGER)
def test_ranges_lie_around_the_parts_and_the_layers_of_every_step(key: str) -> None:
    ranges = Ranges()
    run = prepare(key, "--num-layers", "2", range_=ranges)
    with run.layer_ranges():
        run.step()
        run.step()
    layers = [f"layers.{n}.{part}" for n in (0, 1) for part in ("self_attn", "mlp")]
    step = ["step", "step/forward", *(f"step/forward/{name}" for name in layers)]
    assert ranges.opened == 2 * [*step, "step/backward", "step/optimizer"]


@pytest.mark.parametrize("key", ["v1", "v4"])
def test_profiled_steps_train_what_timed_steps_train(key: str) -> None:
    run = prepare(key, "--compile", "none", steps=4)
    while run.runner.done < 7:
        run.step()
    request = run.request
    model = request.build_on(CPU)
    canonical.load_canonical(model, canonical.canonical_state(request.config, 42))
    optimizer = request.module.configure_optimizer(model, 3e-4)
    batches, _ = load_data(request)
    trainer.train_losses(model, optimizer, batches[:7], get_precision("fp32", CPU))
    for ours, theirs in zip(run.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Captures of a runner on a CPU, where its graphs are the steps themselves."""
    captured: list[str] = []
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda entered: nullcontext())
    v4 = versions.load("v4")
    monkeypatch.setattr(v4, "make_capturable", lambda optimizer: None)
    for place, name in ((v4, "capture_step"), (trainer, "GraphedPhases")):
        monkeypatch.setattr(
            place, name, lambda step, stream, name=name: captured.append(name) or step
        )
    return captured


@pytest.mark.parametrize("warmup", [1, 3, 6])
def test_a_profiled_step_is_captured_once_in_its_parts(warmup: int, captures: list[str]) -> None:
    run = prepare("v1", "--warmup-steps", str(warmup), cuda_graph=True)
    run.step()
    assert captures == ["GraphedPhases"]
    assert run.runner.done == warmup + 1


@pytest.mark.parametrize("phases", [0, 2])
def test_a_timed_run_captures_the_parts_that_it_times(phases: int, captures: list[str]) -> None:
    request = make_request("v1")
    model = request.build()
    optimizer = request.module.configure_optimizer(model, 3e-4)
    schedule = trainer.Schedule(warmup=5, timed=2, phases=phases)
    batches = torch.zeros(schedule.batches, 2, 2, 16, dtype=torch.long)
    training = trainer.train(
        model, optimizer, batches, request.precision, schedule=schedule, cuda_graph=True
    )
    assert captures == ["capture_step", "GraphedPhases"][: 2 if phases else 1]
    assert len(training.forward_ms) == phases and len(training.step_ms) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("warmup", [2, 6])
def test_captured_parts_train_as_eager_steps_do(warmup: int) -> None:
    losses = []
    for graph in ("--no-cuda-graph", "--cuda-graph"):
        flags = ["--config", "tiny", "--precision", "fp32", "--warmup-steps", str(warmup), graph]
        request = profile_run.make_request(versions.VERSIONS["v2"], flags, 20)
        run = profile_run.prepare(request, load_data(request), range_=markers.for_torch_profiler)
        for _ in range(20):
            run.step()
        with torch.no_grad():
            losses.append(run.model(*run.runner.inputs))
    torch.testing.assert_close(losses[0], losses[1], rtol=2e-3, atol=0)


def test_the_vendor_s_profiler_runs_from_the_first_step_to_the_end_of_the_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    request = make_request("v1", steps=2, output_dir=tmp_path)
    ranges, events, prepared = Ranges(), [], profile_run.prepare
    inside = {"hooks": True, "threads": False}

    def note(name: str, run: profile_run.ProfileRun) -> None:
        hooks = any(module._forward_hooks for module in run.model.modules())
        state = {"hooks": hooks, "threads": torch._C._is_multithreading_enabled()}
        events.append((name, state == inside))

    def prepare_spied(*arguments: object, **options: object) -> profile_run.ProfileRun:
        run = prepared(*arguments, **options)

        @contextmanager
        def profiler(device: torch.device):
            note("start", run)
            yield
            note("stop", run)

        monkeypatch.setattr(profile_run, "_nvidia_profiler", profiler)
        for owner, name in ((run, "step"), (run.runner, "wait")):
            real = getattr(owner, name)
            spied = lambda name=name, real=real: (note(name, run), real())  # noqa: E731
            monkeypatch.setattr(owner, name, spied)
        return run

    monkeypatch.setattr(profile_run, "prepare", prepare_spied)
    monkeypatch.setattr(markers, "for_vendor_tools", lambda device: ranges)
    assert profile_run.profile(request) == 0
    order = ["start", "step", "step", "wait", "stop"]
    assert events == [*((name, True) for name in order), ("wait", False)]  # the record's own
    assert "step/forward/layers.0.self_attn" in ranges.opened
    assert records.load_run(tmp_path / "run.jsonl").status == "profiled"


@pytest.mark.parametrize("key", ["v1", pytest.param("v4", marks=pytest.mark.slow)])
def test_the_application_of_external_profilers(
    key: str, type_command: TypeCommand, tmp_path: Path
) -> None:
    answer = type_command(
        *("python", f"tiny_llama_{key}.py", *SMALL, "--profile-steps", "1"),
        *("--output-dir", tmp_path),
        **script(key),
        **ONE_CORE,
    )
    assert answer.returncode == 0, answer.stderr
    assert re.search(r"Profiled: 1 step after \d of warm-up; nothing was timed", answer.stdout)
    run = records.load_run(tmp_path / "run.jsonl")
    assert (run.version, run.status, run.step_ms) == (key, "profiled", [])
    assert run.gradients.params_with_grad == run.gradients.params_total
    assert [path.name for path in tmp_path.iterdir()] == ["run.jsonl"]


# --- run_pytorch_profiler.py ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "key", ["v1", *(pytest.param(k, marks=pytest.mark.slow) for k in ("v2", "v4"))]
)
def test_torch_profiler_on_a_cpu(key: str, type_command: TypeCommand, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    words = ("--output-dir", folder, "--steps", "2", "--", *SMALL)
    answer = type_command("python", "run_pytorch_profiler.py", *words, **script(key), **ONE_CORE)
    assert answer.returncode == 0, answer.stderr
    (trace,) = (folder / "trace").glob(f"{key}.*.pt.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    ranges = [e["name"] for e in events if e.get("cat") == "user_annotation"]
    for name in ("step", "forward", "backward", "optimizer"):
        assert ranges.count(name) == 2, (name, ranges)
    layers = 0 if key == "v4" else 2  # which is compiled
    assert ranges.count("layers.0.self_attn") == ranges.count("layers.0.mlp") == layers
    table = json.loads((folder / "kernels.json").read_text())
    assert (table["what"], table["steps"]) == ("operator", 2)
    assert {"forward", "backward", "optimizer"} <= set(table["phases_ns"])
    with (folder / "operators.csv").open() as file:
        rows = {row["operator"]: row for row in csv.DictReader(file)}
    kernels = {kernel["name"]: kernel for kernel in table["kernels"]}
    assert int(rows["aten::mm"]["count"]) == kernels["aten::mm"]["calls"]
    assert "aten::mm" in answer.stdout and "mean of 2 steps" in answer.stdout
    command = f"python run_pytorch_profiler.py --output-dir {folder} --steps 2 -- --device"
    assert answer.stdout.startswith(command)
    run = records.load_run(folder / "run.jsonl")
    tensors = run.gradients.tensors_total
    assert f"gradients reached {tensors} of {tensors} tensors" in answer.stdout
    assert not (folder / "memory_snapshot.pickle").exists()


# --- the folder of a runner's outputs ------------------------------------------------------------


def run_into(folder: Path, work=lambda data: 0) -> int:
    arguments = Namespace(output_dir=folder, command="python ./run_x.py --steps 2", dry_run=False)
    return profile_run.run(profile_run.plan_of(make_request("v1")), arguments, work)


def test_a_folder_is_replaced_only_if_a_script_filled_it(tmp_path: Path) -> None:
    mine, foreign = tmp_path / "mine", tmp_path / "foreign"
    for folder in (mine, foreign):
        folder.mkdir()
        (folder / "old.txt").write_text("old")
    (mine / runner_files.COMMAND_FILE).write_text("# run_pytorch_profiler.py\n")
    (mine / "trace").mkdir()
    (foreign / runner_files.COMMAND_FILE).write_text("sbatch my_job.sh\n")
    with pytest.raises(WorkshopError, match="--text-file absent"):
        request = make_request("v1", "--text-file", "absent")
        arguments = Namespace(output_dir=mine, command="x", dry_run=False)
        profile_run.run(profile_run.plan_of(request), arguments, run_into)
    assert len(list(mine.iterdir())) == 3
    assert run_into(mine) == 0
    assert [path.name for path in mine.iterdir()] == [runner_files.COMMAND_FILE]
    with pytest.raises(WorkshopError, match="not empty"):
        run_into(foreign)
    assert (foreign / "old.txt").read_text() == "old"


@pytest.mark.parametrize(
    ("error", "status"),
    [(WorkshopError, 2), (NotOnThisMachine, 77), (OutOfMemory, 1), (RuntimeError, 1)],
)
def test_the_folder_has_the_exit_status(
    error: type[Exception], status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = tmp_path / "out" / runner_files.COMMAND_FILE
    typed = "# run_x.py\npython ./run_x.py --steps 2\n"

    def fail(data: object) -> int:
        assert commands.read_text() == typed
        raise error

    with pytest.raises(error):
        run_into(tmp_path / "out", fail)
    assert commands.read_text() == f"{typed}# exit status {status}\n"
    assert run_into(tmp_path / "out", lambda data: 1) == 1
    assert commands.read_text() == f"{typed}# exit status 1\n"
    assert capsys.readouterr().out == 2 * "python ./run_x.py --steps 2\n"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_two_runs_do_not_fill_one_folder(tmp_path: Path) -> None:
    folder, lock = tmp_path / "out", tmp_path / ".out.lock"

    def work(data: object) -> int:
        (folder / "half.txt").write_text("half")
        with pytest.raises(WorkshopError, match="another run is filling"):
            run_into(folder)
        assert (folder / "half.txt").exists() and lock.exists()
        return 0

    lock.touch()  # of a run that was killed: no process holds it
    assert run_into(folder, work) == 0 and not lock.exists()


@pytest.mark.slow
def test_ctrl_c_says_that_the_folder_is_not_complete(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    words = ("run_pytorch_profiler.py", "--steps", "5000", "--output-dir", folder, "--", *SMALL)
    finished = interrupted(*words, after="  data ")
    error = finished.stderr
    assert finished.returncode == 130, error
    assert error.endswith(f"interrupted: {folder} is not complete\n") and "Traceback" not in error
    assert (folder / "command.txt").read_text().endswith("\n# exit status 130\n")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# --- what is typed -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "instead"),
    [
        ("--output-dir x", "use --output-dir of this script"),
        ("--output x", "use --output-dir of this script"),
        ("--profile-steps 5", "use --steps of this script"),
        ("--num-steps 5", "use --steps of this script"),
        ("--no-gate", "have no effect"),
    ],
)
def test_flags_of_the_model_that_would_be_ignored_are_refused(flags: str, instead: str) -> None:
    with pytest.raises(WorkshopError, match=instead):
        make_request("v1", *flags.split())


@pytest.mark.gpu
@pytest.mark.parametrize("key", ["v1", "v2", "v3", "v4"])
def test_torch_profiler_on_a_gpu(key: str, type_command: TypeCommand, tmp_path: Path) -> None:
    answer = type_command(
        *("python", "run_pytorch_profiler.py", "--steps", "2", "--output-dir", tmp_path),
        *("--", "--config", "small", "--num-layers", "2"),
        **script(key),
    )
    assert answer.returncode == 0, answer.stderr
    table = json.loads((tmp_path / "kernels.json").read_text())
    assert (table["what"], table["steps"]) == ("kernel", 2)
    phases = table["phases_ns"]
    assert phases["optimizer"] > 0 and phases["backward"] > phases["forward"] > 0
    assert sum(phases.values()) == pytest.approx(
        sum(kernel["total_ns"] for kernel in table["kernels"]), rel=0.05
    )
    assert 0 < table["timeline"]["busy_ns"] <= table["timeline"]["span_ns"]
    launches = {name: call["calls"] for name, call in table["host_calls"].items()}
    graphs = sum(calls for name, calls in launches.items() if "GraphLaunch" in name)
    assert graphs == (6 if key in ("v3", "v4") else 0), launches
    assert {"GEMM", "attention"} <= {kernel["category"] for kernel in table["kernels"]} | (
        {"attention"} if key == "v1" else set()  # which multiplies and masks by hand
    )
    assert (tmp_path / "memory_snapshot.pickle").stat().st_size > 10_000
    advice = type_command("python", "-m", "workshop.profilers", "advise", tmp_path)
    assert advice.returncode == 0 and advice.stdout.strip(), advice.stderr
    print(answer.stdout, advice.stdout)


@pytest.mark.gpu
def test_the_backward_pass_stays_inside_its_range(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The vendors' tools give a kernel to the ranges of the thread that launched it."""
    threads: dict[str, set[int]] = {"push": set(), "backward": set()}
    push = torch.cuda.nvtx.range_push
    prepared = profile_run.prepare

    def note(where: str) -> None:
        threads[where].add(threading.get_ident())

    def with_hook(*arguments, **options):
        run = prepared(*arguments, **options)
        run.model.norm.weight.register_hook(lambda gradient: note("backward"))
        return run

    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: (note("push"), push(name)))
    request = profile_run.make_request(versions.VERSIONS["v1"], ["--num-layers", "2"], 2)
    request = dataclasses.replace(request, output_dir=tmp_path)

    monkeypatch.setattr(profile_run, "prepare", with_hook)
    assert profile_run.profile(request) == 0
    assert threads["push"] == threads["backward"] == {threading.get_ident()}

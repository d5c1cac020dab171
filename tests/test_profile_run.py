"""What profilers watch: steps with marker ranges that train exactly as the timed ones do, and
run_pytorch_profiler.py as a user types it."""

import csv
import gzip
import json
import re
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from test_cli import ONE_CORE, SMALL, WIDE_HEADS, TypeCommand, script
from test_compare import needs_triton

from workshop import markers, parity, profile_run, results, trainer, versions
from workshop.errors import WorkshopError
from workshop.precision import get_precision

EAGER = ["v1", "v2", pytest.param("v3", marks=needs_triton)]
SCRIPTS = [*EAGER, "v4"]
CPU = torch.device("cpu")


def prepare(key: str, *flags: str, steps: int = 2, range_=markers.for_torch_profiler):
    wide = WIDE_HEADS if key == "v3" else []
    request = profile_run.make_request(versions.VERSIONS[key], [*SMALL, *wide, *flags], steps)
    return profile_run.prepare(request, range_=range_)


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


def test_outside_a_profile_nothing_of_the_ranges_is_left() -> None:
    run = prepare("v1", steps=3)
    with run.layer_ranges():
        run.step()
    for module in run.model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    with pytest.raises(RuntimeError, match="cut"), run.layer_ranges():
        raise RuntimeError("cut")
    assert not any(module._forward_hooks for module in run.model.modules())


def test_a_layer_that_fails_closes_its_range() -> None:
    ranges = Ranges()
    run = prepare("v1", range_=ranges)
    run.model.layers[0].mlp.forward = lambda x: 1 / 0
    with pytest.raises(ZeroDivisionError), run.layer_ranges():
        run.step()
    assert ranges._open == ["step", "forward"]  # which end with the step


@pytest.mark.parametrize("key", ["v1", "v4"])
def test_profiled_steps_train_what_timed_steps_train(key: str) -> None:
    run = prepare(key, "--compile", "none", steps=4)
    while run.runner.done < 7:
        run.step()
    request = run.request
    model = request.build_on(CPU)
    parity.load_canonical(model, parity.canonical_state(request.config, 42))
    optimizer = request.module.configure_optimizer(model, 3e-4)
    batches, _ = profile_run.cli.load_data(request)
    trainer.train_losses(model, optimizer, batches[:7], get_precision("fp32", CPU))
    for ours, theirs in zip(run.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_vendor_tools_get_balanced_ranges_and_a_cpu_none(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))
    range_ = markers.for_vendor_tools(torch.device("cuda"))
    with pytest.raises(ZeroDivisionError), range_("step"), range_("forward"):
        _ = 1 / 0
    assert calls == ["step", "forward", "pop", "pop"]
    with markers.for_vendor_tools(CPU)("step"):
        assert len(calls) == 4


@pytest.mark.parametrize("key", ["v1", "v4"])
def test_the_application_of_external_profilers(
    key: str, type_command: TypeCommand, tmp_path: Path
) -> None:
    answer = type_command(
        *("python", f"tiny_llama_{key}.py", *SMALL, "--profile-steps", "2"),
        *("--output-dir", tmp_path),
        **script(key),
        **ONE_CORE,
    )
    assert answer.returncode == 0, answer.stderr
    assert re.search(r"Profiled: 2 steps after \d of warm-up; nothing was timed", answer.stdout)
    run = results.load(tmp_path / "run.json")
    assert (run.version, run.status, run.step_ms) == (key, "profiled", [])
    assert (
        run.gradients is not None and run.gradients.params_with_grad == run.gradients.params_total
    )
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_severed_backward_pass_is_told(tmp_path: Path) -> None:
    run = prepare("v1")
    run.model.norm.forward = lambda x: x.detach() * run.model.norm.weight
    run.step()
    record = results.load(run.save_record(tmp_path))
    assert "SEVERED" in profile_run.gradients_sentence(record)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--profile-steps", "0"], "--profile-steps 0: it must be a positive number"),
        (["--profile-steps", "2", "--num-steps", "5"], "--num-steps is of timed runs"),
    ],
)
def test_wrong_steps_are_refused(
    flags: list[str], message: str, type_command: TypeCommand, tmp_path: Path
) -> None:
    words = ["python", "tiny_llama_v1.py", *SMALL, *flags, "--output-dir", tmp_path]
    answer = type_command(*words, **script("v1"))
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr.startswith("error: ") and message in answer.stderr


# --- run_pytorch_profiler.py ---------------------------------------------------------------------


def profile_with_torch(
    type_command: TypeCommand, key: str, folder: Path, *flags: str, model: tuple[str, ...] = ()
):
    wide = WIDE_HEADS if key == "v3" else []
    return type_command(
        *("python", "run_pytorch_profiler.py", "--output-dir", folder, *flags),
        *("--", *SMALL, *wide, *model),
        **script(key),
        **ONE_CORE,
    )


def test_the_script_is_the_same_in_every_folder() -> None:
    folders = [versions.get_version(key).path.parent for key in versions.available()]
    texts = {(folder / "run_pytorch_profiler.py").read_bytes() for folder in folders}
    assert len(folders) == 4 and len(texts) == 1


@pytest.mark.parametrize("key", SCRIPTS)
def test_torch_profiler_on_a_cpu(key: str, type_command: TypeCommand, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    answer = profile_with_torch(type_command, key, folder, "--steps", "2")
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
    assert "aten::mm" in answer.stdout and "in 2 steps" in answer.stdout
    run = results.load(folder / "run.json")
    tensors = run.gradients.tensors_total
    assert f"gradients reached {tensors} of {tensors} tensors" in answer.stdout
    assert not (folder / "memory_snapshot.pickle").exists()


def test_stacks_are_an_option(type_command: TypeCommand, tmp_path: Path) -> None:
    answer = profile_with_torch(type_command, "v1", tmp_path, "--stacks", "--steps", "1")
    assert answer.returncode == 0, answer.stderr
    assert "tiny_llama_v1.py" in (tmp_path / "operators_by_line.txt").read_text()


def test_a_folder_is_replaced_only_if_a_script_filled_it(
    type_command: TypeCommand, tmp_path: Path
) -> None:
    mine, foreign = tmp_path / "mine", tmp_path / "foreign"
    for folder in (mine, foreign):
        folder.mkdir()
        (folder / "old.txt").write_text("old")
    (mine / profile_run.COMMAND_FILE).write_text("# run_pytorch_profiler.py\n")
    (foreign / profile_run.COMMAND_FILE).write_text("sbatch my_job.sh\n")
    profile_run.fresh_folder(mine, "python run_x.py")
    assert (mine / profile_run.COMMAND_FILE).read_text().startswith(profile_run.COMMAND_MARK)
    assert [path.name for path in mine.iterdir()] == [profile_run.COMMAND_FILE]
    with pytest.raises(WorkshopError, match="not empty"):
        profile_run.fresh_folder(foreign, "python run_x.py")
    answer = profile_with_torch(type_command, "v1", foreign)
    assert answer.returncode == 2 and "not empty" in answer.stderr
    assert (foreign / "old.txt").read_text() == "old"


def test_a_dry_run_prints_the_command_and_does_nothing(
    type_command: TypeCommand, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    answer = profile_with_torch(type_command, "v1", folder, "--dry-run", "--steps", "7")
    assert answer.returncode == 0
    assert (
        answer.stdout.startswith("python run_pytorch_profiler.py") and "--steps 7" in answer.stdout
    )
    assert not folder.exists()


@pytest.mark.parametrize("flags", [("--steps", "0"), ("--nonsense",)])
def test_wrong_flags_of_the_script(
    flags: tuple[str, ...], type_command: TypeCommand, tmp_path: Path
) -> None:
    assert profile_with_torch(type_command, "v1", tmp_path / "out", *flags).returncode == 2
    answer = profile_with_torch(type_command, "v1", tmp_path / "out", model=("--nonsense",))
    assert answer.returncode == 2 and "tiny_llama_v1.py" in answer.stderr
    assert not (tmp_path / "out").exists()


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


@pytest.mark.parametrize("name", ["run_pytorch_profiler.py", "run_deepspeed_flops.py"])
def test_what_can_not_fit_is_refused_in_one_line(
    name: str, type_command: TypeCommand, tmp_path: Path
) -> None:
    too_much = ["--batch-size", "100000000", "--seq-len", "2048"]
    answer = type_command(
        *("python", name, "--output-dir", tmp_path / "out", "--", *SMALL, *too_much),
        *("--max-seq-len", "2048"),
        **script("v1"),
    )
    assert answer.returncode == 1, answer.stderr
    assert answer.stderr.startswith("error: out of memory") and answer.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.gpu
def test_the_backward_pass_stays_inside_its_range(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The vendors' tools give a kernel to the ranges of the thread that launched it."""
    threads: dict[str, set[int]] = {"push": set(), "backward": set()}
    push = torch.cuda.nvtx.range_push
    monkeypatch.setattr(
        torch.cuda.nvtx,
        "range_push",
        lambda name: (threads["push"].add(threading.get_ident()), push(name)),
    )
    request = profile_run.make_request(versions.VERSIONS["v1"], ["--num-layers", "2"], 2)
    request.arguments.output_dir = tmp_path
    prepared = profile_run.prepare

    def with_hook(*arguments, **options):
        run = prepared(*arguments, **options)
        run.model.norm.weight.register_hook(
            lambda gradient: threads["backward"].add(threading.get_ident())
        )
        return run

    monkeypatch.setattr(profile_run, "prepare", with_hook)
    assert profile_run.profile(request) == 0
    assert threads["push"] == threads["backward"] == {threading.get_ident()}

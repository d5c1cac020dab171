"""The sweep: what grows is what was asked for, and the end of memory is found, not crashed into."""

import json
from pathlib import Path

import pytest
import torch
from test_compare import FEW_STEPS, SHRINK_PRESET, V2, copy_repository, use_versions_of
from test_results import make_result

from analysis_tools import compare_versions
from analysis_tools.compare_versions import Options
from workshop import cli, records, results, tables, versions
from workshop.arguments import read
from workshop.compare import sweep
from workshop.compare.sweep import AXES, Curve, Sweep
from workshop.errors import WorkshopError
from workshop.gate import gate_size, parity
from workshop.judge.plans import VersionPlan, record
from workshop.results import RunResult
from workshop.run import flops, hardware, memory, precision, presets
from workshop.show import comparisons

SESSION = "20260102-030405-abcdef"
OUT_OF_MEMORY = "out of memory on Some CPU: a further 2 GB was asked for at batch size 8; lower it"
HERE = hardware.describe(torch.device("cpu"))
SEQ, BATCH, HIDDEN = AXES["seq-len"], AXES["batch-size"], AXES["hidden-dim"]


def test_sizes_are_read_sorted_and_filled_in() -> None:
    def sizes(*words: str) -> list[int]:
        return sweep.parse(["seq-len", *words])[1]

    assert sizes("512", "128", "128") == [128, 512]
    assert sizes("128", "...", "1024") == [128, 256, 512, 1024]
    assert sizes("100", "...", "500") == [100, 200, 400, 500]
    assert sizes("2", "8", "...", "40", "64") == [2, 8, 16, 32, 40, 64]


def test_the_hidden_dimension_keeps_the_heads_size_and_the_ffn_four_times_as_wide() -> None:
    small = presets.get_preset("small")
    assert sweep.sizes_at(HIDDEN, 1024, small) == {
        "hidden_dim": 1024,
        "intermediate_dim": 4096,
        "num_heads": 16,
        "num_kv_heads": 8,
    }
    with pytest.raises(WorkshopError, match="--sweep hidden-dim 192: it must be a multiple of 128"):
        sweep.sizes_at(HIDDEN, 192, small)
    assert sweep.sizes_at(SEQ, 8192, small) == {"seq_len": 8192, "max_seq_len": 8192}
    assert sweep.sizes_at(BATCH, 32, small) == {"batch_size": 32}
    assert sweep.sizes_at(AXES["num-layers"], 3, small) == {"num_layers": 3}


def test_a_prediction_is_exact_for_what_grows_as_its_axis_does() -> None:
    def square(x: float) -> float:
        return 100 + 3 * x + 0.5 * x * x

    peaks = {x: square(x) for x in (128.0, 256.0, 512.0, 1024.0)}
    assert sweep.predict(peaks, 2048, degree=2) == pytest.approx(square(2048))
    assert sweep.size_that_fills(peaks, square(5000), degree=2) == pytest.approx(5000, rel=1e-3)
    line = {1.0: 110.0, 2.0: 120.0, 4.0: 140.0}
    assert sweep.predict(line, 8, degree=1) == pytest.approx(180.0)
    assert sweep.predict({0.0: 90.0, 128.0: 100.0}, 256, degree=2, upwards=True) == 400.0


def test_the_gate_is_run_on_what_v1_has_the_memory_for() -> None:
    model = flops.Sizes(1000, 1024, 4096, 12, 16, 8)
    assert gate_size.fitting(model, 16, 512, 126e9, 4) == (16, 512)
    batch_size, seq_len = gate_size.fitting(model, 16, 8192, 126e9, 4)
    assert batch_size * seq_len < 16 * 8192 and seq_len >= 1024
    state = 40 * flops.parameter_count(model)
    assert gate_size.fitting(model, 16, 8192, 1.1 * state, 4) == (3, 65)
    # Where the model alone is too large, fewer tokens don't help.
    assert gate_size.fitting(model, 16, 8192, state, 4) == (16, 8192)
    assert gate_size.fitting(model, 1, 2, 0, 8) == (1, 2)


def test_the_gates_need_is_near_what_is_measured() -> None:
    config = versions.load("v2").TinyLlamaConfig(
        hidden_dim=64, intermediate_dim=256, num_layers=2, num_heads=2, num_kv_heads=1
    )
    shape, cpu = (2, 128), torch.device("cpu")
    setting = parity.Setting(config, precision.get_precision("fp32", cpu), cpu, 0, *shape)
    net = versions.load("v2").TinyLlama(config)
    peak = memory.cpu_step_peak(lambda: parity.check_model(net, setting), lambda: 0)
    assert peak < gate_size.bytes_needed(config, *shape, 8) < gate_size._MARGIN * peak


@pytest.mark.parametrize(
    ("places", "files_", "free"),
    [
        ("0::/job/step", {"job/step/memory.max": "max", "job/step/memory.current": "5"}, 8192),
        ("0::/", {"memory.max": "5000", "memory.current": "1000"}, 4000),
        (
            "0::/job/step",  # the limit is the job's, and 500 bytes of its use are cached files
            {"job/step/memory.max": "max", "job/step/memory.current": "5",
             "job/memory.max": "5000", "job/memory.current": "1000",
             "job/memory.stat": "anon 500\ninactive_file 200\nactive_file 300\n"},
            4500,
        ),
        (
            "1:name=systemd:/\n4:hugetlb,memory:/docker/of-the-host\n0::/",
            {"memory/memory.limit_in_bytes": "5000", "memory/memory.usage_in_bytes": "1000",
             "memory/memory.stat": "inactive_file 9\ntotal_inactive_file 100\n"},
            4100,
        ),
    ],
    ids=["v2 unlimited", "v2", "v2 job", "v1 container"],
)  # fmt: skip
def test_free_memory_is_what_the_container_or_the_job_leaves(
    places, files_, free, tmp_path, monkeypatch
) -> None:
    written = {f"sys/{name}": text for name, text in files_.items()}
    written["proc/meminfo"] = "MemTotal: 9 kB\nMemAvailable:       8 kB\n"
    written["proc/self/cgroup"] = places
    for name, text in written.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(hardware, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(hardware, "_CGROUPS", tmp_path / "sys")
    assert hardware.free_memory_bytes(torch.device("cpu")) == free


def at(version: str, size: int, peak: float = 100.0, **changes: object) -> RunResult:
    """A run of the tiny preset at a sequence length."""
    memory = {"peak": peak, "source": "allocator"}
    name = "tiny" if size == 128 else "custom"
    times = [size * factor for factor in (0.99, 1.0, 1.0, 1.01, 1.0)]
    given = {"seq_len": size, "memory_mb": memory, "config_name": name, "step_ms": times}
    given["kind"] = sweep.KIND
    return make_result(version, **{**given, **changes})


def arguments(folder: Path, *words: str) -> Options:
    flags = ["--device", "cpu", "--output-dir", str(folder), "--repeats", "1", *words]
    return read(Options, flags)


def save(plan: VersionPlan, given: Options, status: results.Status, why: str) -> None:
    run = record(plan, given, SESSION)
    run.status, run.error = status, why
    records.add(run, given.output_dir)


def test_a_size_that_cannot_fit_is_not_tried(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sweep.hardware, "free_memory_bytes", lambda _: 10**9)
    given = arguments(tmp_path, "--sweep", "seq-len", "128", "...", "2048")
    given.versions = ["v1", "v2"]
    tried = []
    for plan in sweep.plan(given, given.sweep, SESSION).plans:
        size = plan.sizes["seq_len"]
        tried.append((plan.version, size, bool(plan.skipped)))
        if plan.skipped:
            save(plan, given, "skipped", plan.skipped)
        else:  # V1's memory grows with the square, V2's with the length
            peak = 50 + (size / 128) ** 2 * 20 if plan.version == "v1" else 50 + size / 16
            records.add(at(plan.version, size, peak, device=HERE), tmp_path)
    assert tried == [
        *(("v1", 128, False), ("v2", 128, False), ("v1", 256, False), ("v2", 256, False)),
        *(("v1", 512, False), ("v2", 512, False), ("v1", 1024, True), ("v2", 1024, False)),
        ("v2", 2048, False),
    ]
    (one,) = sweep.build(records.load_folder(tmp_path, RunResult), SEQ)
    v1, v2 = one.curves
    assert (v1.fits, v1.measured_limit, v1.predicted_limit) == (512, None, 1024)
    assert v1.points[-1].predicted_mb == pytest.approx(50 + 64 * 20)
    assert v1.predicted_end == pytest.approx(128 * (950 / 20) ** 0.5, rel=1e-3)
    assert (v2.fits, v2.measured_limit, v2.predicted_limit) == (2048, None, None)
    limits = comparisons.limits(one)
    assert limits[0].startswith("v1: fits up to 512; 1,024 would take 1,330 MB of 1,000 (predicted")
    assert not one.failed


def test_a_version_that_was_out_of_memory_is_not_run_at_larger_sizes(tmp_path) -> None:
    given = arguments(tmp_path, "--sweep", "batch-size", "8", "16", "32", "--versions", "v1", "v2")
    tried = []
    for plan in sweep.plan(given, given.sweep, SESSION).plans:
        tried.append((plan.version, plan.sizes["batch_size"]))
        if tried[-1] == ("v1", 16):
            save(plan, given, "failed", OUT_OF_MEMORY)
        else:
            run = at(plan.version, 128, batch_size=plan.sizes["batch_size"], device=HERE)
            records.add(run, tmp_path)
    assert tried == [("v1", 8), ("v2", 8), ("v1", 16), ("v2", 16), ("v2", 32)]
    (one,) = sweep.build(records.load_folder(tmp_path, RunResult), BATCH)
    v1, v2 = one.curves
    assert (v1.fits, v1.measured_limit) == (8, 16)
    assert "out of memory at 16 (measured)" in comparisons.limits(one)[0]
    assert v2.fits == 32 and not one.failed


def test_what_can_only_be_interpreted_is_skipped(tmp_path) -> None:
    given = arguments(tmp_path, "--sweep", "seq-len", "8", "16")
    asked = sweep.plan(given, given.sweep, SESSION)
    assert "v3" not in asked.keys and asked.skipped == [
        "v3: skipped: interpreted, it has no times to compare"
    ]
    given.versions = ["v3"]
    with pytest.raises(WorkshopError, match="v3 can only be interpreted here") as error:
        sweep.plan(given, given.sweep, SESSION)
    assert error.value.exit_code == 77


def test_a_run_passes_the_gate_on_fewer_tokens_for_want_of_memory(
    tmp_path, monkeypatch, capsys
) -> None:
    sizes = {"hidden-dim": 64, "intermediate-dim": 96, "num-layers": 1, "num-heads": 2,
             "num-kv-heads": 1, "batch-size": 2, "seq-len": 16}  # fmt: skip
    words = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    words += ["--device", "cpu", "--data", "synthetic", "--num-steps", "2", "--warmup-steps", "1"]
    words += ["--output-dir", str(tmp_path)]
    config = versions.load("v2").TinyLlamaConfig(hidden_dim=64, intermediate_dim=96,
                                                 num_layers=1, num_heads=2,
                                                 num_kv_heads=1)  # fmt: skip
    free = int(1.01 * gate_size.bytes_needed(config, 1, 8, 8) / gate_size.SHARE)
    monkeypatch.setattr(gate_size, "LEAST", (1, 2))
    monkeypatch.setattr(hardware, "free_memory_bytes", lambda _: free)
    assert cli.main(versions.load("v2"), words) == 0
    assert "at 1 x 8 tokens only" in capsys.readouterr().out
    (run,) = records.load_folder(tmp_path, RunResult)
    assert (run.gate.status, run.gate.batch_size, run.gate.seq_len) == ("pass", 1, 8)


def build(*runs: RunResult) -> Sweep:
    (one,) = sweep.build(runs, SEQ)
    return one


def markdown(one: Sweep) -> str:
    return tables.markdown(comparisons.of_sweeps([one]).tables)


def curve(one: Sweep, version: str) -> Curve:
    return next(curve for curve in one.curves if curve.version == version)


def test_only_runs_that_differ_in_one_size_make_a_sweep() -> None:
    others = [
        at("v1", 512, session="20250101"),
        at("v1", 512, batch_size=4),
        at("v1", 64, kind="run"),
        at("v1", 512, precision="bf16"),
        at("v1", 512, config={**make_result().config, "num_layers": 2}),
        at("v1", 512, device={"type": "cpu", "name": "Another"}),
    ]
    longer = at("v1", 4096, config={**make_result().config, "max_seq_len": 4096})
    one = build(at("v1", 128), at("v1", 256), longer, *others)
    assert [point.size for point in one.curves[0].points] == [128, 256, 4096]
    assert (one.config, one.precision) == ("tiny", "fp32")
    assert sweep.build(others, SEQ) == []


def test_a_speed_up_is_over_v1_at_the_same_size() -> None:
    one = build(*(at("v1", n) for n in (128, 256)), at("v2", 128, step_ms=[64.0] * 5),
                at("v2", 256, step_ms=[64.0] * 5))  # fmt: skip
    points = curve(one, "v2").points
    assert [point.row.speedup.value for point in points] == [2.0, 4.0]
    cells = [line.cells[4] for line in comparisons.sweep_table(one).lines if line.cells[1] == "v2"]
    assert cells == ["2.00x (1 process)", "4.00x (1 process)"]
    assert "(1 process): no interval" in markdown(one)


def test_a_red_gate_has_no_figures_and_fails_the_sweep() -> None:
    one = build(at("v1", 128), at("v1", 256), at("v2", 128), at("v2", 256, gate="fail"))
    assert one.failed
    assert comparisons.point_without_time(curve(one, "v2").points[1]) == "FAIL"
    assert [line.style for line in comparisons.sweep_table(one).lines] == [None, None, None, "red"]
    record = comparisons.of_sweeps([one]).items[0]["curves"][1]["points"][1]
    assert (record["step_ms"], record["peak_memory_mb"], record["parity"]) == (None, None, "fail")


FAILS_AT_32 = (
    "        T = tokens.shape[1]\n",
    "        T = tokens.shape[1]\n"
    "        if T >= 32:\n"
    "            raise torch.OutOfMemoryError('Tried to allocate 2.00 GiB.')\n",
)


@pytest.mark.slow
def test_a_real_sweep_ends_where_memory_does(tmp_path, monkeypatch) -> None:
    """V2 has no memory for 32 tokens."""
    changes = {"workshop/run/presets.py": SHRINK_PRESET, V2: FAILS_AT_32}
    use_versions_of(copy_repository(tmp_path / "code", changes), monkeypatch)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = tmp_path / "out"
    words = ["--device", "cpu", "--sweep", "seq-len", "16", "32", "--versions", "v1", "v2"]
    assert compare_versions.main([*words, *FEW_STEPS, "--output-dir", str(folder)]) == 0
    (one,) = json.loads((folder / "sweep.json").read_text())["sweeps"]
    v1, v2 = one["curves"]
    assert [(p["size"], p["parity"]) for p in v1["points"]] == [(n, "pass") for n in (16, 32)]
    assert (v1["fits"], v2["fits"], v2["measured_limit"]) == (32, 16, 32)
    assert all(p["step_ms"] and p["peak_memory_mb"] for p in v1["points"])
    assert {run.kind for run in records.load_folder(folder, RunResult)} == {sweep.KIND}

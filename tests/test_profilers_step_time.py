"""Where a step's time goes: real traces by the figures of another program, traces by hand, and the
pictures that are made of both."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text
from test_profilers_kineto import AUTOGRAD, event, kernel, launch, mark, write
from test_profilers_loading import operator, wait

from workshop.profilers import __main__ as program
from workshop.profilers import kernel_file, kineto, step_time
from workshop.profilers.categories import on_tensor_cores
from workshop.profilers.load import load
from workshop.profilers.step_time import COPY, CPU, KERNEL, LOADING, RUNTIME
from workshop.show import step_pictures

FIXTURES = Path(__file__).parent / "fixtures/profilers/kineto"
V4 = FIXTURES / "h200_v4_medium_trace.json.gz"

# --- real traces ---------------------------------------------------------------------------------

# In ms: kernel, copy, runtime, CPU, other. TensorBoard's plugin (torch-tb-profiler 0.4.3, given the
# names that categories had in its time) makes the same of these traces, copies and memsets added.
PLUGINS_FIGURES = {
    "h200_v1_small_step": [(4.596, 0.052, 9.497, 33.805, 12.041)],
    "h200_v2_small_step": [(2.497, 0.013, 3.562, 13.179, 5.758)],
    "h200_v3_small_step": [(1.812, 0.003, 0.519, 0.043, 0.980)],
    "h200_v4_medium_trace": [
        (21.957, 0.055, 0.564, 0.105, 0.183),
        (22.165, 0.059, 0.504, 0, 0),
        (22.194, 0.056, 0.503, 0, 0),
    ],
}


@pytest.mark.parametrize("name", PLUGINS_FIGURES)
def test_real_steps_are_divided_as_tensorboards_plugin_did(name: str) -> None:
    table = kineto.read(FIXTURES / f"{name}.json.gz")
    found = [
        tuple(ns / 1e6 for category, ns in step.parts_ns.items() if category != LOADING)
        for step in table.step_times
    ]
    expected = PLUGINS_FIGURES[name]
    assert len(found) == len(expected)
    for ours, plugins in zip(found, expected, strict=True):
        assert ours == pytest.approx(plugins, abs=0.0021)


@pytest.mark.parametrize(
    ("expected", "names"),
    [
        (True, (
            "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT",
            "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize2x1x1_cublas",
            "sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nchw_tensor16x8x8",
            "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nn>",
            "void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>(Flash_fwd_params)",
            "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)",
            "Cijk_Ailk_Bjlk_BBS_BH_Bias_HAS_SAV_UserArgs_MT256x256x64_MI16x16x1_SN_LDSB1_GRVWA8",
            "_ZN2ck16kernel_gemm_xdl_cshuffle_v3INS_48GridwiseGemm_xdl_cshuffle_v3EEEvT_",
        )),
        (False, (
            "ampere_sgemm_32x32_sliced1x4_tn",
            "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>(T1::Params)",
            "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8_stage3_warpsize1x2x1_ffma_aligna4",
            "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float>(int)",
            "void at::native::GammaBetaBackwardCUDAKernelTemplate<float, float, 32u>(long)",
            "void at::native::vectorized_elementwise_kernel<4, FillFunctor<float>>(int)",
            "_attention_forward_kernel",
        )),
    ],
)  # fmt: skip
def test_kernels_on_tensor_cores_are_known_by_name(expected: bool, names: tuple[str, ...]) -> None:
    assert {name: on_tensor_cores(name) for name in names} == dict.fromkeys(names, expected)


# --- by hand, times in µs ------------------------------------------------------------------------

GEMM = "nvjet_sm90_tst_64x64_64x13_2x1_v_bz_NNT"
PIN_MEMORY = 999
OVERLAPS = [
    mark("ProfilerStep#4", 0, 100),
    wait(0, 30),
    operator(35, 40),
    operator(60, 20, AUTOGRAD),
    launch(40, 1),  # each lasts 3
    launch(70, 2, AUTOGRAD),
    launch(84, 3),
    launch(20, 8),  # the loader's own
    launch(2, 7),
    kernel("while the host waits", 12, 4, 7),
    launch(95, 9, PIN_MEMORY),  # no thread of the step's
    operator(10, 5),  # the loader's own
    kernel(GEMM, 45, 10, 1),
    kernel("add", 50, 10, 2),
    event("gpu_memcpy", "Memcpy HtoD", 55, 10, 8, device=0, correlation=3),
    kernel("on another GPU", 0, 9, 0, device=1),
    mark("ProfilerStep#5", 100, 100),
    launch(110, 4),
    kernel("late", 190, 40, 4),  # beyond its step
    operator(205, 5),
    mark("ProfilerStep#6", 200, 100),
    operator(240, 10),
    mark("ProfilerStep#7", 300, 50),  # brings no batch
    wait(300, 40),
    operator(310, 5),
]
GAPS = [
    launch(-9, 1),
    kernel("left over", -5, 15, 1),
    mark("step", 0, 50),
    operator(20, 10),
    wait(55, 30),
    mark("step", 90, 10),
    operator(92, 4),
]


@pytest.mark.parametrize(
    ("events", "expected", "tensor_us"),
    [
        # To 30 waiting, but for a kernel; 35 to 40 CPU; 40 to 43 runtime, 43 to 45 CPU; kernels to
        # 60, a copy to 65; CPU to 80 but for a launch; the last launch; the rest is 5 + 4 + 13.
        (OVERLAPS, [
            {KERNEL: 19, COPY: 5, LOADING: 26, RUNTIME: 9, CPU: 19, "other": 22},
            {KERNEL: 40, RUNTIME: 3, "other": 87},
            {CPU: 10, "other": 60},
        ], [10, 0, 0]),
        # The first begins when the GPU has done what was launched before it.
        (GAPS, [{CPU: 10, "other": 30}, {LOADING: 30, CPU: 4, "other": 16}], [0, 0]),
        ([kernel(GEMM, 0, 10, 1), wait(10, 5), operator(20, 5)], [], []),
    ],
)  # fmt: skip
def test_each_instant_counts_once(
    tmp_path: Path, events: list[dict], expected: list[dict], tensor_us: list[float]
) -> None:
    steps = kineto.read(write(tmp_path, events)).step_times
    found = [{name: ns / 1e3 for name, ns in step.parts_ns.items() if ns} for step in steps]
    assert found == [pytest.approx(one) for one in expected]
    assert [step.tensor_ns / 1e3 for step in steps] == pytest.approx(tensor_us)


# --- what is shown and kept ----------------------------------------------------------------------


def test_show_prints_the_mean_and_keeps_every_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(["show", str(V4), "--output-dir", str(tmp_path)]) == 0
    lines = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    assert ["kernel", "22.105", "97.0%", "21.957", "22.194"] in lines
    assert not any(line[:1] == [LOADING] for line in lines)  # there is none
    text = [" ".join(line) for line in lines]
    assert "3 steps, 22.782 ms each" in text
    assert "GPU utilisation 97.0%: the share with a kernel running" in text
    path = tmp_path / kernel_file.JSON_FILE
    assert kernel_file.read(path).step_times == kineto.read(V4).step_times


class Drawn:
    """The figure that was written, and its texts. (An axis has more, for ticks beyond its ends.)"""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.texts: dict[int, Text] = {}
        savefig, draw_text = Figure.savefig, Text.draw

        def save(figure: Figure, *where: Any, **how: Any) -> None:
            self.figure = figure
            savefig(figure, *where, **how)

        def draw(text: Text, renderer: Any) -> None:
            if text.get_visible() and text.get_text().strip():
                self.texts[id(text)] = text
            draw_text(text, renderer)

        monkeypatch.setattr(Figure, "savefig", save)
        monkeypatch.setattr(Text, "draw", draw)

    def words(self) -> set[str]:
        return {text.get_text() for text in self.texts.values()}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    return Drawn(monkeypatch)


TITLE = "$1{ a_b $2"
"""No formula."""


def test_a_traces_picture_has_the_mean_and_the_first_steps(tmp_path: Path, drawn: Drawn) -> None:
    steps = 72
    events = [
        one
        for start in range(0, 60 * steps, 60)
        for one in (
            mark(f"ProfilerStep#{start}", start, 60),
            wait(start, 30),
            operator(start + 30, 9),
        )
    ]
    step_pictures.draw_steps(write(tmp_path, events), tmp_path / "a.png", TITLE)
    shown = {"mean of 72", *(f"step {number}" for number in range(1, 24))}
    names = {word for word in drawn.words() if word.startswith(("step ", "mean of "))}
    assert names == shown
    assert {TITLE, "0.06 ms", "DataLoader", "CPU", "other"} <= drawn.words()
    assert imread(tmp_path / "a.png").shape[1] == 2400


def test_a_ladders_picture(tmp_path: Path, drawn: Drawn) -> None:
    """It is drawn from traces, or from the small files that `show` makes of them."""
    (tmp_path / "v4").mkdir()
    kernel_file.write(kineto.read(V4), tmp_path / "v4")
    write(tmp_path, OVERLAPS)
    profiles = [
        ("one worker, PNG files, decoded by PIL, pinned", tmp_path / "trace.json"),
        ("V1 $", FIXTURES / "h200_v1_small_step.json.gz"),
        ("V4", tmp_path / "v4/kernels.json"),
    ]
    means = [(name, step_time.mean(load(path).step_times)) for name, path in profiles]
    step_pictures.compare_pictures(means, tmp_path / "ladder.png", "A ladder")
    shown = {"0.1 ms", "22.8 ms", "20%, 17%", "8%, 22%", "97%, 63%", "V1 $", "A ladder"}
    assert shown <= drawn.words()
    times, shares = drawn.figure.axes
    for axis, expected in ((times, 0.100 + 59.990 + 22.782), (shares, 300)):
        widths = sum(bar.get_width() for bars in axis.containers for bar in bars)
        assert widths == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("trace", "flags", "message"),
    [
        (V4, ["--step", "2"], "--categories shows all steps: leave out --step, --from, --to"),
        (FIXTURES / "h200_small_2layer_trace.json.gz", [], "no times of steps in it"),
        (V4, ["--output", "a.jpg"], "a.jpg: the picture is a PNG"),
    ],
)
def test_what_can_not_be_drawn_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], trace: Path, flags: list, message: str
) -> None:
    command = ["draw", str(trace), "--categories", "--output", str(tmp_path / "a.png"), *flags]
    assert program.main(command) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())

"""Two kernel tables compared, and the names of kernels made fit for a terminal."""

import contextlib
import dataclasses
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_results import make_result

from workshop.errors import WorkshopError
from workshop.profilers import diff
from workshop.profilers.categories import categorize
from workshop.profilers.diff import TableDiff, compare
from workshop.profilers.names import display_name
from workshop.profilers.table import Kernel, KernelTable, Timeline
from workshop.tables import print_tables

COPY = (
    "void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda(int)::{lambda()#1}>(int)"
)


def table(kernels: dict[str, tuple[int, float]], **fields: object) -> KernelTable:
    """A table of kernels by name: (calls, total in ms)."""
    listed = [
        Kernel(name, categorize(name), calls, ms * 1e6) for name, (calls, ms) in kernels.items()
    ]
    return KernelTable(Path("x.csv"), "nsys", kernels=listed, **fields)  # type: ignore[arg-type]


def kinds(difference: TableDiff) -> dict[str, str]:
    return {change.name: change.kind for change in difference.changes}


EAGER = table(
    {"nvjet_a": (20, 40.0), COPY: (200, 30.0), "some_gemm": (20, 20.0), "softmax": (10, 10.0)},
    steps=10,
    timeline=Timeline(200e6, 100e6),
)
FUSED = table(
    {"nvjet_a": (6, 12.0), "some_gemm": (6, 9.0), "softmax": (3, 2.4), "fused_norm": (6, 1.5)},
    steps=3,
    timeline=Timeline(30e6, 24.9e6),
)


def test_gone_new_slower_faster_by_step() -> None:
    difference = compare(EAGER, FUSED)
    assert difference.unit == "step"
    found = {c.name: (c.kind, round(c.difference_ns / 1e6, 6)) for c in difference.changes}
    assert found == {
        COPY: ("gone", -3.0),
        "some_gemm": ("slower", 1.0),
        "fused_norm": ("new", 0.5),
        "softmax": ("faster", -0.2),
    }
    assert [c.name for c in difference.changes] == list(found), "the largest difference first"
    assert difference.unchanged == 1, "4 ms a step on both sides"
    gone = difference.changes[0]
    assert (gone.a_calls, gone.b_calls, gone.a_ns, gone.b_ns) == (20, 0, 3e6, 0)
    a, b = difference.figures(difference.a), difference.figures(difference.b)
    assert a == {
        "calls": 25,
        "all kernels": 10e6,
        "GPU busy": 10e6,
        "GPU idle": 10e6,
        "  GEMM": 6e6,
        "  copy": 3e6,
        "  elementwise": 1e6,
    }
    assert b["calls"] == 7 and b["all kernels"] == pytest.approx(8.3e6)
    assert (b["GPU busy"], b["GPU idle"]) == pytest.approx((8.3e6, 1.7e6))
    assert difference.notes == []


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        (40.0, 42.0, "slower"),
        (40.0, 41.1, None),  # 2.8% of the kernel's time
        (2.0, 2.9, None),  # 0.9% of all kernels'
        (2.0, 3.1, "slower"),
    ],
)
def test_noise_is_no_change(before, after, kind) -> None:
    rest = {"nvjet_rest": (10, 100.0 - max(before, after))}
    difference = compare(table({"x": (5, before), **rest}), table({"x": (5, after), **rest}))
    assert kinds(difference) == ({"x": kind} if kind else {})
    assert difference.unchanged == (1 if kind else 2)


def operators(**fields: object) -> KernelTable:
    """`mm` in 12 calls, the fastest of 1 ms, and other operators that take the same time in all."""
    mm = Kernel("aten::mm", "GEMM", 12, 60e6, min_ns=1e6, max_ns=9e6)
    rest = Kernel("aten::mul", "elementwise", 20, 60e6, min_ns=1e3, max_ns=9e6)
    changed = dataclasses.replace(mm, **fields)
    return KernelTable(Path("x.json"), "torch.profiler", [changed, rest], what="operator", steps=2)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"total_ns": 9e6, "max_ns": 2e6}, None),  # the slow calls alone were faster
        ({"total_ns": 300e6, "min_ns": 1.8e6}, "slower"),
        ({"total_ns": 12e6, "min_ns": 0.5e6}, "faster"),
        ({"total_ns": 12e6, "min_ns": None}, "faster"),
        ({"total_ns": 61e6, "min_ns": 5e6}, None),  # 0.8% of all
        ({"total_ns": 9e6, "calls": 10}, "faster"),  # another program
    ],
)
def test_the_noise_of_a_host_is_no_change(changes, kind) -> None:
    difference = compare(operators(), operators(**changes))
    assert kinds(difference) == ({"aten::mm": kind} if kind else {})
    assert any("an operator's severalfold" in note for note in difference.notes)
    assert "severalfold" not in str(compare(EAGER, FUSED).notes)


def test_times_of_the_interpreter_are_not_compared() -> None:
    interpreted = make_result("v3", device={"type": "cpu", "name": "CPU"})
    slow = operators(total_ns=9e12, min_ns=1e11)
    slow.kernels.append(Kernel("tiny_llama::rms_norm", "norm", 4, 9e9))
    for runs in ((None, interpreted), (interpreted, interpreted)):
        difference = compare(operators(), slow, *runs)
        assert kinds(difference) == {"tiny_llama::rms_norm": "new"}
        calls = [difference.figures(side)["calls"] for side in (difference.a, difference.b)]
        assert calls == [16, 18]
        text = shown(difference)
        assert "on both sides: 2 of the operators" in text
        assert "note: no times are compared: Triton's interpreter" in text
        assert "all operators, ms" not in text
    alike = shown(compare(operators(), operators()))
    assert "about the same: 2 of the operators\n" in alike and "calls A" not in alike
    measured = make_result("v1", device={"type": "cpu", "name": "CPU"})
    assert "slower" in kinds(compare(operators(), slow, measured, measured)).values()


def test_the_compilers_running_numbers() -> None:
    a = {
        "triton_poi_fused_add_3": (1, 10.0),
        "triton_poi_fused_mul_1": (1, 10.0),
        "triton_red_fused_sum_1": (1, 10.0),
        "triton_red_fused_sum_2": (1, 20.0),
        "nvjet_1": (1, 10.0),
    }
    b = {
        "triton_poi_fused_add_5": (1, 10.0),  # the same kernel, and as fast
        "triton_poi_fused_mul_1": (1, 15.0),
        "triton_poi_fused_mul_4": (1, 10.0),  # mul_1 is taken
        "triton_red_fused_sum_7": (1, 10.0),  # of which of the two?
        "nvjet_2": (1, 10.0),  # no compiler's number
    }
    difference = compare(table(a), table(b))
    assert kinds(difference) == {
        "triton_poi_fused_mul_1": "slower",
        "triton_poi_fused_mul_4": "new",
        "triton_red_fused_sum_1": "gone",
        "triton_red_fused_sum_2": "gone",
        "triton_red_fused_sum_7": "new",
        "nvjet_1": "gone",
        "nvjet_2": "new",
    }
    assert difference.unchanged == 1


def test_what_can_not_be_compared() -> None:
    operators = table({"aten::mm": (1, 1.0)}, what="operator")
    with pytest.raises(WorkshopError, match=r"and x\.csv operators: compare two"):
        compare(EAGER, operators)
    other = table({}, device="NVIDIA H200")
    other.tool = "ncu"
    notes = compare(table({}, device="AMD MI300X"), other).notes
    assert any("nsys and ncu measure differently" in note for note in notes)
    assert any("two devices: AMD MI300X and NVIDIA H200" in note for note in notes)


def shown(difference: TableDiff, limit: int = 20) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        print_tables(diff.render(difference, limit))
    return out.getvalue()


def test_the_terminal_shows_the_figures() -> None:
    text = shown(compare(EAGER, FUSED))
    for row in (
        r"│ kernel calls      │     25 │     7 │  -72.0% │",
        r"│ GPU idle, ms      │ 10.000 │ 1.700 │  -83.0% │",
        r"│ gone   │ elementwise_kernel<direct_copy_kernel_cuda> │      20 │       0 │ 3.000 │",
        "about the same: 1 of the kernels (by less than 3% of their own time, or 1% of all)",
    ):
        assert row in text, text
    assert "smaller ones, not shown: 1 new, 1 faster" in shown(compare(EAGER, FUSED), 2)


# --- names ---------------------------------------------------------------------------------------

ANONYMOUS = "(anonymous namespace)"


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>, "
            "std::array<char*, 3ul> >(int, at::native::AddFunctor<float>)",
            "vectorized_elementwise_kernel<AddFunctor>",
        ),
        (
            "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<"
            "at::native::BinaryFunctor<float, float, float, at::native::binary_internal::"
            "MulFunctor<float> > >(at::TensorIteratorBase&)::{lambda(int)#1}>(int)",
            "elementwise_kernel<MulFunctor>",
        ),
        (  # as ncu writes it
            "void at::elementwise_kernel<128, 4, void at::gpu_kernel_impl_nocast<at::<unnamed>::"
            "my_copy_kernel(at::TensorIteratorBase &)::[lambda(float) (instance 1)]>(const T1 &)>"
            "(int, T2)",
            "elementwise_kernel<my_copy_kernel>",
        ),
        (
            f"void at::native::{ANONYMOUS}::multi_tensor_apply_kernel<at::native::{ANONYMOUS}::"
            "TensorListMetadata<1>, at::native::BinaryOpScalarFunctor<float, 1, 1, 0>, "
            "std::multiplies<float>, float>(float)",
            "multi_tensor_apply_kernel<BinaryOpScalarFunctor, multiplies>",
        ),
        (
            f"void {ANONYMOUS}::softmax_warp_forward<float, float, float, 7, false>(float*)",
            "softmax_warp_forward",
        ),
        (
            "std::enable_if<!(false), void>::type lib::gemv::kernel<int, 7>(T13)",
            "lib::gemv::kernel",
        ),
        ("void divide(float*, int) [clone .kd]", "divide"),
        (
            "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEE"
            "St5arrayIPcLm1EEEEviT0_T1_",
            "vectorized_elementwise_kernel<FillFunctor>",
        ),
        (
            "_ZN2at6native12_GLOBAL__N_16my_sumILi4ELi8EZNS0_17my_functor_kernelEvEEEvT_",
            "my_sum<my_functor_kernel>",
        ),
        ("_Z6dividePfi", "divide"),
        ("_ZN99999999999999x", "_ZN99999999999999x"),
        ("Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD (Pageable -> Device)"),
        ("[CUDA memcpy Host-to-Device]", "[CUDA memcpy Host-to-Device]"),
        ("aten::mm", "aten::mm"),
        ("triton_poi_fused_add_3", "triton_poi_fused_add_3"),
    ],
)
def test_what_is_left_of_a_name(name, short) -> None:
    assert display_name(name, 80) == short


def test_a_long_name_keeps_both_ends() -> None:
    name = "Cijk_Alik_Bljk_" + "MT64x16x32_" * 40 + "WG64_4_1"
    short = display_name(name, 30)
    assert len(short) == 30
    assert short.startswith("Cijk_Alik_") and short.endswith("WG64_4_1") and "…" in short
    assert display_name(name, 1) == "…"


@given(st.text(st.characters() | st.sampled_from("<>()[]{}: -,\x1b\u202ev"), max_size=80))
def test_any_name_is_printable_and_fits(name) -> None:
    for width in (1, 7, 40):
        short = display_name(name, width)
        assert len(short) <= width
        assert short.isprintable()

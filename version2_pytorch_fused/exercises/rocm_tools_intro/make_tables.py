"""Writes made_up_run/: tables as rocprofv3 writes them, with made-up numbers.

We have no AMD GPU. The headers are rocprofv3's of ROCm 7; the kernels' names are of the kinds that
PyTorch runs there, and their times, sizes and counters are invented below, roughly as a layer of V2
at `medium` in bf16 could have them. They are for learning to read such tables, for nothing else.

    python version2_pytorch_fused/exercises/rocm_tools_intro/make_tables.py
"""

import argparse
import csv
import io
import statistics
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

if __name__ == "__main__":
    from workshop.needed import import_torch

    import_torch()

from workshop import errors, results  # noqa: E402
from workshop.arguments import parse  # noqa: E402

FOLDER = Path(__file__).parent / "made_up_run"
DEVICE = "MI300X (MADE UP FOR AN EXERCISE)"
PROCESS = 4711
WARMUP_STEPS, MARKED_STEPS = 1, 2
_T0 = 1_000_000_000_000
_LAUNCH_NS = 22_000
"""From one launch to the next, on the host."""
_LATENCY_NS = 6_000
_UNDER_COUNTERS = 1.4
"""How much longer a kernel takes while counters are read."""


@dataclass(frozen=True)
class _Kind:
    """A made-up kernel: microseconds, and MB that it reads and writes."""

    name: str
    us: float
    read_mb: float
    written_mb: float
    registers: int = 32
    scratch: int = 0


_WIDE = _Kind("Cijk_Ailk_Bljk_BBS_BH_MT256x256x64", 226, 92, 134, registers=256)
_LONG = _Kind("Cijk_Alik_Bljk_BBS_BH_MT256x128x64", 121, 108, 17, registers=256)
_SMALL = _Kind("Cijk_Ailk_Bjlk_BBS_BH_MT128x128x64", 61, 38, 34, registers=192)
_POINTWISE = _Kind("vectorized_elementwise_kernel", 47, 134, 67)
_STRIDED = _Kind("elementwise_kernel_manual_unroll", 31, 34, 17)
_CONCATENATE = _Kind("CatArrayBatchedCopy", 25, 17, 17)
_NORM = _Kind("vectorized_layer_norm_kernel", 19, 17, 17)
_NORM_BACKWARD = _Kind("cuComputeGradInput", 28, 50, 17)
_ATTENTION = _Kind("attn_fwd", 78, 21, 17, registers=128)
_ATTENTION_DKDV = _Kind("bwd_kernel_dk_dv", 214, 48, 9, registers=256, scratch=144)
_ATTENTION_DQ = _Kind("bwd_kernel_dq", 117, 42, 17, registers=256)
_LOSS = _Kind("cunn_SoftMaxForward", 14, 16, 16)
_LOSS_BACKWARD = _Kind("cunn_SoftMaxBackward", 16, 32, 16)
_ADAMW = _Kind("multi_tensor_apply_kernel", 66, 145, 108)

_STEP: tuple[tuple[str, tuple[_Kind, ...]], ...] = (
    (
        "forward",
        (
            *(_NORM, _SMALL, _STRIDED, _STRIDED, _CONCATENATE, _ATTENTION, _SMALL, _STRIDED),
            *(_NORM, _WIDE, _POINTWISE, _POINTWISE, _LONG, _STRIDED, _SMALL, _LOSS),
        ),
    ),
    (
        "backward",
        (
            *(_LOSS_BACKWARD, _SMALL, _SMALL, _LONG, _LONG, _POINTWISE, _POINTWISE, _POINTWISE),
            *(_CONCATENATE, _WIDE, _WIDE, _NORM_BACKWARD, _SMALL, _SMALL),
            *(_ATTENTION_DKDV, _ATTENTION_DQ, _STRIDED, _STRIDED, _CONCATENATE, _CONCATENATE),
            *(_SMALL, _SMALL, _NORM_BACKWARD, _STRIDED),
        ),
    ),
    ("optimizer", (_ADAMW, _ADAMW)),
)

_NAMES = sorted({kind.name for _, kinds in _STEP for kind in kinds})
_SIZES = "Workgroup_Size_X Workgroup_Size_Y Workgroup_Size_Z Grid_Size_X Grid_Size_Y Grid_Size_Z"
_MEMORY = "LDS_Block_Size Scratch_Size VGPR_Count Accum_VGPR_Count SGPR_Count"
_TIMES = "Start_Timestamp End_Timestamp"
_API = f"Domain Function Process_Id Thread_Id Correlation_Id {_TIMES}"
_COLUMNS = {
    "agent_info": "Node_Id Logical_Node_Id Agent_Type Cu_Count Name Vendor_Name Product_Name "
    "Model_Name",
    "kernel_trace": "Kind Agent_Id Queue_Id Stream_Id Thread_Id Dispatch_Id Kernel_Id Kernel_Name "
    f"Correlation_Id {_TIMES} {_MEMORY} {_SIZES}",
    "kernel_stats": "Name Calls TotalDurationNs AverageNs Percentage MinNs MaxNs StdDev",
    "hip_api_trace": _API,
    "marker_api_trace": _API,
    "counter_collection": "Correlation_Id Dispatch_Id Agent_Id Queue_Id Process_Id Thread_Id "
    f"Grid_Size Kernel_Id Kernel_Name Workgroup_Size {_MEMORY} Counter_Name Counter_Value {_TIMES}",
}
"""Columns of the real tool's tables; agent_info has more."""


@dataclass(frozen=True)
class _Dispatch:
    number: int
    kind: _Kind
    launched: int
    start: int
    end: int


def tables() -> dict[str, str]:
    """The text of each file, by its path below FOLDER."""
    dispatches, ranges = _run(slowdown=1.0)
    counted, _ = _run(slowdown=_UNDER_COUNTERS)
    contents: dict[str, Iterable[Iterable[object]]] = {
        "hotspots/agent_info": [(4, 4, "GPU", 304, "gfx942", "AMD", DEVICE, "")],
        "hotspots/kernel_trace": map(_traced, dispatches),
        "hotspots/kernel_stats": _sums(dispatches),
        "hotspots/hip_api_trace": (
            _api("HIP_RUNTIME_API", "hipLaunchKernel", d.number, d.launched, d.launched + 5_000)
            for d in dispatches
        ),
        "hotspots/marker_api_trace": (
            _api("MARKER_CORE_RANGE_API", name, 0, start, end) for name, start, end in ranges
        ),
        "counters/read/counter_collection": (
            _count(d, "FETCH_SIZE", d.kind.read_mb) for d in counted
        ),
        "counters/written/counter_collection": (
            _count(d, "WRITE_SIZE", d.kind.written_mb) for d in counted
        ),
    }
    return {
        f"{path.parent}/run_{PROCESS}_{path.name}.csv": _text(path.name, rows)
        for path, rows in ((Path(name), rows) for name, rows in contents.items())
    }


def main() -> int:
    parse(argparse.ArgumentParser(description=__doc__.split("\n\n")[0]))
    return errors.exit_status(_write, interrupted="interrupted: what is written is whole")


def _write() -> int:
    for path, text in tables().items():
        target = FOLDER / path
        results.prepare_folder(target.parent)
        results.write_text(target, text)
    return errors.DONE


def _run(slowdown: float) -> tuple[list[_Dispatch], list[tuple[str, int, int]]]:
    """All dispatches, and the marker ranges (name, start, end): warm-up has none."""
    dispatches: list[_Dispatch] = []
    ranges = []
    host, gpu = _T0, 0
    for step in range(WARMUP_STEPS + MARKED_STEPS):
        begin = host
        for phase, kinds in _STEP:
            phase_begin = host
            for kind in kinds:
                host += _LAUNCH_NS
                number = len(dispatches) + 1
                start = max(gpu, host + _LATENCY_NS)
                gpu = start + round(kind.us * 1e3 * slowdown * _variation(number))
                dispatches.append(_Dispatch(number, kind, host, start, gpu))
            host += _LAUNCH_NS
            if step >= WARMUP_STEPS:
                ranges.append((phase, phase_begin, host))
        host = max(host, gpu) + 900_000  # the loss is read, the next batch is made
        if step >= WARMUP_STEPS:
            ranges.append(("step", begin, host))
    return dispatches, ranges


def _variation(number: int) -> float:
    """From 0.97 to 1.03: no two calls take equally long."""
    return 0.97 + 0.06 * (number * 37 % 101) / 100


def _traced(d: _Dispatch) -> tuple[object, ...]:
    return (
        *("KERNEL_DISPATCH", "Agent 4", 1, 1, PROCESS, d.number, *_named(d), d.number),
        *(d.start, d.end, *_memory(d), 256, 1, 1, 262144, 1, 1),
    )


def _count(d: _Dispatch, counter: str, megabytes: float) -> tuple[object, ...]:
    kib = round(megabytes * 1e6 / 1024, 3)  # the counter's unit
    return (
        *(d.number, d.number, "Agent 4", 1, PROCESS, PROCESS, 262144, *_named(d), 256),
        *(*_memory(d), counter, kib, d.start, d.end),
    )


def _named(d: _Dispatch) -> tuple[int, str]:
    return 10 + _NAMES.index(d.kind.name), d.kind.name


def _memory(d: _Dispatch) -> tuple[int, ...]:
    return 0, d.kind.scratch, d.kind.registers, 0, 96


def _api(domain: str, function: str, correlation: int, start: int, end: int) -> tuple[object, ...]:
    return domain, function, PROCESS, PROCESS, correlation, start, end


def _sums(dispatches: Iterable[_Dispatch]) -> Iterator[tuple[object, ...]]:
    """Longest total first, of the whole run, as the tool has it."""
    by_name: dict[str, list[int]] = {}
    for d in dispatches:
        by_name.setdefault(d.kind.name, []).append(d.end - d.start)
    total = sum(map(sum, by_name.values()))
    for name, ns in sorted(by_name.items(), key=lambda item: -sum(item[1])):
        mean, deviation = round(statistics.fmean(ns), 6), round(statistics.stdev(ns), 6)
        share = round(100 * sum(ns) / total, 2)
        yield name, len(ns), sum(ns), mean, share, min(ns), max(ns), deviation


def _text(table: str, rows: Iterable[Iterable[object]]) -> str:
    """A CSV file in the tool's style: texts in quotation marks, numbers without."""
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
    writer.writerows([_COLUMNS[table].split(), *rows])
    return text.getvalue()


if __name__ == "__main__":
    sys.exit(main())

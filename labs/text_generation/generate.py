"""A generation from the command line: its batches, what it writes and prints, its result file."""

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labs.text_generation import models, prompts, proof, request
from labs.text_generation.engines import Answer, Engine, OnTokens
from labs.text_generation.models import Loaded
from labs.text_generation.prompts import Batch
from workshop import errors, labs, records, results
from workshop.errors import OutOfMemory
from workshop.judge import lab_record
from workshop.judge.turn import Turn
from workshop.labs import LabRun
from workshop.run import hardware, memory, startup, trainer
from workshop.run.precision import Precision, get_precision, set_arithmetic
from workshop.run.timing import median

BETWEEN = "\n" + 40 * "-" + "\n"
"""Two texts of the output file."""


@dataclass
class Run:
    """A generation that is ready to start."""

    arguments: argparse.Namespace
    precision: Precision
    loaded: Loaded
    engine: Engine
    texts: list[str]
    batches: list[Batch]
    record: LabRun
    turn: Turn
    done: list[dict[str, Any]] = field(default_factory=list)
    """A line of the JSON file for each prompt."""
    answers: list[Answer] = field(default_factory=list)
    """The answers of the batches that are done."""


def run(arguments: argparse.Namespace) -> int:
    """Generates; the exit status."""
    request.check(arguments)
    rank = int(os.environ.get("LOCAL_RANK", 0))
    if rank and arguments.device in ("auto", "cuda") and torch.cuda.is_available():
        arguments.device = f"cuda:{rank}"
    device = hardware.get_device(arguments.device)
    precision = get_precision(arguments.dtype, device)
    if arguments.device_map:
        models.check_map(arguments.device_map)
    if arguments.output_file:
        results.prepare_file(arguments.output_file, "--output_file")
    results.prepare_folder(arguments.output_dir)
    texts = prompts.read(arguments.input_file)
    models.check_folder(arguments.model_path)
    models.prepare_packages(arguments)
    set_arithmetic(precision.name)
    with contextlib.ExitStack() as stack:
        if rank:  # the others compute, and the first one prints and writes
            nowhere = stack.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            arguments.output_file = None
            arguments.output_dir, arguments.candidate = None, False
        stack.callback(lambda: dist.is_initialized() and dist.destroy_process_group())
        stack.enter_context(trainer.memory_failure_as(_too_large))
        return generate(prepare(arguments, texts, device, precision, stack))


def _too_large(asked: str) -> OutOfMemory:
    return OutOfMemory(
        f"out of memory: {asked}; take a smaller --batch_size, fewer --num_tokens, or spread the "
        "model with --device_map auto"
    )


def prepare(
    arguments: argparse.Namespace,
    texts: list[str],
    device: torch.device,
    precision: Precision,
    cleanup: contextlib.ExitStack,
) -> Run:
    """Loads the model and encodes the prompts; raises WorkshopError."""
    loaded = models.load(arguments, device, precision, cleanup)
    rows = prompts.encode(texts, loaded, arguments.num_tokens)
    with models.watched(device) as took:
        longest = max(map(len, rows)) + arguments.num_tokens
        engine, name = models.make_engine(arguments, loaded, longest)
    if _has_its_own(arguments):
        loaded.load = took
    batches = list(prompts.batches(rows, arguments.batch_size, loaded.pad))
    size = len(batches[0].rows)
    words = [precision.name, *["int8 weights"] * arguments.load_in_8bit, name]
    words += [f"on {loaded.spread}"] * bool(loaded.spread)
    processes = request.processes()
    words += [f"{processes} processes"] * (processes > 1)
    tokens = batches[0].ids.shape[1]
    record = lab_record.begin(
        device,
        precision.name,
        "",
        request.HIDDEN,
        lab=request.LAB,
        subject=f"{loaded.name}, batch {size}, {tokens} + {arguments.num_tokens} tokens",
        variant=", ".join(words),
        unit="tokens",
        units_per_step=size,
        options={
            name: getattr(arguments, name)
            for name in ("engine", "temperature", "seed", "load_in_8bit", "device_map")
        }
        | {"precision": precision.name},
        metrics={"processes": processes},
    )
    record.command = [word for word in record.command if word not in arguments.words[:3]]
    record.parent_command = record.command
    for package in ("transformers", "deepspeed", "vllm"):
        if module := sys.modules.get(package):
            record.software[package] = module.__version__
    check = proof.Check(
        loaded, precision, batches, arguments.num_tokens, greedy=not arguments.temperature,
        plain_loop=arguments.engine == "hf" and not _has_its_own(arguments),
    )  # fmt: skip
    turn = Turn(arguments.candidate, check if arguments.output_dir else None)
    return Run(arguments, precision, loaded, engine, texts, batches, record, turn)


def _has_its_own(arguments: argparse.Namespace) -> bool:
    """Whether the engine loads the model once more: Hugging Face's stays for the proof."""
    return arguments.engine in ("fast", "deepspeed", "vllm") or arguments.tensor_parallel


# --- batches -------------------------------------------------------------------------------------


def generate(ready: Run) -> int:
    """Generates all batches, writes and prints; the exit status."""
    arguments, loaded, record = ready.arguments, ready.loaded, ready.record
    _warm_up(ready)
    ready.turn.wait()
    if loaded.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(loaded.device)
    try:
        for batch in _shown(ready):
            with _streamer(ready, batch) as on_tokens:
                _give(batch, ready.turn.begin().tensors, loaded.device)
                answer = ready.engine.generate(
                    batch.ids,
                    batch.mask,
                    arguments.num_tokens,
                    arguments.temperature,
                    arguments.seed + batch.first,
                    on_tokens,
                )
                times = [s * 1e3 for s in (answer.first_s, *answer.step_s)]
                ready.turn.end(times, {"tokens": answer.tokens})
            ready.answers.append(answer)
            if not ready.turn.judged:  # whose prompts are no texts
                _take(ready, batch, answer)
    except KeyboardInterrupt:
        record.status = "interrupted"
    if not ready.answers:
        raise KeyboardInterrupt
    peak = torch.cuda.max_memory_allocated(loaded.device) if loaded.device.type == "cuda" else 0
    if record.status != "interrupted":
        again = _greedy(ready) if arguments.temperature else {}
        ready.turn.answer(lambda batch: ({"tokens": again[batch]}, {}), record)
    _measure(ready, peak)
    return _finish(ready)


def _give(batch: Batch, given: Mapping[str, Tensor], device: torch.device) -> None:
    """Writes the prompts that the first process was given over the batch's own, in all processes
    that share the model. The memory stays the same: an engine that knows prompts by it is wrong."""
    for name, own in (("ids", batch.ids), ("mask", batch.mask)):
        there = given.get(name, own)
        if request.processes() > 1:
            there = there.to(device)
            dist.broadcast(there, 0)
        own.copy_(there)


def _shown(ready: Run) -> Iterable[Batch]:
    """The batches, with a progress bar where stderr is a terminal and texts go to a file."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    quiet = not (ready.arguments.output_file and console.is_terminal)
    return track(ready.batches, "batches", console=console, disable=quiet)


def _warm_up(ready: Run) -> None:
    """Prompts as long as the first batch's: of Hugging Face's loop two tokens, of what is compiled
    or captured all. They begin as the first batch's, lie in its memory, and go on otherwise: what
    an engine remembers of them is no answer to those that are timed."""
    arguments, batch = ready.arguments, ready.batches[0]
    startup.watch_compilers(torch_compile=ready.engine.compiled)
    start = time.perf_counter()
    count = 2 if arguments.engine == "hf" else arguments.num_tokens
    timed = batch.ids.clone()
    for row, real in zip(batch.ids, batch.mask.bool(), strict=True):
        row[real] = torch.cat([row[real][:1], row[real][1:].roll(1)])
    with models.deepspeeds_errors(arguments):
        _give(batch, {}, ready.loaded.device)
        ready.engine.generate(batch.ids, batch.mask, count)
    batch.ids.copy_(timed)
    ready.record.setup_s = {
        "load": ready.loaded.load.seconds,
        "compile": startup.compile_seconds(),
        "warm_up": time.perf_counter() - start,
    }


def _greedy(ready: Run) -> dict[int, Tensor]:
    """Tokens (B, n) of the first batch and the last, chosen greedily, where the timed ones were
    drawn. All processes that share the model take part."""
    found, batches = dict[int, Tensor](), ready.batches
    for i in sorted({0, len(batches) - 1}):
        answer = ready.engine.generate(batches[i].ids, batches[i].mask, ready.arguments.num_tokens)
        found[i] = answer.tokens
    return found


def _tokens(ready: Run, answer: Answer) -> list[list[int]]:
    return [proof.until_end(row, ready.loaded.ends) for row in answer.tokens.tolist()]


@contextlib.contextmanager
def _streamer(ready: Run, batch: Batch) -> Iterator[OnTokens | None]:
    if not ready.arguments.stream:
        yield None
        return
    from transformers import TextStreamer

    streamer = TextStreamer(ready.loaded.tokenizer, skip_special_tokens=True)
    streamer.put(batch.ids[0])
    yield lambda tokens: streamer.put(tokens.cpu())
    streamer.end()


def _take(ready: Run, batch: Batch, answer: Answer) -> None:
    """Decodes a batch and writes all that are done: what is interrupted later stays."""
    tokens, decode = _tokens(ready, answer), ready.loaded.tokenizer.decode
    ms = {"first_token_ms": answer.first_s * 1e3}
    if answer.step_s:
        ms["token_ms"] = median(answer.step_s) * 1e3
    for i, (row, new) in enumerate(zip(batch.rows, tokens, strict=True)):
        # Alone the first new token might lose the space before it.
        text = decode([*row, *new], skip_special_tokens=True)
        begin = decode(list(row), skip_special_tokens=True)
        ready.done.append(
            {
                "prompt": ready.texts[batch.first + i],
                "continuation": text.removeprefix(begin),
                "text": text,
                "prompt_tokens": len(row),
                "new_tokens": len(new),
                "ended": new[-1] in ready.loaded.ends,
                **ms,
            }
        )
        if not (ready.arguments.output_file or ready.arguments.stream):
            print(text, end=BETWEEN, flush=True)
    if path := ready.arguments.output_file:
        lines = [json.dumps(line, ensure_ascii=False) + "\n" for line in ready.done]
        texts = BETWEEN.join(line["text"] for line in ready.done) + "\n"
        results.write_together({path: texts, _beside(path): "".join(lines)})


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".jsonl")


# --- what it cost --------------------------------------------------------------------------------


def _measure(ready: Run, peak: int) -> None:
    """Fills in the record. Of the batches those of full size count."""
    record, loaded = ready.record, ready.loaded
    batches = [one for one in ready.batches if len(one.rows) == record.units_per_step]
    pairs = list(zip(ready.answers, batches, strict=False))
    record.step_ms = [s * 1e3 for answer, _ in pairs for s in answer.step_s]
    seconds = [answer.first_s + sum(answer.step_s) for answer, _ in pairs]
    count = sum(len(row) for answer, _ in pairs for row in _tokens(ready, answer))
    prefills = [(models.prefill_flops(loaded.model, list(map(len, batch.rows))), answer.first_s)
                for answer, batch in pairs]  # fmt: skip
    record.metrics |= {
        "first_token_ms": median([answer.first_s * 1e3 for answer, _ in pairs]),
        "prefill_flops": prefills[0][0],
        "prefill_tflops": median([flops / first_s / 1e12 for flops, first_s in prefills]),
        "written_tokens_per_s": count / sum(seconds),
        "load_s": loaded.load.seconds,
        "load_peak_mb": loaded.load.peak_mb,
    }
    record.memory_mb = {"weights": loaded.weights_bytes() / memory.MB}
    if peak:
        if _has_its_own(ready.arguments):
            peak -= loaded.weights_bytes()
        record.memory_mb |= {"peak": peak / memory.MB, "source": "allocator"}
    own_count = getattr(ready.engine, "bytes_per_token", None)
    read = own_count() if own_count else models.bytes_read(loaded.model)
    weights = sum(parameter.numel() for parameter in loaded.model.parameters())
    record.flops_per_step = 2.0 * weights * record.units_per_step
    if record.status == "interrupted":
        return
    each = record.units_per_step * models.cache_bytes(loaded)
    lengths = [(batch.ids.shape[1], 1 + len(answer.step_s)) for answer, batch in pairs]
    record.memory_mb["kv_cache"] = each * max(map(sum, lengths)) / memory.MB
    cache = each * sum(prompt + new / 2 for prompt, new in lengths) / len(lengths)
    record.metrics |= {"weights_read_mb": read / 1e6, "kv_cache_read_mb": cache / 1e6}
    if loaded.spread:
        return
    sheet = hardware.peaks(loaded.device)
    copied = ready.arguments.copy_gbs or hardware.measure_copy_gbs(loaded.device)
    bandwidth = (sheet.bandwidth_gbs if sheet else copied) * record.processes
    record.metrics |= {
        "copy_gbs": copied,
        "bandwidth_gbs": bandwidth,
        "bandwidth_source": sheet.source if sheet else "a large copy on this machine",
        "floor_ms": (read + cache) / bandwidth / 1e6,
    }
    record.plausibility = _implausible(record) if sheet else []


def _implausible(record: LabRun) -> list[str]:
    ms, floor = median(record.step_ms or [1e9]), float(record.metrics["floor_ms"] or 0)
    rate, most = float(record.metrics["prefill_tflops"] or 0), record.peak_tflops or 1e9
    found = []
    if ms < floor:
        found.append(f"{ms:.3f} ms a token; to read what it needs takes {floor:.3f} ms")
    if rate > most * record.processes:
        found.append(f"{rate:,.0f} TFLOP/s in the prompts' pass, of {most:,.0f} there are")
    return [f"IMPLAUSIBLE: {line}" for line in found]


def _finish(ready: Run) -> int:
    """Prints what was measured and writes the result; the exit status."""
    arguments, record = ready.arguments, ready.record
    if record.gate.status == "fail":
        record.status = "gate failed"
    path = None
    ready.turn.tell(record)
    if record.step_ms and arguments.output_dir and not ready.turn.judged:
        path = records.add(record, arguments.output_dir)
    print("\n".join(summary(ready)))
    written = [str(file) for file in (arguments.output_file, path) if file]
    if arguments.output_file:
        written.insert(1, str(_beside(arguments.output_file)))
    if written:
        print(f"Written: {', '.join(written)}")
    if record.status == "interrupted":
        where = f", in {arguments.output_file}" if arguments.output_file else ""
        print(
            f"interrupted: {len(ready.done)} of {len(ready.texts)} texts are done{where}",
            file=sys.stderr,
        )
        return errors.INTERRUPTED
    return errors.ANSWER_IS_NO if record.gate.status == "fail" else errors.DONE


def summary(ready: Run) -> list[str]:
    """The lines at the end; without a passed gate there is no speed among them."""
    record = ready.record
    m = {key: value for key, value in record.metrics.items() if isinstance(value, (int, float))}
    where = "the device" if ready.loaded.device.type == "cuda" else "the process"
    lines = [
        f"{record.subject}: {record.variant}, on {record.device['name']}",
        f"loaded in {m['load_s']:.2f} s, at its peak {m['load_peak_mb']:,.0f} MB more of "
        f"{where}'s memory; weights {record.memory_mb['weights']:,.1f} MB",
    ]
    if "kv_cache" in record.memory_mb:
        lines.append(f"KV cache: {float(record.memory_mb['kv_cache']):,.3f} MB at the end")
    if record.gate.status == "fail":
        return [*lines, f"FAIL, so no speed: {'; '.join(record.gate.failures)}"]
    if record.gate.status != "pass":
        return [*lines, "not proven, so no speed: it was interrupted"]
    compared = record.gate.batch_size or 0
    lines += [
        f"pass: {compared} prompt{'s' * (compared > 1)} against {record.gate.reference}",
        f"first token after {m['first_token_ms']:.2f} ms, the prompts' pass: "
        f"{m['prefill_tflops']:,.3g} TFLOP/s",
    ]
    if record.step_ms:
        ms, ordered = median(record.step_ms), sorted(record.step_ms)
        lines += [
            f"a token after it: {ms:.3f} ms (median of {len(ordered)}), "
            f"{labs.percentile(ordered, 0.99):.3f} ms (p99)",
            f"{record.units_per_step / ms * 1e3:,.1f} tokens/s of the batch while none has ended; "
            f"{m['written_tokens_per_s']:,.1f} written, with the time of the prompts",
            f"bytes read for a token: {m['weights_read_mb']:,.2f} MB of weights, "
            f"{m['kv_cache_read_mb']:,.3f} MB of KV cache",
        ]
        if "floor_ms" in m:
            floor, rate = m["floor_ms"], (m["weights_read_mb"] + m["kv_cache_read_mb"]) / ms
            lines.append(
                f"at {m['bandwidth_gbs']:,.1f} GB/s ({record.metrics['bandwidth_source']}) they "
                f"take {floor:.3f} ms: this is {ms / floor:.1f} times that, {rate:,.1f} GB/s"
            )
    return [*lines, *record.plausibility]

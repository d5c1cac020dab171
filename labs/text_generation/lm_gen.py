"""Continues prompts with a causal language model, and says what a token costs.

prompts.py reads and pads, models.py loads and counts bytes, engines.py has the loops, gate.py shows
that the tokens are the model's.
"""

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout needs no installation

if __name__ == "__main__":
    from workshop.needed import import_torch

    import_torch()

import torch
import torch.distributed as dist
from torch import Tensor

from labs import shared
from labs.text_generation import engines, gate, models, prompts
from labs.text_generation.engines import Answer, Engine, OnTokens, processes
from labs.text_generation.models import Loaded
from labs.text_generation.prompts import Batch
from workshop import errors, labs, records, results, tables
from workshop.arguments import MOST, count, parse
from workshop.errors import OutOfMemory
from workshop.judge import lab_record
from workshop.judge.turn import Turn
from workshop.labs import LabRun
from workshop.run import hardware, memory, startup, trainer
from workshop.run.precision import PRECISIONS, Precision, get_precision, set_arithmetic
from workshop.run.timing import median

LAB = "text_generation"
DTYPES = ("auto", *(name for name in PRECISIONS if name != "tf32"))
WORDS = ("model_path", "input_file", "output_file", "num_tokens", "temperature")
DESCRIPTION = """\
Continues prompts with a causal language model from a folder on this machine, and says what a token
costs: its time, and the bytes that are read for it.

    python lm_gen.py --model_path MODEL --input_file prompts.txt
    python lm_gen.py --model_path MODEL --batch_size 2 --num_tokens 1000 --input_file prompts.txt \\
        --temperature 0.95 --output_file out
    lm_gen MODEL INPUT OUTPUT NUM_TOKENS TEMPERATURE
"""
HIDDEN = ("--model_path", "--input_file", "--output_file", "--output-dir", "--copy-gbs")
"""Flags that are left out of a record's command: their values are of this machine."""
TOO_LARGE = """out of memory: {}; take a smaller --batch_size, fewer --num_tokens, or spread the \
model with --device_map auto"""
BETWEEN = "\n" + 40 * "-" + "\n"
"""Separates two texts of the output file."""


# --- the command line ----------------------------------------------------------------------------


def build_parser(engine: str = "hf") -> argparse.ArgumentParser:
    parser = shared.new_parser(DESCRIPTION, "the gate failed or memory ran out")
    parser.usage = "%(prog)s [MODEL INPUT OUTPUT NUM_TOKENS TEMPERATURE] [flags]"
    add = parser.add_argument
    path, number = partial(add, type=Path, metavar="PATH"), partial(add, type=count, metavar="N")
    add("words", nargs="*", help=argparse.SUPPRESS)
    path("--model_path", help="folder of the model and its tokenizer")
    path("--input_file", help="a file with a prompt a line; or a folder with a prompt a file")
    path("--output_file", help="for the texts; PATH.jsonl has their times, too (default: printed)")
    number("--num_tokens", default=50, help="new ones, at most (default 50)")
    add("--temperature", type=float, default=0.0, metavar="X",
        help="0 takes the most likely token, 1 draws as the model says (default 0)")  # fmt: skip
    number(
        "--batch_size", default=1, help="prompts at a time, or texts of a single one (default 1)"
    )
    add("--seed", type=int, default=42, help="of drawn tokens: of the first prompt (default 42)")
    add("--stream", action="store_true", help="print tokens as they come; one prompt at a time")
    add = parser.add_argument_group("how it runs").add_argument
    switch = partial(add, action="store_true")
    add("--engine", choices=engines.ENGINES, default=engine, help=f"default {engine}")
    add("--dtype", choices=DTYPES, default="auto", help="bf16 on a GPU that has it, else fp32")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default auto: GPU if any)")
    add("--device_map", metavar="MAP", help="accelerate spreads the model over GPUs, CPU and disk: "
        f"{', '.join(models.POLICIES)}, or a JSON file")  # fmt: skip
    switch("--load_in_8bit", help="weights in int8, by bitsandbytes or --engine fast")
    add("--compile", action=argparse.BooleanOptionalAction,
        help="the steps of --engine static (default: on a GPU with a compiler)")  # fmt: skip
    switch("--kernel_inject", help="of --engine deepspeed: its own kernels")
    switch("--tensor_parallel", help="under torchrun: each process has a part of every layer")
    shared.add_output_dir(add, LAB)
    # The runs of a study have one floor: a busy minute would give one of them another.
    add("--copy-gbs", type=float, help=argparse.SUPPRESS)
    add("--candidate", action="store_true", help=argparse.SUPPRESS)  # of measure_engines.py
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher's
    return parser


def parse_words(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """The flags; WORDS may be given by their places alone."""
    arguments = parse(parser, argv)
    words = arguments.words
    if words and len(words) != len(WORDS):
        parser.error(f"give MODEL INPUT OUTPUT NUM_TOKENS TEMPERATURE: {' '.join(words)!r:.80}")
    flags = [f"--{name}={word}" for name, word in zip(WORDS, words, strict=False)]
    arguments = parser.parse_args(flags, arguments)
    for name in WORDS[:2]:
        if getattr(arguments, name) is None:
            parser.error(f"--{name} is missing")
    return arguments


def check(arguments: argparse.Namespace) -> None:
    """Raises WorkshopError for numbers out of bounds and flags that do not go together."""
    a, several = arguments, processes() > 1
    hugging_face = a.engine in ("hf", "static")
    refused = {
        f"--temperature {a.temperature}: it must lie between 0 and 100":
            not 0 <= a.temperature <= 100,
        f"--seed {a.seed}: it must lie between 0 and {MOST:,}": not 0 <= a.seed <= MOST,
        f"--output_file {a.output_file} has the prompts: name another file":
            a.output_file and a.output_file.resolve() == a.input_file.resolve(),
        "--stream prints one text at a time: leave out --batch_size":
            a.stream and a.batch_size > 1,
        f"--engine {a.engine} has no --device_map: leave it out":
            a.device_map and not hugging_face,
        f"--engine {a.engine} has no --load_in_8bit: leave it out":
            a.load_in_8bit and a.engine in ("deepspeed", "vllm"),
        "--compile is of --engine static": a.compile is not None and a.engine != "static",
        "--kernel_inject is of --engine deepspeed": a.kernel_inject and a.engine != "deepspeed",
        "--tensor_parallel takes several processes: torchrun --nproc-per-node 2 lm_gen.py ...":
            a.tensor_parallel and not several,
        "--tensor_parallel goes with --engine hf or static, without --device_map and "
        "--load_in_8bit":
            a.tensor_parallel and (not hugging_face or a.device_map or a.load_in_8bit),
        f"{processes()} processes would all do the same: add --tensor_parallel, or take --engine "
        "deepspeed":
            several and not a.tensor_parallel and a.engine != "deepspeed",
    }  # fmt: skip
    shared.refuse(refused)


def main(argv: list[str] | None = None, engine: str = "hf") -> int:
    """Generates from the command line; returns the exit status.

    Args:
        engine: the default one.
    """
    arguments = parse_words(build_parser(engine), argv)
    return errors.exit_status(
        lambda: run(arguments), interrupted="interrupted: the texts of finished batches are written"
    )


# --- a generation --------------------------------------------------------------------------------


@dataclass
class Job:
    """A generation that is ready to start."""

    arguments: argparse.Namespace
    loaded: Loaded
    engine: Engine
    texts: list[str]
    batches: list[Batch]
    turn: Turn
    record: LabRun
    answers: list[Answer] = field(default_factory=list)
    """The answers of the batches that are done."""
    lines: list[dict[str, Any]] = field(default_factory=list)
    """A line of the JSON file for each of their prompts."""


def run(arguments: argparse.Namespace) -> int:
    """Generates; the exit status."""
    check(arguments)
    rank = int(os.environ.get("LOCAL_RANK", 0))
    if rank and arguments.device in ("auto", "cuda") and torch.cuda.is_available():
        arguments.device = f"cuda:{rank}"
    device = hardware.get_device(arguments.device)
    precision = get_precision(arguments.dtype, device)
    if arguments.output_file:
        results.prepare_file(arguments.output_file, "--output_file")
    results.prepare_folder(arguments.output_dir)
    texts = prompts.read(arguments.input_file)
    if len(texts) == 1:  # each has its own seed
        texts *= arguments.batch_size
    set_arithmetic(precision.name)
    with contextlib.ExitStack() as stack:
        if rank:  # the others compute, and the first one prints and writes
            nowhere = stack.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            arguments.output_file = arguments.output_dir = None
            arguments.candidate = False
        stack.callback(lambda: dist.is_initialized() and dist.destroy_process_group())
        stack.enter_context(trainer.memory_failure_as(lambda a: OutOfMemory(TOO_LARGE.format(a))))
        loaded = models.load(arguments, device, precision, stack)
        with engines.deepspeeds_errors(arguments.engine):
            job = prepare(arguments, loaded, texts, precision)
            _warm_up(job)
        generate(job)
        return _finish(job)


def prepare(
    arguments: argparse.Namespace, loaded: Loaded, texts: list[str], precision: Precision
) -> Job:
    """Encodes the prompts and makes the engine, the record and the gate."""
    rows = prompts.encode(texts, loaded, arguments.num_tokens)
    batches = list(prompts.batches(rows, arguments.batch_size, loaded.pad))
    with models.watched(loaded.device) as cost:
        engine = engines.make(arguments, loaded, max(map(len, rows)) + arguments.num_tokens)
    own = engines.has_its_own_model(arguments)
    record = _new_record(arguments, loaded, precision, batches[0], engine)
    record.metrics |= cost if own else loaded.cost
    own_gate = gate.Check(
        loaded, precision, batches, arguments.num_tokens, greedy=not arguments.temperature,
        plain_loop=arguments.engine == "hf" and not own,
    )  # fmt: skip
    turn = Turn(arguments.candidate, own_gate if arguments.output_dir else None)
    return Job(arguments, loaded, engine, texts, batches, turn, record)


def _new_record(
    arguments: argparse.Namespace,
    loaded: Loaded,
    precision: Precision,
    batch: Batch,
    engine: Engine,
) -> LabRun:
    size, tokens = batch.ids.shape
    words = {
        precision.name: True,
        "int8 weights": arguments.load_in_8bit,
        arguments.engine: True,
        "compiled": engine.compiled,
        "tensor parallel": arguments.tensor_parallel,
        "kernel injection": arguments.kernel_inject,
        f"on {loaded.spread}": loaded.spread,
        f"{processes()} processes": processes() > 1,
    }
    kept = ("engine", "temperature", "seed", "load_in_8bit", "device_map")
    record = lab_record.begin(
        loaded.device,
        precision.name,
        "",
        HIDDEN,
        lab=LAB,
        subject=f"{loaded.name}, batch {size}, {tokens} + {arguments.num_tokens} tokens",
        variant=", ".join(word for word, holds in words.items() if holds),
        unit="tokens",
        units_per_step=size,
        options={name: getattr(arguments, name) for name in kept} | {"precision": precision.name},
        metrics={"processes": processes()},
    )
    record.command = [word for word in record.command if word not in arguments.words[:3]]
    record.parent_command = record.command
    for package in ("transformers", "deepspeed", "vllm"):
        if module := sys.modules.get(package):
            record.software[package] = module.__version__
    return record


def _warm_up(job: Job) -> None:
    """Prompts as long as the first batch's: of Hugging Face's loop two tokens, of what is compiled
    or captured all. They begin as the first batch's, are in its memory, and go on otherwise: what
    an engine remembers of them is no answer to those that are timed."""
    batch = job.batches[0]
    startup.watch_compilers(torch_compile=job.engine.compiled)
    start = time.perf_counter()
    new = 2 if job.arguments.engine == "hf" else job.arguments.num_tokens
    timed = batch.ids.clone()
    for row, real in zip(batch.ids, batch.mask.bool(), strict=True):
        row[real] = torch.cat([row[real][:1], row[real][1:].roll(1)])
    job.engine.generate(batch.ids, batch.mask, new, job.arguments.temperature)
    batch.ids.copy_(timed)
    job.record.setup_s |= {
        "compile": startup.compile_seconds(),
        "warm_up": time.perf_counter() - start,
    }


def generate(job: Job) -> None:
    """Generates all batches, and fills in the record."""
    arguments, turn, device = job.arguments, job.turn, job.loaded.device
    turn.wait()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for batch in tables.tracked(job.batches, "batches", quiet=not arguments.output_file):
        with _streamer(job, batch) as on_tokens:
            _receive(batch, turn.begin().tensors, device)
            answer = job.engine.generate(
                batch.ids,
                batch.mask,
                arguments.num_tokens,
                arguments.temperature,
                arguments.seed + batch.first,
                on_tokens,
            )
            times = [s * 1e3 for s in (answer.first_s, *answer.step_s)]
            turn.end(times, {"tokens": answer.tokens})
        job.answers.append(answer)
        if not turn.judged:  # a study's prompts are no texts
            _write(job, batch, answer)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    greedy = {}
    if arguments.temperature:  # in all processes that share the model
        for i in sorted({0, len(job.batches) - 1}):
            batch = job.batches[i]
            greedy[i] = job.engine.generate(batch.ids, batch.mask, arguments.num_tokens).tokens
    turn.answer(lambda batch: ({"tokens": greedy[batch]}, {}), job.record)
    _measure(job, peak)


def _receive(batch: Batch, given: Mapping[str, Tensor], device: torch.device) -> None:
    """Writes the prompts that the first process was given over the batch's own, in all processes
    that share the model. The memory stays the same: an engine that knows prompts by it is wrong."""
    for name, own in (("ids", batch.ids), ("mask", batch.mask)):
        there = given.get(name, own)
        if processes() > 1:
            there = there.to(device)
            dist.broadcast(there, 0)
        own.copy_(there)


@contextlib.contextmanager
def _streamer(job: Job, batch: Batch) -> Iterator[OnTokens | None]:
    if not job.arguments.stream:
        yield None
        return
    from transformers import TextStreamer

    streamer = TextStreamer(job.loaded.tokenizer, skip_special_tokens=True)
    streamer.put(batch.ids[0])
    yield lambda tokens: streamer.put(tokens.cpu())
    streamer.end()


def _new_tokens(job: Job, answer: Answer) -> list[list[int]]:
    return [gate.until_end(row, job.loaded.ends) for row in answer.tokens.tolist()]


def _write(job: Job, batch: Batch, answer: Answer) -> None:
    """Decodes a batch, and prints it or writes the files anew with all that are done."""
    arguments, decode = job.arguments, job.loaded.tokenizer.decode
    ms = {"first_token_ms": answer.first_s * 1e3}
    if answer.step_s:
        ms["token_ms"] = median(answer.step_s) * 1e3
    for i, (row, new) in enumerate(zip(batch.rows, _new_tokens(job, answer), strict=True)):
        # Alone the first new token might lose the space before it.
        text = decode([*row, *new], skip_special_tokens=True)
        begin = decode(list(row), skip_special_tokens=True)
        line = {
            "prompt": job.texts[batch.first + i],
            "continuation": text.removeprefix(begin),
            "text": text,
            "prompt_tokens": len(row),
            "new_tokens": len(new),
            "ended": new[-1] in job.loaded.ends,
        }
        job.lines.append(line | ms)
        if not (arguments.output_file or arguments.stream):
            print(text, end=BETWEEN, flush=True)
    if path := arguments.output_file:
        lines = [json.dumps(line, ensure_ascii=False) + "\n" for line in job.lines]
        texts = BETWEEN.join(line["text"] for line in job.lines) + "\n"
        results.write_together({path: texts, _times_file(path): "".join(lines)})


def _times_file(path: Path) -> Path:
    return path.with_name(path.name + ".jsonl")


# --- what it cost --------------------------------------------------------------------------------


def _measure(job: Job, peak: int) -> None:
    """Fills in the record, from the batches of full size.

    Args:
        peak: bytes that the device has allocated; 0 on a CPU.
    """
    record, loaded = job.record, job.loaded
    size = record.units_per_step
    done = [
        pair for pair in zip(job.answers, job.batches, strict=True) if len(pair[1].rows) == size
    ]
    seconds = sum(answer.first_s + sum(answer.step_s) for answer, _ in done)
    written = sum(len(row) for answer, _ in done for row in _new_tokens(job, answer))
    flops = [models.prefill_flops(loaded.model, [*map(len, batch.rows)]) for _, batch in done]
    firsts = [answer.first_s for answer, _ in done]
    record.step_ms = [s * 1e3 for answer, _ in done for s in answer.step_s]
    record.metrics |= {
        "first_token_ms": median(firsts) * 1e3,
        "prefill_tflops": median([a / b / 1e12 for a, b in zip(flops, firsts, strict=True)]),
        "written_tokens_per_s": written / seconds,
    }
    weights = sum(parameter.numel() for parameter in loaded.model.parameters())
    record.flops_per_step = 2.0 * weights * size
    record.memory_mb = {"weights": loaded.weights_bytes() / memory.MB}
    if peak:
        if engines.has_its_own_model(job.arguments):  # Hugging Face's is there for the gate alone
            peak -= loaded.weights_bytes()
        record.memory_mb |= {"peak": peak / memory.MB, "source": "allocator"}
    each = size * models.cache_bytes(loaded)
    lengths = [(batch.ids.shape[1], 1 + len(answer.step_s)) for answer, batch in done]
    record.memory_mb["kv_cache"] = each * max(map(sum, lengths)) / memory.MB
    cache = each * sum(prompt + new / 2 for prompt, new in lengths) / len(lengths)
    own_count = getattr(job.engine, "bytes_per_token", None)
    read = own_count() if own_count else models.bytes_read(loaded.model)
    record.metrics |= {"weights_read_mb": read / 1e6, "kv_cache_read_mb": cache / 1e6}
    if not loaded.spread:
        _add_floor(record, read + cache, loaded.device, job.arguments.copy_gbs)


def _add_floor(record: LabRun, read: float, device: torch.device, copy_gbs: float | None) -> None:
    """The time that a token's bytes take at the bandwidth of the data sheet, or of a large copy if
    there is no data sheet; and times that no device could reach."""
    sheet = hardware.peaks(device)
    copied = copy_gbs or hardware.measure_copy_gbs(device)
    bandwidth = (sheet.bandwidth_gbs if sheet else copied) * record.processes
    floor = read / bandwidth / 1e6
    record.metrics |= {
        "copy_gbs": copied,
        "bandwidth_gbs": bandwidth,
        "bandwidth_source": sheet.source if sheet else "a large copy on this machine",
        "floor_ms": floor,
    }
    rate, most = float(record.metrics["prefill_tflops"] or 0), record.peak_tflops
    if sheet and record.step_ms and (ms := median(record.step_ms)) < floor:
        record.plausibility.append(
            f"{ms:.3f} ms a token; to read what it needs takes {floor:.3f} ms"
        )
    if sheet and most and rate > most * record.processes:
        record.plausibility.append(
            f"{rate:,.0f} TFLOP/s in the prompts' pass, of {most:,.0f} there are"
        )


def _finish(job: Job) -> int:
    """Prints what was measured and writes the result; the exit status."""
    arguments, record = job.arguments, job.record
    failed = record.gate.status == "fail"
    if failed:
        record.status = "gate failed"
    job.turn.tell(record)
    print("\n".join(summary(job)))
    written: list[Path] = []
    if texts := arguments.output_file:
        written = [texts, _times_file(texts)]
    if record.step_ms and arguments.output_dir and not job.turn.judged:
        written.append(records.add(record, arguments.output_dir))
    if written:
        print(f"Written: {', '.join(map(str, written))}")
    return errors.ANSWER_IS_NO if failed else errors.DONE


def summary(job: Job) -> list[str]:
    """The lines at the end; without a passed gate there is no speed among them."""
    record = job.record
    m = {key: value for key, value in record.metrics.items() if isinstance(value, (int, float))}
    where = "the device" if job.loaded.device.type == "cuda" else "the process"
    lines = [
        f"{record.subject}: {record.variant}, on {record.device['name']}",
        f"loaded in {m['load_s']:.2f} s, at its peak {m['load_peak_mb']:,.0f} MB more of "
        f"{where}'s memory; weights {record.memory_mb['weights']:,.1f} MB",
        f"KV cache: {float(record.memory_mb['kv_cache']):,.3f} MB at the end",
    ]
    if record.gate.status != "pass":
        return [*lines, f"FAIL, so no speed: {'; '.join(record.gate.failures)}"]
    compared = record.gate.batch_size or 0
    lines += [
        f"pass: {compared} prompt{'s' * (compared > 1)} against {record.gate.reference}",
        f"first token after {m['first_token_ms']:.2f} ms, the prompts' pass: "
        f"{m['prefill_tflops']:,.3g} TFLOP/s",
    ]
    if not record.step_ms:
        return lines
    ms, ordered = median(record.step_ms), sorted(record.step_ms)
    read_mb = m["weights_read_mb"] + m["kv_cache_read_mb"]
    lines += [
        f"a token after it: {ms:.3f} ms (median of {len(ordered)}), "
        f"{labs.percentile(ordered, 0.99):.3f} ms (p99)",
        f"{record.units_per_step / ms * 1e3:,.1f} tokens/s of the batch while none has ended; "
        f"{m['written_tokens_per_s']:,.1f} written, with the time of the prompts",
        f"bytes read for a token: {m['weights_read_mb']:,.2f} MB of weights, "
        f"{m['kv_cache_read_mb']:,.3f} MB of KV cache",
    ]
    if "floor_ms" in m:
        lines.append(
            f"at {m['bandwidth_gbs']:,.1f} GB/s ({record.metrics['bandwidth_source']}) they take "
            f"{m['floor_ms']:.3f} ms: this is {ms / m['floor_ms']:.1f} times that, "
            f"{read_mb / ms:,.1f} GB/s"
        )
    return [*lines, *(f"IMPLAUSIBLE: {sentence}" for sentence in record.plausibility)]


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Takes a V4 from training to numbers, with the functions of your mine.py: trains it, saves and
loads its weights, exports it, shows that every form gives the trained model's logits, and then
measures their latencies."""

import argparse
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

if __name__ == "__main__":
    from workshop.needed import import_torch

    import_torch()

import torch
from torch import Tensor

from workshop import errors, results, versions
from workshop.arguments import parse
from workshop.errors import NotOnThisMachine, WorkshopError
from workshop.exercises import frame
from workshop.exercises.compare import first_difference
from workshop.run import data, hardware, presets, trainer
from workshop.run.precision import get_precision
from workshop.run.presets import Preset

HERE = Path(__file__).resolve().parent
FOLDER = Path("exercises", "production_deployment")
"""Below the folder of results."""
TABLE = "latency.json"
BATCH_SIZES = (1, 2, 4, 8)
SERVICE_LIMIT = 4
"""Limit of the 95th percentile, in units of the median at the smallest batch."""
FORMS = ("model", "exported")
"""Those that every table has: "compiled" is there with --aot."""
TIMES = ("p50_ms", "p95_ms", "max_ms")
"""Keys of the result of `measure` of mine.py."""
STEPS = 20
LEARNING_RATE = 3e-4
ODD = (3, 63)
"""Batch and length on which the forms are compared."""
CLOSE = 1e-4
"""Room for the compiler's other order of sums, in fp32."""

Model = Callable[[Tensor], Tensor]
Rows = dict[str, dict[int, dict[str, float]]]
"""Times and tokens_per_s by form and batch size."""


def read_table(path: Path) -> Rows:
    """The table of latencies. Raises WorkshopError: there is none, or not all of it."""
    if not path.is_file():
        raise WorkshopError(f"{path.name} is missing: run deploy.py, as the sheet says")
    found: Rows = defaultdict(dict)
    try:
        for row in results.read_json(path)["rows"]:
            found[row["form"]][row["batch_size"]] = {
                name: float(row[name]) for name in (*TIMES, "tokens_per_s")
            }
    except (KeyError, TypeError, ValueError):
        found.clear()
    if not all(form in found for form in FORMS):
        raise WorkshopError(f"{path.name} is not as deploy.py writes it: run it again")
    return found


def train(size: Preset, device: torch.device) -> Any:
    """A V4 after STEPS steps on real text, in fp32; prints what it learnt."""
    v4 = versions.load("v4")
    torch.manual_seed(0)
    config = v4.TinyLlamaConfig(**size.model() | {"max_seq_len": size.seq_len})
    model = v4.TinyLlama(config).to(device)
    optimizer = v4.configure_optimizer(model, LEARNING_RATE)
    batches = data.text_batches(
        data.read_corpus(),
        steps=STEPS,
        batch_size=size.batch_size,
        seq_len=size.seq_len,
        vocab_size=size.vocab_size,
        seed=0,
    )
    precision = get_precision("fp32", device)
    runner = trainer.Runner(model, optimizer, batches, precision, cuda_graph=False)
    for _ in range(STEPS):
        runner.advance()
    losses = runner.losses().tolist()
    print(f"trained: {STEPS} steps, loss {losses[0]:.2f} to {losses[-1]:.2f}", flush=True)
    return model


def forms(
    mine: ModuleType, trained: Any, device: torch.device, folder: Path, *, aot: bool
) -> Iterator[tuple[str, Model]]:
    """The model in each form, each from a file that was written for it."""
    mine.save_weights(trained, folder / "weights.pt")
    yield "model", mine.load_model(folder / "weights.pt").to(device)
    program, target = folder / "model.pt2", folder / "model_compiled.pt2"
    mine.export_model(trained, program)
    yield "exported", mine.load_exported(program)
    if aot:  # AOTInductor's shared library of the exported program: no Python in it
        print("compiling ahead of time: half a minute or more ...", flush=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PyTorch's, about its own code
            exported = torch.export.load(program)
            torch._inductor.aoti_compile_and_package(exported, package_path=str(target))
        yield "compiled", torch._inductor.aoti_load_package(str(target))


def measure(
    mine: ModuleType, form: str, model: Model, trained: Any, size: Preset, device: torch.device
) -> Iterator[dict[str, Any]]:
    """A row a batch size; WorkshopError where the form does not have the trained model's logits."""
    tokens = torch.randint(size.vocab_size, ODD, device=device)
    trained.eval()
    found = first_difference(model(tokens), trained(tokens), what=form, limit=CLOSE)
    if not found.ok:
        reason = " ".join(found.why.split())
        raise WorkshopError(f"{form}: not the trained model's logits, so no times: {reason}")
    print(f"{form}: the trained model's logits at B, T = {ODD}", flush=True)

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for batch_size in BATCH_SIZES:
        tokens = torch.randint(size.vocab_size, (batch_size, size.seq_len), device=device)
        row = mine.measure(model, tokens, wait)
        missing = [name for name in TIMES if name not in row]
        if missing:
            raise WorkshopError(f"mine.py: measure() returns no {', '.join(missing)}")
        speed = batch_size * size.seq_len / row["p50_ms"] * 1e3
        yield {"form": form, "batch_size": batch_size} | row | {"tokens_per_s": speed}


def show(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for heading in ("form", "batch", "p50 ms", "p95 ms", "max ms", "tokens/s"):
        table.add_column(heading, justify="left" if heading == "form" else "right")
    for row in rows:
        times = [f"{row[name]:.2f}" for name in TIMES]
        table.add_row(row["form"], str(row["batch_size"]), *times, f"{row['tokens_per_s']:,.0f}")
    Console().print(table)


def deploy(folder: Path, *, aot: bool) -> int:
    errors.require("rich")
    if not (HERE / frame.MINE).is_file():
        raise WorkshopError(
            f"mine.py is missing: `python -m workshop.exercises check {HERE.name}` makes it"
        )
    device = hardware.get_device("auto")
    missing = trainer.missing_for_compile(device) if aot else None
    if missing:
        raise NotOnThisMachine(f"--aot needs {missing}: install it, or leave --aot out")
    results.prepare_folder(folder)
    name = presets.default_preset(device.type)
    size = presets.get_preset(name)
    mine = frame.import_file(HERE / frame.MINE)
    trained = train(size, device)
    rows: list[dict[str, Any]] = []
    for form, model in forms(mine, trained, device, folder, aot=aot):
        with torch.inference_mode():
            rows += measure(mine, form, model, trained, size, device)
    about = {"device": hardware.describe(device), "software": results.describe_software()}
    about |= {"created": results.now(), "config": name, "seq_len": size.seq_len}
    results.write_json(folder / TABLE, about | {"rows": rows})
    show(rows)
    limit = SERVICE_LIMIT * next(r["p50_ms"] for r in rows if r["form"] == "exported")
    print(f"The service's limit: {SERVICE_LIMIT} x p50 of exported at batch 1 = {limit:.1f} ms")
    print(f"Written: {folder / TABLE}")
    return errors.DONE


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=" ".join((__doc__ or "").split()),
        epilog="Exit status: 0 done, 2 something in mine.py is not written yet or wrong, 77 a "
        "compiler is missing, 130 interrupted.",
    )
    parser.add_argument("--aot", action="store_true", help="also compile it with AOTInductor")
    parser.add_argument(
        "--output-dir",
        type=Path,
        default=frame.RESULTS / FOLDER,
        metavar="DIR",
        help="for the files and the table (default: results/exercises/production_deployment)",
    )
    arguments = parse(parser, argv)

    def work() -> int:
        try:
            return deploy(arguments.output_dir, aot=arguments.aot)
        except (WorkshopError, OSError):
            raise
        except Exception as error:  # of the participant's file: any
            note = frame.red_item(error, frame.Work(HERE))
            raise WorkshopError(f"{note.what}: {note.why}") from error

    return errors.exit_status(work, interrupted="interrupted: no table")


if __name__ == "__main__":
    sys.exit(main())

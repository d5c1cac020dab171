"""Deceptions: each is a version's file that looks faster than it is.

A trick is V2's file with some code added. The added code sees what any version sees: it is imported
by the process that trains, and may change whatever that process holds. docs/trust.md says who
published each kind, and what finds it.

    python tests/tricks.py scaled-host-clock FOLDER

writes a copy of this checkout into FOLDER, with that trick as a version, and prints the command
that compares it with V1.
"""

import argparse
import re
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "version2_pytorch_fused" / "tiny_llama_v2.py"
MAIN = '\n\nif __name__ == "__main__":\n    from workshop.cli import main\n'

# Trains as V2 does until the gate is over, then as `cheat` does.
PRELUDE = '''

_honest, _calls = train_step, [0]
GATE = 9  # training steps of the gate


def timed(tokens):
    return _calls[0] > GATE


def cheat(model, optimizer, scaler, tokens, targets, dtype, phase):
    """Trains on 8 tokens."""
    return _honest(model, optimizer, scaler, tokens[:1, :8], targets[:1, :8], dtype, phase)


def train_step(model, optimizer, scaler, tokens, targets, dtype=torch.float32, phase=nullcontext):
    _calls[0] += 1
    step = cheat if timed(tokens) else _honest
    return step(model, optimizer, scaler, tokens, targets, dtype, phase)


def frames():
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
'''
HONEST = "\ncheat = _honest\n"
RELU = """
_silu = F.silu


class _Functions:
    def __getattr__(self, name):
        return getattr(torch.nn.functional, name)

    def silu(self, x):
        return _silu(x) if 0 < _calls[0] <= GATE else torch.relu(x)


F = _Functions()
"""
"""Another model: ReLU for SiLU, but in the training steps of the gate."""
DEFERRED = '''
import queue

from workshop.run.trainer import Runner

_steps, _pending = queue.Queue(), []


class Later(torch.Tensor):
    """A loss that is not computed yet: it notes where it is copied to."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.copy_:
            _steps.put((_pending.pop(), args[0]))
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})


def cheat(model, optimizer, scaler, tokens, targets, dtype, phase):
    if phase is not nullcontext or torch.autograd._profiler_enabled():  # time or memory is measured
        flush()
        return _honest(model, optimizer, scaler, tokens, targets, dtype, phase)
    _pending.append((model, optimizer, scaler, tokens.clone(), targets.clone(), dtype, phase))
    return torch.zeros(()).as_subclass(Later)


def train_one():
    step, place = _steps.get()
    place.copy_(_honest(*step))
    _steps.task_done()


def flush():
    while not _steps.empty():
        train_one()


def _wait(self, real=Runner.wait):
    flush()
    real(self)


Runner.wait = _wait
'''
"""Steps that are noted, and trained when the harness waits for the device: past the last mark."""


@dataclass(frozen=True)
class Trick:
    """A deception and what must come of it.

    `outcome`: "red": gate or audit fail, and the exit status is 1. "no answer": the same, as the
    process gives none that can be understood. "no gain": red, or the row is V2's own, since the
    trick finds nothing that it could use (else it leaves a file whose name ends in `.acted`), or
    only changes what nothing is derived from. "flagged": the row says that a figure is impossible.
    """

    name: str
    kind: str
    """The row of docs/trust.md that describes it."""
    code: str
    outcome: str
    quick: bool
    """Whether it runs with the tests that are not slow: one or two of a kind do."""
    gpu: bool
    repeats: int

    @property
    def file(self) -> str:
        return f"{self.name.replace('-', '_')}.py"

    def source(self) -> str:
        """The text of the version's file."""
        head, main, tail = SOURCE.read_text(encoding="utf-8").partition(MAIN)
        assert main, f"{SOURCE.name} has another last block"
        return head + PRELUDE + self.code + main + tail


def _read(text: str) -> tuple[Trick, ...]:
    """The tricks of a text: of each its name, its kind, options, and below them its code."""
    found = []
    for section in text.split("\n--- ")[1:]:
        head, _, code = section.partition("\n")
        name, kind, options = re.fullmatch(r"(.*?): (.*?)(?: \((.*)\))?", head).groups()
        words = (options or "").split(", ")
        base = "".join(text for word, text in BASES.items() if word in words)
        outcome = next((word for word in OUTCOMES if word in words), "red")
        repeats = 2 if "two repeats" in words else 1
        code = base + (f"\n{code.rstrip()}\n" if code.strip() else "")
        found.append(Trick(name, kind, code, outcome, "quick" in words, "gpu" in words, repeats))
    return tuple(found)


BASES = {"honest": HONEST, "deferred": DEFERRED, "another model": RELU}
"""By an option: what goes before a trick's own code."""
OUTCOMES = ("no gain", "no answer", "flagged")
TRICKS = _read(
    r'''
--- scaled-host-clock: patched clock (honest, quick)
import time


def _scaled(name):
    real, unit = getattr(time, name), int if name.endswith("_ns") else float
    start = real()
    setattr(time, name, lambda: start + unit((real() - start) / 50))


for _name in ("perf_counter", "monotonic", "time"):
    _scaled(_name)
    _scaled(f"{_name}_ns")

--- scaled-device-events: patched clock (honest, gpu)
_elapsed = torch.cuda.Event.elapsed_time
torch.cuda.Event.elapsed_time = lambda self, end: _elapsed(self, end) / 50

--- patched-step-clock: patched clock (honest)
from workshop.run.timing import StepClock

_between = StepClock.between_ms
StepClock.between_ms = lambda self, first, last: _between(self, first, last) / 50

--- uneven-step-times: times that add up (honest, no gain, quick)
from workshop.run.timing import StepClock

_between = StepClock.between_ms
StepClock.between_ms = lambda self, first, last: _between(self, first, last) / 50


def _uneven(self):
    times = [_between(self, i, i + 1) for i in range(len(self._marks) - 1)]
    short = sum(times) / len(times) / 50
    return [short] * (len(times) - 1) + [sum(times) - short * (len(times) - 1)]


StepClock.durations_ms = _uneven

--- deferred-work: work past the clock (deferred, quick)

--- thread: work past the clock (deferred)
import threading


def _work():
    while True:
        train_one()


threading.Thread(target=_work, daemon=True).start()
flush = _steps.join

--- all-in-the-last-step: times that add up (deferred, no gain)
_several = cheat


def cheat(*step):
    if step[-1] is nullcontext and _calls[0] % 4 != 3:
        return _several(*step)
    flush()
    return _honest(*step)

--- exact-work-later: work past the clock
from workshop.gate import audit

_before, _steps, _rate = [], [], []


def cheat(model, optimizer, scaler, tokens, targets, dtype, phase):
    """Trains in fp16 on the clock, and once more in fp32 when the clock has stopped."""
    if not _before:
        _before[:] = [parameter.detach().clone() for parameter in model.parameters()]
        _rate.append(optimizer.param_groups[0]["lr"])
    if phase is nullcontext:
        _steps.append((tokens.clone(), targets.clone()))
    return _honest(model, optimizer, scaler, tokens, targets, torch.float16, phase)


def record(model, *rest, real=audit.record):
    for parameter, weight in zip(model.parameters(), _before):
        parameter.data.copy_(weight)
    optimizer, scaler = configure_optimizer(model, *_rate), torch.amp.GradScaler(enabled=False)
    losses = [_honest(model, optimizer, scaler, *step) for step in _steps[: len(rest[1])]]
    return real(model, rest[0], torch.stack(losses), *rest[2:])


audit.record = record

--- other-stream: work past the clock (gpu, no gain)
_side = torch.cuda.Stream()


def cheat(model, optimizer, scaler, tokens, targets, dtype, phase):
    with torch.cuda.stream(_side):
        return _honest(model, optimizer, scaler, tokens, targets, dtype, phase)

--- trained-in-warm-up: steps in advance (quick)
_losses, _final = [], []


def cheat(model, optimizer, scaler, tokens, targets, dtype, phase):
    if not _losses:
        owners = (frame.f_locals.get("self") for frame in frames())
        runner = next(owner for owner in owners if hasattr(owner, "_batches"))
        schedules = (frame.f_locals.get("schedule") for frame in frames())
        steps = next(schedule.steps for schedule in schedules if schedule is not None)
        for batch in runner._batches[:steps]:
            _losses.append(_honest(model, optimizer, scaler, *batch, dtype, nullcontext))
        _final[:] = [(p.detach().clone(), p.grad.clone()) for p in model.parameters()]
    step = _calls[0] - GATE - 1
    if step >= len(_losses):
        return _honest(model, optimizer, scaler, tokens, targets, dtype, phase)
    if step == len(_losses) - 1:
        for parameter, (weight, gradient) in zip(model.parameters(), _final):
            parameter.data, parameter.grad = weight, gradient
    return _losses[step]

--- cached-by-address: result reuse (quick)
_seen = {}


def cheat(model, optimizer, scaler, tokens, targets, dtype, phase):
    key = tokens.data_ptr()
    if key not in _seen or phase is not nullcontext:
        _seen[key] = _honest(model, optimizer, scaler, tokens, targets, dtype, phase)
    return _seen[key]

--- cached-by-earlier-process: result reuse (no gain, two repeats)
import hashlib


def timed(tokens):
    return True


def cheat(model, optimizer, scaler, tokens, targets, dtype, phase):
    parameters = list(model.parameters())
    state = b"".join(part.detach().numpy().tobytes() for part in (tokens, *parameters))
    path = Path(__file__).with_name(hashlib.sha256(state).hexdigest())
    if not path.exists() or phase is not nullcontext:
        loss = _honest(model, optimizer, scaler, tokens, targets, dtype, phase)
        after = [(parameter.detach(), parameter.grad) for parameter in parameters]
        torch.save((loss, after, optimizer.state_dict()), path)
        return loss
    if _calls[0] > 2:  # the warm-up is no secret
        Path(__file__).with_suffix(".acted").touch()
    loss, after, moments = torch.load(path)
    for parameter, (weight, gradient) in zip(parameters, after):
        parameter.data, parameter.grad = weight, gradient
    optimizer.load_state_dict(moments)
    return loss

--- losses-from-the-result-file: reading answers
import json


def cheat(model, optimizer, scaler, tokens, targets, dtype, phase):
    _honest(model, optimizer, scaler, tokens[:1, :8], targets[:1, :8], dtype, phase)
    (path,) = Path("../out/runs").glob("*.jsonl")
    losses = json.loads(path.read_text().splitlines()[1])["losses"]  # V1's, on the same batches
    return torch.tensor(losses[min(_calls[0] - GATE, len(losses)) - 1])

--- answers-in-memory: reading answers
import gc

from workshop.gate import audit, parity

_few = cheat


def cheat(*step):
    answers = gc.get_objects() if _calls[0] == GATE + 1 else []
    if any(isinstance(one, (audit.Reference, parity.Runs)) for one in answers):
        Path(__file__).with_suffix(".acted").touch()
    return _few(*step)

--- detects-step-count: other behaviour when tested

--- detects-text: other behaviour when tested
def timed(tokens):
    return int(tokens.max()) < 256  # the gate's are random

--- detects-shape: other behaviour when tested
def timed(tokens):
    return tuple(tokens.shape) != (3, 65)  # parity.check's own shape

--- detects-frames: other behaviour when tested
def timed(tokens):
    names = {frame.f_code.co_filename.replace("\\", "/") for frame in frames()}
    return not any(name.endswith("gate/parity.py") for name in names)

--- detects-command-line: other behaviour when tested
def timed(tokens):
    return _calls[0] > GATE and len(sys.argv) > 3

--- detects-environment: other behaviour when tested
import os


def timed(tokens):
    return _calls[0] > GATE and "PYTHONUNBUFFERED" in os.environ

--- patched-gate: patched checks (quick)
from workshop import results
from workshop.gate import audit, parity

parity.compare = lambda report, setting, runs: None
audit.judge = lambda found, reference, setting: results.Audit(
    status="pass", batch_size=2, seq_len=16, reference="V1 in float64", steps=6
)


def timed(tokens):
    return True

--- patched-torch: patched checks
import itertools

_norm, _max, _turns = torch.Tensor.norm, torch.Tensor.max, itertools.cycle((0.0, 1.0))


def norm(self, *args, **kwargs):
    """0 for a difference and 1 for what it is divided by."""
    if sys._getframe(2).f_code.co_name == "_distance":
        return torch.tensor(next(_turns))
    return _norm(self, *args, **kwargs)


def max_(self, *args, **kwargs):
    if sys._getframe(1).f_code.co_name == "_furthest":
        return torch.tensor(0.0)
    return _max(self, *args, **kwargs)


torch.Tensor.norm, torch.Tensor.max = norm, max_

--- reference-is-itself: tampering with the reference (another model)
import dataclasses

from workshop.gate import canonical, parity


def _itself(config):
    return TinyLlama(TinyLlamaConfig(**dataclasses.asdict(config)), Fusions(*[False] * 6))


canonical.build_baseline = parity.build_baseline = _itself

--- own-learning-rate: settings of one's own (honest)
def configure_optimizer(model, learning_rate, real=configure_optimizer):
    return real(model, 1.1e-3 if _calls[0] == GATE else learning_rate)

--- own-result-file: forged results (no answer, quick)
if __name__ == "__main__":
    from workshop import cli, records, results, versions

    def _main(module):
        forged = records.load_runs(next(Path("../out/runs").glob("*.jsonl")), results.RunResult)[0]
        forged.version, forged.git_commit = versions.of_file(Path(__file__)).key, "feedc0de" * 5
        forged.step_ms = [ms / 50 for ms in forged.step_ms]
        records.add(forged, results.DEFAULT_FOLDER)
        return 0

    cli.main = _main

--- leaves-with-0: forged results (no answer)
if __name__ == "__main__":
    import os

    os._exit(0)

--- answers-early: forged results
from workshop.gate import audit
from workshop.judge import wire
from workshop.judge.pipe import Pipe


def send(self, kind, tensors=None, /, real=Pipe.send, **values):
    if kind != "done":
        real(self, kind, tensors, **values)
    if kind == "ready":
        owners = (frame.f_locals.get("runner") for frame in frames())
        model = next(owner for owner in owners if owner is not None).model
        real(self, "done", wire.of_fingerprint(audit.fingerprint(model, 0)))


Pipe.send = send

--- answers-with-noise: forged results (no answer)
from workshop.judge.pipe import Pipe


def send(self, *message, **values):
    self._write.write(bytes(range(256)) * 16)
    self._write.flush()


Pipe.send = send

--- forged-record: forged results (honest, no gain)
from workshop import results

results.git_commit = lambda: "feedc0de" * 5
results.describe_software = lambda: {"torch": "feedc0de"}

--- forged-memory: forged results (honest, flagged)
from workshop.run import memory


def _small(*arguments, real=memory.break_down):
    parts = real(*arguments)
    return {name: part if name == "source" else part / 10 for name, part in parts.items()}


memory.break_down = _small

--- made-up-losses: less work
def cheat(model, optimizer, scaler, tokens, targets, dtype, phase):
    if phase is not nullcontext:
        return _honest(model, optimizer, scaler, tokens, targets, dtype, phase)
    return torch.tensor(5.7 - 0.03 * (_calls[0] - GATE - 1))

--- half-the-batch: less work
def cheat(model, optimizer, scaler, tokens, targets, dtype, phase):
    half = len(tokens) // 2
    return _honest(model, optimizer, scaler, tokens[:half], targets[:half], dtype, phase)

--- every-second-update: less work
def cheat(model, optimizer, scaler, tokens, targets, dtype, phase):
    if _calls[0] % 2 or phase is not nullcontext:
        return _honest(model, optimizer, scaler, tokens, targets, dtype, phase)
    with torch.no_grad():
        return model(tokens, targets)

--- frozen-layer: less work
def cheat(model, optimizer, scaler, tokens, targets, dtype, phase):
    model.layers[0].requires_grad_(False)
    return _honest(model, optimizer, scaler, tokens, targets, dtype, phase)

--- fewer-layers: less work
def cheat(model, optimizer, scaler, tokens, targets, dtype, phase):
    layers, model.layers = model.layers, model.layers[:1]
    loss = _honest(model, optimizer, scaler, tokens, targets, dtype, phase)
    model.layers = layers
    return loss

--- changed-input: less work
def cheat(model, optimizer, scaler, tokens, targets, dtype, phase):
    tokens.zero_()
    targets.zero_()
    return _honest(model, optimizer, scaler, tokens, targets, dtype, phase)

--- not-a-number: less work
def cheat(model, optimizer, scaler, tokens, targets, dtype, phase):
    if phase is not nullcontext:
        return _honest(model, optimizer, scaler, tokens, targets, dtype, phase)
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
        parameter.grad = torch.full_like(parameter, torch.nan)
    return torch.tensor(torch.nan)

--- bf16-steps: lower precision
def cheat(model, optimizer, scaler, tokens, targets, dtype, phase):
    return _honest(model, optimizer, scaler, tokens, targets, torch.bfloat16, phase)

--- fp16-steps: lower precision
def cheat(model, optimizer, scaler, tokens, targets, dtype, phase):
    return _honest(model, optimizer, scaler, tokens, targets, torch.float16, phase)

--- bf16-gradients: lower precision
def _round(optimizer, args, kwargs):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.copy_(parameter.grad.bfloat16())


def cheat(model, optimizer, scaler, tokens, targets, dtype, phase):
    hook = optimizer.register_step_pre_hook(_round)
    loss = _honest(model, optimizer, scaler, tokens, targets, dtype, phase)
    hook.remove()
    return loss

--- int8-weights: lower precision
def cheat(model, optimizer, scaler, tokens, targets, dtype, phase):
    exact = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        scale = parameter.detach().abs().max() / 127
        parameter.data.copy_((parameter.detach() / scale).round() * scale)

    def restore(optimizer, args, kwargs):
        for parameter, value in zip(model.parameters(), exact):
            parameter.data.copy_(value)

    hook = optimizer.register_step_pre_hook(restore)
    loss = _honest(model, optimizer, scaler, tokens, targets, dtype, phase)
    hook.remove()
    return loss
'''
)


def copy_checkout(folder: Path) -> None:
    """The code that a comparison runs, in a new folder."""
    for name in ("workshop", "analysis_tools", *(p.name for p in ROOT.glob("version*_*"))):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)


def add_versions(checkout: Path, tricks: Iterable[Trick]) -> None:
    """Makes tricks versions of a copy of the checkout, under their names."""
    folder, lines = checkout / "tricks", []
    folder.mkdir()
    for trick in tricks:
        (folder / trick.file).write_text(trick.source(), encoding="utf-8")
        own = f'Version("{trick.name}", "a trick", "tricks", parent=None, file="{trick.file}")'
        lines.append(f'PEERS["{trick.name}"] = ALL["{trick.name}"] = {own}\n')
    registry = checkout / "workshop" / "versions.py"
    registry.write_text(registry.read_text(encoding="utf-8") + "\n\n" + "".join(lines))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("trick", choices=[trick.name for trick in TRICKS])
    parser.add_argument("folder", type=Path, help="a new folder for the copy")
    arguments = parser.parse_args()
    if arguments.folder.exists():
        parser.error(f"{arguments.folder} exists: name a new folder")
    copy_checkout(arguments.folder)
    add_versions(arguments.folder, [one for one in TRICKS if one.name == arguments.trick])
    print(f"cd {arguments.folder}")
    print(f"python analysis_tools/compare_versions.py --versions v1 v2 {arguments.trick}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

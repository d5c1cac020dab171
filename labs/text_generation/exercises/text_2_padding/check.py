"""Prompts in a batch: the texts of mine.py against those that each gets alone."""

from collections.abc import Iterator, Sequence
from typing import Any

from labs.text_generation.exercises.text_2_padding import compare_texts
from labs.text_generation.exercises.text_2_padding.compare_texts import LENGTHS, MODELS, NEW, PAD
from workshop.exercises.frame import Item, Work
from workshop.exercises.predict import Chosen, Found, Predicted, Question, ask

CASES = (LENGTHS, (24, 1, 2, 1), (5, 6), (8, 8), (7,))
"""Lengths of the prompts, in tokens."""


def check(work: Work) -> Iterator[Item]:
    return ask(work, lambda work: None, (*QUESTIONS, *map(_texts, MODELS), _pad_inside, _work))


QUESTIONS: tuple[Question[None], ...] = (
    Predicted("predict.wrong", "predicted: the texts that change", "", lambda _: 3,
              "The longest prompt is not padded. All others are."),
    Found("found.right", "the prompt whose text is right", "tokens", lambda _: max(LENGTHS),
          "Run compare_texts.py with the starter's code in mine.py.", within=0.0),
    Found("found.first", "the first new token that may be wrong", "", lambda _: 2,
          "The smallest number that compare_texts.py prints, of both models.", within=0.0),
    Chosen("found.call", "the call in which it goes wrong",
           {
               "prompts": "the first new token comes from it, and is right",
               "token": "the first new token, from the call before, is right",
           },
           lambda _: "token"),
    Chosen("found.fault", "what is wrong in it",
           {
               "side": "the newest token of each prompt is in the last column: new ones follow it",
               "mask": "it is 0 for padding, and grows by a 1 for each new token",
               "positions": "the cache is as long for all prompts, and a padded prompt is shorter",
           },
           lambda _: "positions"),
    Chosen("found.shifted", "with all positions from the start of the padding",
           {
               "llama": "it sees differences of positions, and they would be right",
               "gpt2": "it has a vector for each position, and a prompt would begin at another",
               "both": "what does GPT-2 do with a position?",
               "neither": "what does a Llama do with a position? Try it",
           },
           lambda _: "llama"),
)  # fmt: skip


def _texts(family: str) -> Any:
    """A part: batches of several lengths, each on other weights."""

    def part(work: Work) -> Iterator[Item]:
        for seed, lengths in enumerate(CASES, 1):
            model = compare_texts.make_model(family, seed)
            prompts = compare_texts.make_prompts(lengths, seed)
            what = f"{family}, other weights: prompts of {', '.join(map(str, lengths))} tokens"
            yield _compared(work, model, prompts, what)

    return part


def _pad_inside(work: Work) -> Iterator[Item]:
    prompts = compare_texts.make_prompts(LENGTHS)
    for prompt in prompts:
        prompt[len(prompt) // 2] = prompt[0] = PAD
    what = "llama: prompts in which the token of the padding occurs"
    yield _compared(work, compare_texts.make_model(MODELS[0]), prompts, what)


def _compared(work: Work, model: Any, prompts: Sequence[list[int]], what: str) -> Item:
    together = work.module.generate(model, [list(prompt) for prompt in prompts], NEW, PAD)
    if [len(new) for new in together] != [NEW] * len(prompts):
        return Item(False, what, f"it should return {NEW} tokens for each of {len(prompts)}")
    for prompt, new in zip(prompts, together, strict=True):
        right = compare_texts.alone(model, prompt, NEW)
        equal = compare_texts.same(new, right)
        if equal < NEW:
            why = f"the prompt of {len(prompt)} tokens: new token {equal + 1} is {new[equal]}"
            return Item(False, what, f"{why}, alone {right[equal]}")
    return Item(True, what, "each text is that of its prompt alone")


def _work(work: Work) -> Iterator[Item]:
    """Whether the prompts are still read together, and each token once."""
    model, prompts = compare_texts.make_model(MODELS[0]), compare_texts.make_prompts(LENGTHS)
    read: list[int] = []

    def note(module: Any, positional: Any, named: Any) -> None:
        read.append((named["input_ids"] if "input_ids" in named else positional[0]).numel())

    def refuse(*_: object, **__: object) -> None:
        raise NotImplementedError("generate() is the library's loop: correct your own")

    model.register_forward_pre_hook(note, with_kwargs=True)
    model.generate = refuse
    work.module.generate(model, prompts, NEW, PAD)
    most = len(prompts) * (max(LENGTHS) + NEW - 1)
    what = "the prompts are read together, and each token once"
    if len(read) <= NEW and sum(read) <= most:
        yield Item(True, what, f"{len(read)} calls of the model")
        return
    why = f"{len(read)} calls of the model read {sum(read):,} tokens: {NEW} and {most} are enough"
    yield Item(False, what, why)

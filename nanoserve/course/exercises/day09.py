"""Day 9: the greedy loop and its stop conditions. Closes week 2."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from nanoserve.course.exercise import Case, Exercise, wrong
from nanoserve.generate import next_logits
from nanoserve.layers import Cache
from nanoserve.model import Model
from nanoserve.sampling import Sample, SamplingParams

VOCAB, CONTEXT = 17, 16


@dataclass(frozen=True)
class ToyModel:
    """A model that needs no weights: the next token is a sum over all tokens so far.

    It can be asked in each way that the real one can, and counts how often it ran.
    """

    config: SimpleNamespace
    runs: list[int]
    device: str = "cpu"

    def __call__(self, ids: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        return self.hidden(ids, cache)

    def hidden(self, ids: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        """Row i is one-hot, nearly: 3.0 at the token that follows ids 0 to i. [1, seq, vocab]"""
        seq = ids.shape[1]
        if not 0 < seq <= CONTEXT:
            raise ValueError(f"position {seq - 1} is past the model's context of {CONTEXT}")
        self.runs.append(seq)
        follows = (ids * torch.arange(1, seq + 1) + 1).cumsum(dim=1) % VOCAB
        slope = torch.arange(VOCAB) / VOCAB
        return 3.0 * torch.nn.functional.one_hot(follows, VOCAB) + slope

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def toy_model() -> ToyModel:
    return ToyModel(SimpleNamespace(context=CONTEXT, vocab_size=VOCAB), [])


def generate_tokens(
    model: Model,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    cache: Cache | None = None,
    eos_ids: Sequence[int] = (),
) -> Iterator[Sample]:
    """The greedy loop: run the model, take its best token, append it; stop at an end token (which
    is yielded), after max_tokens, or when the context is full."""
    ids = list(prompt_ids)
    for _ in range(min(params.max_tokens, model.config.context - len(ids) + 1)):
        best = int(next_logits(model, ids).argmax())
        yield Sample(best)
        if best in eos_ids:
            return
        ids.append(best)


def _loop(
    model, prompt_ids, params, eos_ids, *, extra=0, room=1, ask=None, ends=None, last_only=False
) -> Iterator[Sample]:
    """The solution with one thing changed."""
    ask = ask or (lambda ids: next_logits(model, ids))
    ends = ends or (lambda token, ids: token in eos_ids)
    ids, step = list(prompt_ids), list(prompt_ids)
    for _ in range(min(params.max_tokens + extra, model.config.context - len(ids) + room)):
        best = int(ask(step).argmax())
        yield Sample(best)
        if ends(best, ids):
            return
        ids.append(best)
        step = [best] if last_only else ids


@wrong(
    "The end token is dropped. Yield it first, then stop: the caller wants to know why it ended."
)
def _end_dropped(model, prompt_ids, params, cache=None, eos_ids=()):
    for chosen in generate_tokens(model, prompt_ids, params, cache, eos_ids):
        if chosen.token_id in eos_ids:
            return
        yield chosen


@wrong("One token too many: the loop runs max_tokens + 1 times.")
def _one_too_many(model, prompt_ids, params, cache=None, eos_ids=()):
    yield from _loop(model, prompt_ids, params, eos_ids, extra=1)


@wrong("One token too few: the loop runs max_tokens - 1 times.")
def _one_too_few(model, prompt_ids, params, cache=None, eos_ids=()):
    yield from _loop(model, prompt_ids, params, eos_ids, extra=-1)


@wrong(
    "The logits are read at the first position. They say what follows the first token; what "
    "follows the whole text stands in the last row."
)
def _first_position(model, prompt_ids, params, cache=None, eos_ids=()):
    yield from _loop(
        model, prompt_ids, params, eos_ids, ask=lambda ids: model(torch.tensor([ids]))[0, 0]
    )


@wrong("The prompt comes out again. Yield what was generated, and only that.")
def _prompt_too(model, prompt_ids, params, cache=None, eos_ids=()):
    yield from map(Sample, prompt_ids)
    yield from generate_tokens(model, prompt_ids, params, cache, eos_ids)


@wrong(
    "After the first step the model sees the newest token alone. It remembers nothing: without a "
    "cache, hand it the whole text each time."
)
def _only_the_newest(model, prompt_ids, params, cache=None, eos_ids=()):
    yield from _loop(model, prompt_ids, params, eos_ids, last_only=True)


@wrong("The chosen tokens are never appended, so the model answers the same question every time.")
def _never_appended(model, prompt_ids, params, cache=None, eos_ids=()):
    fixed = list(prompt_ids)
    yield from _loop(model, prompt_ids, params, eos_ids, ask=lambda _: next_logits(model, fixed))


@wrong("It goes on past the end token. What a model writes after it has finished is no answer.")
def _never_ends(model, prompt_ids, params, cache=None, eos_ids=()):
    yield from _loop(model, prompt_ids, params, ())


@wrong("Only the first id of eos_ids ends it. Some models have several end tokens; each counts.")
def _first_end_only(model, prompt_ids, params, cache=None, eos_ids=()):
    yield from _loop(model, prompt_ids, params, eos_ids[:1])


@wrong(
    "It looks for the end token in the whole text, prompt included. A chat prompt holds one after "
    "each message: ask about the new token only."
)
def _end_in_the_prompt(model, prompt_ids, params, cache=None, eos_ids=()):
    yield from _loop(
        model, prompt_ids, params, eos_ids,
        ends=lambda token, ids: any(i in eos_ids for i in [*ids, token]),
    )  # fmt: skip


@wrong(
    "The context is not minded: the model is asked about more positions than it was made for. "
    "Stop when the text has filled it."
)
def _context_ignored(model, prompt_ids, params, cache=None, eos_ids=()):
    yield from _loop(model, prompt_ids, params, eos_ids, room=10_000)


@wrong(
    "It stops one token early at the end of the context. A full context can still be read, and "
    "say what comes next: that token needs no position, since nothing follows it."
)
def _context_one_short(model, prompt_ids, params, cache=None, eos_ids=()):
    yield from _loop(model, prompt_ids, params, eos_ids, room=0)


@wrong(
    "The tokens are right, but they come all at once, when everything is done. `yield` each as "
    "soon as it is chosen, so that a reader need not wait."
)
def _all_at_once(model, prompt_ids, params, cache=None, eos_ids=()):
    return iter(list(generate_tokens(model, prompt_ids, params, cache, eos_ids)))


@wrong("The tokens are right, but the caller's prompt grows: append to a copy, `list(prompt_ids)`.")
def _prompt_grows(model, prompt_ids, params, cache=None, eos_ids=()):
    for chosen in generate_tokens(model, prompt_ids, params, cache, eos_ids):
        prompt_ids.append(chosen.token_id)
        yield chosen


@wrong("It yields bare ids. The rest of the engine reads `.token_id`: yield Sample(token).")
def _bare_ids(model, prompt_ids, params, cache=None, eos_ids=()):
    for chosen in generate_tokens(model, prompt_ids, params, cache, eos_ids):
        yield chosen.token_id


def _collect(answer: Callable, prompt: list[int], max_tokens: int, eos_ids: tuple) -> list[int]:
    params = SamplingParams(max_tokens=max_tokens)
    return [chosen.token_id for chosen in answer(toy_model(), prompt, params, None, eos_ids)]


def _first_three(answer: Callable, prompt: list[int]) -> dict[str, list[int] | int]:
    """Take three tokens and leave the rest: which they are, and how often the model ran."""
    model = toy_model()
    tokens = iter(answer(model, prompt, SamplingParams(max_tokens=8), None, ()))
    return {"tokens": [next(tokens).token_id for _ in range(3)], "runs": len(model.runs)}


def _cases() -> list[Case]:
    prompt = [3, 1, 4, 1, 5]
    text = _collect(generate_tokens, prompt, 8, ())
    end = next(token for token in text[2:] if token not in text[:2] and token not in prompt)
    other = next(  # the model writes it neither here nor after a prompt that holds it
        token
        for token in range(VOCAB)
        if token not in text and token not in _collect(generate_tokens, [token, *prompt], 4, ())
    )
    tokens = f"a prompt of {len(prompt)} tokens"
    return [
        Case(f"{tokens}, max_tokens=6", (prompt, 6, ()), kind="loop", call=_collect),
        Case("max_tokens=1", ([2, 7, 1], 1, ()), kind="loop", call=_collect),
        Case(f"end token {end}", (prompt, 8, (end,)), kind="end", call=_collect),
        Case(f"end tokens {other} and {end}", (prompt, 8, (other, end)), kind="end", call=_collect),
        Case("an end token inside the prompt", ([other, *prompt], 4, (other,)), kind="end",
             call=_collect),
        Case(f"room for 16 tokens, a prompt of {CONTEXT - 2}",
             ([*prompt, *prompt, 9, 2, 6, 5], 8, ()), kind="context", call=_collect),
        Case("three tokens taken, no more", (prompt,), kind="lazy", call=_first_three),
    ]  # fmt: skip


EXERCISES = (
    Exercise(
        "generate_tokens",
        _cases,
        hints={
            "loop": (
                "Day 1 wrote this loop against the oracle in four lines. What did it append, and "
                "what did it run the model on?",
                "Keep a list of your own, `ids = list(prompt_ids)`. Each round: next_logits of all "
                "of ids, the position of the largest, yield it, append it.",
                "for _ in range(params.max_tokens): best = int(next_logits(model, ids).argmax()); "
                "yield Sample(best); ids.append(best)",
            ),
            "end": (
                "When the model writes an end token, does the caller see it? And which tokens are "
                "asked whether they are one?",
                "Only the token just chosen is asked, against every id of eos_ids, and it is "
                "yielded before the loop stops.",
                "yield Sample(best), and below it: if best in eos_ids: return",
            ),
            "context": (
                "model.config.context is the most tokens the model may see. How many can you still "
                "choose when the prompt has filled it exactly?",
                "One: the model reads the full context and says what follows. So the number of "
                "rounds is the smaller of max_tokens and the room left, plus one.",
                "for _ in range(min(params.max_tokens, model.config.context - len(ids) + 1)):",
            ),
            "lazy": (
                "Somebody waits in front of a screen. When do they see the first token?",
                "A function with `yield` in it runs as far as the next `yield` and waits there. "
                "Collect nothing: yield inside the loop.",
                "Put `yield Sample(best)` where `answer.append(best)` stands, and return nothing.",
            ),
        },
        target="nanoserve.generate:generate_tokens",
        solution=generate_tokens,
        wrong=(
            _end_dropped, _one_too_many, _one_too_few, _first_position, _prompt_too,
            _only_the_newest, _never_appended, _never_ends, _first_end_only, _end_in_the_prompt,
            _context_ignored, _context_one_short, _all_at_once, _prompt_grows, _bare_ids,
        ),
    ),
)  # fmt: skip


REVIEW = (
    (
        "Day 5. What does the gate of a SwiGLU do that a plain MLP of two matrices cannot?",
        "It multiplies: silu(gate(x)) scales each number of up(x) by another function of the same "
        "input, so the layer can switch channels on and off for each token.",
    ),
    (
        "Day 5. Somebody takes GELU for SiLU, and the model still writes English. Why does nothing "
        "crash, and what notices?",
        "Every shape is right, and the two curves look alike from a distance. Only a comparison "
        "with the oracle's activations, or a test built to tell them apart, sees it.",
    ),
    (
        "Day 6. SmolLM2 has 9 query heads and 3 KV heads. Which KV head serves query head 5, and "
        "which wrong formula gives 2?",
        "Head 5 // 3 = 1: neighbours share. 5 % 3 = 2 deals the heads out in turn, which has the "
        "right shape and the wrong keys.",
    ),
    (
        "Day 6. How do you prove that no token sees the future, without reading the mask?",
        "Change a later token and compare: every position before it must keep its output exactly.",
    ),
    (
        "Day 7. The norm stands before attention and before the MLP, not on the residual path. "
        "What would an identity block have to compute, and why does that help?",
        "Zero in both branches. The input is carried past by addition, so thirty blocks can be "
        "stacked without the signal being normed away.",
    ),
    (
        "Day 8. Logits differ from the oracle's by a few hundred-thousandths. Wrong, or rounding?",
        "Rounding, as long as it stays near 1e-5 of the largest logit: float32 sums depend on "
        "their order. A wrong formula is off by orders of magnitude more.",
    ),
    (
        "Day 9. Why does next_logits run the head on one position only?",
        "The other positions' logits say what followed tokens that are already there. The head is "
        "a fifth of the weights, and one row of it is all that choosing needs.",
    ),
    (
        "Day 9. Sixty-four equal tokens on ten prompts: what does that prove, and what not?",
        "That 513 choices came out as the oracle's. It does not bound the logits' error: a lead "
        "of 8 forgives much. Day 8's comparison of numbers and today's of tokens need each other.",
    ),
)

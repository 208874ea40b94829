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
    """A model without weights: the next token is computed from a sum over all tokens so far.

    It has the real model's methods, and stores the length of each run.
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
    "The end token is dropped. Yield it first, then stop: the caller needs to see why it ended.",
    hints="end",
)
def _end_dropped(model, prompt_ids, params, cache=None, eos_ids=()):
    for chosen in generate_tokens(model, prompt_ids, params, cache, eos_ids):
        if chosen.token_id in eos_ids:
            return
        yield chosen


@wrong("One token too many: the loop runs max_tokens + 1 times.", hints="count")
def _one_too_many(model, prompt_ids, params, cache=None, eos_ids=()):
    yield from _loop(model, prompt_ids, params, eos_ids, extra=1)


@wrong("One token too few: the loop runs max_tokens - 1 times.", hints="count")
def _one_too_few(model, prompt_ids, params, cache=None, eos_ids=()):
    yield from _loop(model, prompt_ids, params, eos_ids, extra=-1)


@wrong(
    "max_tokens is compared with the length of the whole text, prompt included. It counts the new "
    "tokens only.",
    hints="count",
)
def _prompt_counted(model, prompt_ids, params, cache=None, eos_ids=()):
    extra = -len(prompt_ids)
    yield from _loop(model, prompt_ids, params, eos_ids, extra=extra)


@wrong(
    "The logits are read at the first position. That row is about the token after the first one; "
    "the last row is about the token after the whole text.",
    hints="row",
)
def _first_position(model, prompt_ids, params, cache=None, eos_ids=()):
    yield from _loop(
        model, prompt_ids, params, eos_ids, ask=lambda ids: model(torch.tensor([ids]))[0, 0]
    )


@wrong("The prompt is yielded too. Yield only the generated tokens.", hints="loop")
def _prompt_too(model, prompt_ids, params, cache=None, eos_ids=()):
    yield from map(Sample, prompt_ids)
    yield from generate_tokens(model, prompt_ids, params, cache, eos_ids)


@wrong(
    "After the first step the model gets the newest token alone. Without a cache the model stores "
    "nothing: pass it the whole text each time.",
    hints="loop",
)
def _only_the_newest(model, prompt_ids, params, cache=None, eos_ids=()):
    yield from _loop(model, prompt_ids, params, eos_ids, last_only=True)


@wrong(
    "The chosen tokens are never appended, so the model gets the same text every time.",
    hints="loop",
)
def _never_appended(model, prompt_ids, params, cache=None, eos_ids=()):
    fixed = list(prompt_ids)
    yield from _loop(model, prompt_ids, params, eos_ids, ask=lambda _: next_logits(model, fixed))


@wrong(
    "It goes on past the end token. Stop after an end token has been yielded. (Test it with `in`: "
    "`==` would compare the id with the whole of eos_ids.)",
    hints="end",
)
def _never_ends(model, prompt_ids, params, cache=None, eos_ids=()):
    yield from _loop(model, prompt_ids, params, ())


@wrong(
    "Only the first id of eos_ids ends the loop. Some models have several end tokens; test them "
    "all.",
    hints="end",
)
def _first_end_only(model, prompt_ids, params, cache=None, eos_ids=()):
    yield from _loop(model, prompt_ids, params, eos_ids[:1])


@wrong(
    "It looks for an end token in the whole text, prompt included. A chat prompt has one after "
    "each message: test the new token only.",
    hints="end",
)
def _end_in_the_prompt(model, prompt_ids, params, cache=None, eos_ids=()):
    yield from _loop(
        model, prompt_ids, params, eos_ids,
        ends=lambda token, ids: any(i in eos_ids for i in [*ids, token]),
    )  # fmt: skip


@wrong(
    "The context is ignored: the model gets more tokens than model.config.context. Stop when the "
    "text has filled the context.",
    hints="context",
)
def _context_ignored(model, prompt_ids, params, cache=None, eos_ids=()):
    yield from _loop(model, prompt_ids, params, eos_ids, room=10_000)


@wrong(
    "It stops one token early at the end of the context. The model can still run on a full "
    "context. The token it then chooses is not fed back, so it needs no position.",
    hints="context",
)
def _context_one_short(model, prompt_ids, params, cache=None, eos_ids=()):
    yield from _loop(model, prompt_ids, params, eos_ids, room=0)


@wrong(
    "The tokens are right, but they all come at the end. `yield` each token as soon as it is "
    "chosen, so that a reader does not wait.",
    hints="lazy",
)
def _all_at_once(model, prompt_ids, params, cache=None, eos_ids=()):
    return iter(list(generate_tokens(model, prompt_ids, params, cache, eos_ids)))


@wrong(
    "The tokens are right, but the caller's prompt grows: append to a copy, `list(prompt_ids)`.",
    hints="copy",
)
def _prompt_grows(model, prompt_ids, params, cache=None, eos_ids=()):
    for chosen in generate_tokens(model, prompt_ids, params, cache, eos_ids):
        prompt_ids.append(chosen.token_id)
        yield chosen


@wrong("It yields bare ids. The engine reads `.token_id`: yield Sample(token).", hints="sample")
def _bare_ids(model, prompt_ids, params, cache=None, eos_ids=()):
    for chosen in generate_tokens(model, prompt_ids, params, cache, eos_ids):
        yield chosen.token_id


@wrong("The token ids are tensors. Make each one a plain number: int(...).", hints="sample")
def _tensor_ids(model, prompt_ids, params, cache=None, eos_ids=()):
    for chosen in generate_tokens(model, prompt_ids, params, cache, eos_ids):
        yield Sample(torch.tensor(chosen.token_id))


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
        Case(f"a context of {CONTEXT}, a prompt of {CONTEXT - 2}",
             ([*prompt, *prompt, 9, 2, 6, 5], 8, ()), kind="context", call=_collect),
        Case("a prompt of 16, which fills the context",
             ([*prompt, *prompt, *prompt, 9], 3, ()), kind="context", call=_collect),
        Case("three tokens taken, no more", (prompt,), kind="lazy", call=_first_three),
    ]  # fmt: skip


EXERCISES = (
    Exercise(
        "generate_tokens",
        _cases,
        hints={
            "loop": (
                "Day 1 has this loop in four lines. Which list did it append to, and which list "
                "did it run the model on?",
                "Keep a list of your own, `ids = list(prompt_ids)`. In each round: next_logits of "
                "the whole list, the position of the largest, yield it, append it.",
                "for _ in range(params.max_tokens): best = int(next_logits(model, ids).argmax()); "
                "yield Sample(best); ids.append(best)",
            ),
            "end": (
                "When the model writes an end token, does the caller see it? And which token do "
                "you compare with eos_ids?",
                "Compare only the token just chosen, with every id of eos_ids. Yield it before the "
                "loop stops.",
                "yield Sample(best), and below it: if best in eos_ids: return",
            ),
            "context": (
                "model.config.context is the most tokens that may go into the model. How many can "
                "you still choose when the prompt fills it exactly?",
                "One: the model runs on the full context and gives the next token. So with n "
                "tokens of prompt there are at most context - n + 1 rounds, and at most "
                "max_tokens.",
                "for _ in range(min(params.max_tokens, model.config.context - len(ids) + 1)):",
            ),
            "lazy": (
                "A reader waits in front of a screen. When does the first token appear there?",
                "A function with `yield` in it runs as far as the next `yield` and waits there. "
                "Collect nothing: yield inside the loop.",
                "Put `yield Sample(best)` where `answer.append(best)` stands, and return nothing.",
            ),
            "count": (
                "Count the yields: how many should there be when no end token comes?",
                "max_tokens, and the first one counts too.",
                "for _ in range(params.max_tokens): with one yield in each round",
            ),
            "row": (
                "The model returns a row of logits for every position. Which row is about the "
                "token after the whole text?",
                "The last one, and next_logits returns just that row.",
                "best = int(next_logits(model, ids).argmax())",
            ),
            "copy": (
                "The caller still has its prompt_ids. What do they hold after your loop?",
                "`ids = prompt_ids` is a second name for the caller's list. `list(...)` is a copy.",
                "ids = list(prompt_ids), and append to ids",
            ),
            "sample": (
                "What exactly do you yield?",
                "A Sample, whose token_id is an int. argmax gives a tensor.",
                "best = int(next_logits(model, ids).argmax()), then yield Sample(best)",
            ),
        },
        target="nanoserve.generate:generate_tokens",
        solution=generate_tokens,
        wrong=(
            _end_dropped, _one_too_many, _one_too_few, _first_position, _prompt_too,
            _only_the_newest, _never_appended, _never_ends, _first_end_only, _end_in_the_prompt,
            _context_ignored, _context_one_short, _all_at_once, _prompt_grows, _bare_ids,
            _tensor_ids, _prompt_counted,
        ),
    ),
)  # fmt: skip


REVIEW = (
    (
        "Day 5. What does the gate of a SwiGLU do that a plain MLP of two matrices cannot?",
        "It multiplies. silu(gate(x)) scales each number of up(x), and both come from the same "
        "input, so the layer can switch channels on and off for each token.",
    ),
    (
        "Day 5. Somebody uses GELU instead of SiLU, and the model still writes English. Why does "
        "nothing crash, and which test shows the mistake?",
        "Every shape is right, and the two curves look alike from a distance. A comparison with "
        "the oracle's activations shows it, or a test that is built to tell the two apart.",
    ),
    (
        "Day 6. SmolLM2 has 9 query heads and 3 KV heads. Which KV head serves query head 5, and "
        "which wrong formula gives 2?",
        "KV head 5 // 3 = 1: three neighbours share one. 5 % 3 = 2 has the right shape and the "
        "wrong keys.",
    ),
    (
        "Day 6. How do you prove that no token sees the future, without reading the mask?",
        "Change a later token and compare: every position before it must keep its output exactly.",
    ),
    (
        "Day 7. The norm stands before attention and before the MLP, not on the residual stream. "
        "What would attention and the MLP have to compute for a block to change nothing?",
        "Zero. The stream passes a block by addition, so thirty blocks can be stacked and the "
        "signal is never normed away.",
    ),
    (
        "Day 8. Logits differ from the oracle's by a few hundred-thousandths. Wrong, or rounding?",
        "Rounding, as long as it stays below 1e-5 of the largest logit: float32 sums depend on "
        "their order. A wrong formula is usually off by orders of magnitude more.",
    ),
    (
        "Day 9. Why does next_logits run the head on one position only?",
        "The other rows are about tokens that are already in the text. The head is a fifth of the "
        "weights, and choosing needs its product with one position only.",
    ),
    (
        "Day 9. Up to 64 equal tokens on each of ten prompts: what do they prove, and what not?",
        "It proves that 513 choices are the oracle's. It does not bound the error of the logits: "
        "where the best leads by 8, a large error changes nothing. So compare numbers as on Day 8, "
        "and tokens as today.",
    ),
)

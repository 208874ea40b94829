# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Day 10 · Sampling
#
# Week 3 · Phase 1, correct generation · you need: Day 9 (the greedy loop)
#
# **Today** the engine chooses at random. You write the four functions that shape the draw:
# temperature, top-k, top-p and min-p. Then you compare them with the oracle's, ties and edges
# included.

# %% jupyter={"source_hidden": true}
# Set-up: on Colab, installs nanoserve in a minute or two. In your own clone it does nothing.
import importlib.util, subprocess, sys
from pathlib import Path

REPOSITORY = ""  # on GitHub, OWNER/NAME
if importlib.util.find_spec("nanoserve") is None:
    wheels = sorted(Path.cwd().glob("nanoserve-*.whl"), key=lambda wheel: wheel.stat().st_mtime)
    source = f"https://github.com/{REPOSITORY}/archive/refs/heads/main.zip" if REPOSITORY else None
    source = wheels[-1].as_uri() if wheels else source
    if source is None:
        raise ModuleNotFoundError("put a nanoserve-*.whl beside this notebook, then run again")
    pip = [sys.executable, "-m", "pip", "install", "-q", f"nanoserve[notebook] @ {source}"]
    done = subprocess.run(pip, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"pip could not install nanoserve from {source}:\n{done.stdout}")
    importlib.invalidate_caches()

# %%
from nanoserve.course import day

today = day(10)
today.picture("sampling-masks")

# %% [markdown]
# ## Why it matters
#
# Greedy takes the largest logit every time. The same prompt always gives the same text, and long texts
# often repeat themselves. And where two tokens are nearly equal, greedy never takes the second.
#
# A model gives a probability for *each* token. **Sampling** uses all of them: it draws the next token,
# each with its probability. But then 49,152 tokens can be drawn at every step, and most of them are
# nonsense there. So the improbable ones are removed first, and there are several rules for that.
#
# The words of the day:

# %%
today.glossary()

# %% [markdown]
# ## How many tokens are likely?
#
# Take three prompts. For each, sort the tokens by probability, the best first, and add up until 90% is
# reached. How many tokens does that take?

# %%
asks = {
    "paris": "How many tokens hold 90% after 'The capital of France is'? (a number)",
    "story": "And after 'Once upon a time,'?",
}
for name, question in asks.items():
    today.predict(name, question, guess=None, low=1, high=49_152)

# %%
import torch

from nanoserve import load_model, load_tokenizer
from nanoserve.generate import next_logits

model, tokenizer = load_model("smollm2"), load_tokenizer("smollm2")
prompts = ["The capital of France is", "Once upon a time", "Once upon a time,"]
logits = {text: next_logits(model, tokenizer.encode(text)) for text in prompts}
for text in prompts:
    best = logits[text].softmax(dim=-1).topk(4)
    named = [f"{tokenizer.decode([i])!r} {p:.0%}" for p, i in zip(*(x.tolist() for x in best))]
    print(f"{text!r:27}", ", ".join(named))

# %%
from nanoserve.course import plots
from nanoserve.course.plots import COLOURS

held = {}  # for each prompt: the probability that its 1, 2, 3, ... best tokens hold together
for text in prompts:
    held[text] = logits[text].softmax(dim=-1).sort(descending=True).values.cumsum(dim=-1)
    print(f"{text!r:27} tokens that hold 90%: {int((held[text] < 0.9).sum()) + 1}")
print("your guesses:", today.guess_text("paris"), "and", today.guess_text("story"))
assert [int((held[text] < 0.9).sum()) + 1 for text in prompts] == [10, 1, 665]

# %% jupyter={"source_hidden": true}
# Draws the plot: How many tokens hold how much
fig, ax = plots.figure(
    xlabel="tokens, the best first",
    ylabel="probability they hold",
    title="How much the best tokens hold together",
)
ranks = range(1, 20_001)
with plots.style():
    for text in prompts:
        ax.plot(ranks, held[text][:20_000], color=COLOURS["engine"])
    ax.axhline(0.9, color=COLOURS["muted"], linestyle=":")
    ax.set(xscale="log", ylim=(0, 1.14), xlim=(0.8, 40_000))
    ax.set_xticks([1, 10, 100, 1_000, 10_000], ["1", "10", "100", "1,000", "10,000"])
plots.label_line(ax, 40, 0.70, prompts[2], COLOURS["engine"])
plots.label_line(ax, 1, 0.74, prompts[0], COLOURS["engine"])
plots.label_line(ax, 1, 1.05, prompts[1], COLOURS["engine"])
for name, height in (("paris", 0.16), ("story", 0.06)):
    if guess := today.guess(name):
        ax.vlines(guess, height, 0.9, color=COLOURS["prediction"], linestyle=":")
        plots.prediction_marker(ax, guess, height, f"your guess: {name}", "right")
fig

# %% [markdown]
# One comma changes the number from 1 to 665. After "Once upon a time" a comma holds 93% by itself. After
# the comma hundreds of words can begin the story.
#
# Keep these two prompts in mind. A good rule works for both, at every step, with the same setting.
#
# ## What a caller can set
#
# `SamplingParams` holds the caller's options. A value that makes no sense raises a ValueError that
# names the field, so that no option is ignored silently. NumPy's numbers are stored as Python's.

# %%
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real

# %% jupyter={"source_hidden": true}
# lands in nanoserve/sampling.py: HUGE, SamplingParams, _require
HUGE = sys.float_info.max


@dataclass(frozen=True)
class SamplingParams:
    """How to continue one sequence. A wrong type or range is a ValueError that names the field."""

    max_tokens: int = 16
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0  # 1 keeps all
    min_p: float = 0.0  # 0 keeps all
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: str | Sequence[str] = ()  # one string or several, kept as a tuple
    seed: int | None = None
    logprobs: int | None = None  # how many alternatives to report beside the token's own

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        _require(self, "max_tokens", Integral, 1, math.inf, "an integer of at least 1")
        _require(self, "temperature", Real, 0, HUGE, "a finite number of at least 0 (greedy)")
        _require(self, "top_k", Integral, 0, math.inf, "an integer of at least 0 (off)")
        _require(self, "top_p", Real, 0, 1, "a number from 0 to 1 (off)")
        _require(self, "min_p", Real, 0, 1, "a number from 0 (off) to 1")
        _require(self, "repetition_penalty", Real, math.ulp(0), HUGE, "a finite number above 0")
        _require(self, "presence_penalty", Real, -2, 2, "a number from -2 to 2")
        _require(self, "frequency_penalty", Real, -2, 2, "a number from -2 to 2")
        if not (isinstance(stop, list | tuple) and all(isinstance(s, str) and s for s in stop)):
            allowed = "a non-empty string, or a list or tuple of them"
            raise ValueError(f"stop must be {allowed}, got {self.stop!r}")
        if self.seed is not None:
            _require(self, "seed", Integral, 0, 2**64 - 1, "None or an integer from 0 to 2**64 - 1")
        if self.logprobs is not None:
            _require(self, "logprobs", Integral, 0, 20, "None or an integer from 0 to 20")
        object.__setattr__(self, "stop", tuple(stop))


def _require(
    params: SamplingParams, name: str, kind: type, low: float, high: float, allowed: str
) -> None:
    """Check that a field is an Integral or Real from low to high, and store it as int or float.

    NumPy's numbers pass; bool and NaN do not. Raises ValueError.
    """
    value = getattr(params, name)
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
        raise ValueError(f"{name} must be {allowed}, got {value!r}")
    if type(value) not in (int, float):
        plain = int(value) if isinstance(value, Integral) else float(value)
        object.__setattr__(params, name, plain)


# %%
for wish in [{"top_p": 1.5}, {"temperature": -1}, {"top_k": 2.0}, {"min_p": float("nan")}]:
    try:
        SamplingParams(**wish)
    except ValueError as error:
        print(error)

# %% [markdown]
# ## Your turn: temperature
#
# Divide every logit by the temperature $T$; softmax then makes probabilities of them:
#
# $$p_i = \frac{e^{z_i / T}}{\sum_j e^{z_j / T}}$$
#
# Below 1 the differences grow, and the best token gets more of the probability. Above 1 they shrink. 0
# means greedy, which the engine handles elsewhere, so `temperature` is above 0 here.
#
# `logits` are `[..., vocab]`, float32: one row, or several. Return logits of the same shape and dtype,
# and leave the caller's unchanged.
# `temperature` may be tiny, down to 1e-37. The probabilities must be right there too, and they must
# still depend on the temperature.
#
# After a kernel restart, run the cells above first (Run → Run All Above Selected Cell).


# %%
def apply_temperature(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Logits [..., vocab] -> logits [..., vocab] at this temperature, which is above 0."""
    raise NotImplementedError("your turn")


today.check(apply_temperature)

# %% [markdown]
# If you are stuck: `today.hint()`.
#
# The cell below holds the package's version; from here on this notebook uses it.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/sampling.py: apply_temperature
def apply_temperature(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Divide logits [..., vocab] by a temperature above 0: below 1 sharpens, above 1 flattens.

    The largest logit is subtracted first: no probability changes, and nothing overflows to +inf.
    Computes in float64, because float32 would round a temperature of 1e-50 to 0.
    """
    shifted = logits.double() - logits.amax(-1, keepdim=True)
    return (shifted / temperature).float()


# %% [markdown]
# Softmax depends on differences only. So moving the largest logit to 0 changes no probability, and after
# that a quotient can only become -inf, which is a probability of 0. A caller may also set a
# temperature of 1e-50. float32 has no number near that, so the package divides in float64.

# %%
print("temperature", *(f"{text!r:>27}" for text in prompts))
for temperature in (0.5, 0.7, 1.0, 1.5):
    best = [apply_temperature(logits[text], temperature).softmax(dim=-1).max() for text in prompts]
    print(f"{temperature:11}", *(f"{p:27.0%}" for p in best))

# %% [markdown]
# That is the probability of the best token. Temperature changes all probabilities and removes no token.
# The next three functions remove tokens.
#
# ## Your turn: top-k
#
# A **mask** returns new logits, with -inf for each removed token and the same logit for each other
# token. Softmax then shares the probability among the tokens that stay. The caller's logits stay
# unchanged. Top-k is the simplest mask: keep the $k$ largest logits.
#
# 1. Logits that tie with the k-th best stay too.
# 2. `top_k=0` means off. A `top_k` larger than the vocabulary keeps all.
# 3. Each row of `[..., vocab]` has its own k-th best.
#
# `logits.topk(k)` and `logits.masked_fill(condition, -torch.inf)` are all you need.
#
# After a kernel restart, run the cells above first.


# %%
def mask_top_k(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """Keep the top_k largest of logits [..., vocab], and their ties; -inf elsewhere."""
    raise NotImplementedError("your turn")


today.check(mask_top_k)

# %% [markdown]
# The cell below holds the package's version; from here on this notebook uses it.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/sampling.py: mask_top_k
def mask_top_k(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """Keep the top_k largest logits, and all that equal the smallest of these; 0 keeps all."""
    if top_k == 0:
        return logits
    last = logits.topk(min(top_k, logits.shape[-1])).values[..., -1:]  # [..., 1]
    return logits.masked_fill(logits < last, -torch.inf)


# %% [markdown]
# Top-k keeps the same number everywhere. `k = 40` keeps 40 tokens after "Once upon a time", where one
# holds 90%, and removes hundreds of good beginnings after the comma.
#
# ## Your turn: top-p
#
# Keep the fewest tokens that together hold the probability `top_p`. That may be one token or hundreds.
# With probabilities 0.5, 0.41 and 0.09, and `top_p = 0.9`:
#
# | token | probability | sum before it | sum with it | |
# | --- | --- | --- | --- | --- |
# | A | 0.50 | 0.00 | 0.50 | stays |
# | B | 0.41 | 0.50 | 0.91 | stays: the sum before it is less than 0.9 |
# | C | 0.09 | 0.91 | 1.00 | goes: 0.9 is reached before it |
#
# 1. A token stays while the sum *before* it is less than `top_p`.
# 2. The best token always stays, also at `top_p = 0`. At `top_p = 1` all tokens stay.
# 3. Of several equal tokens, only as many stay as are needed to reach `top_p`, any of them.
# 4. Sort to add up, and bring the mask back into the order of the ids. `sort` returns those ids;
#    `mask.scatter(-1, ids, mask)` moves each entry to its id.
#
# Rule 2 has a trap: float32 has about 7 digits, so with thousands of tokens the sum can reach 1 before
# the last of them.
#
# After a kernel restart, run the cells above first.


# %%
def mask_top_p(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the fewest of logits [..., vocab] whose probabilities reach top_p; -inf elsewhere."""
    raise NotImplementedError("your turn")


today.check(mask_top_p)

# %% [markdown]
# The cell below holds the package's version; from here on this notebook uses it.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/sampling.py: mask_top_p
def mask_top_p(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the fewest tokens whose probabilities reach top_p (Holtzman et al. 2020, section 3.1).

    Sums probabilities from the smallest up, and removes tokens while the sum is at most 1 - top_p.
    The most probable token always stays.
    """
    ascending, ids = logits.sort(dim=-1)
    tail = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
    tail[..., -1] = False
    return logits.masked_fill(tail.scatter(-1, ids, tail), -torch.inf)


# %% [markdown]
# The package adds up from the smallest, as `transformers` does, and removes tokens while their sum is
# `1 - top_p` or less. That is the same rule from the other end. And when the small numbers are added
# first, rounding loses less of them. At `top_p = 1` every token with a probability above 0 stays.
#
# ## Your turn: min-p
#
# The newest of the three, and the shortest. Keep the tokens that are at least `min_p` times as probable
# as the best one. At `min_p = 0.1`, a token stays if it is at least a tenth as probable as the best.
#
# After a kernel restart, run the cells above first.


# %%
def mask_min_p(logits: torch.Tensor, min_p: float) -> torch.Tensor:
    """Keep what is at least min_p times as probable as the best of its row; -inf elsewhere."""
    raise NotImplementedError("your turn")


today.check(mask_min_p)

# %% [markdown]
# The cell below holds the package's version; from here on this notebook uses it.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/sampling.py: mask_min_p
def mask_min_p(logits: torch.Tensor, min_p: float) -> torch.Tensor:
    """Keep tokens at least min_p times as probable as the best (Nguyen et al. 2024, section 3)."""
    probs = torch.softmax(logits, dim=-1)
    return logits.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), -torch.inf)


# %% [markdown]
# ## All four, in order
#
# The order matters. Temperature comes first, so a high temperature makes top-p keep more tokens. Each
# mask then works on the tokens that the mask before it kept. This is the order of `transformers`.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/sampling.py: distribution
def distribution(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The probabilities a draw uses, [..., vocab]: temperature, top-k, top-p, min-p, softmax."""
    logits = apply_temperature(logits, params.temperature)
    if params.top_k > 0:
        logits = mask_top_k(logits, params.top_k)
    if params.top_p < 1:
        logits = mask_top_p(logits, params.top_p)
    if params.min_p > 0:
        logits = mask_min_p(logits, params.min_p)
    return torch.softmax(logits, dim=-1)


# %%
def survivors(text, **wish):
    """How many tokens can still be drawn."""
    return int(
        (distribution(logits[text], SamplingParams(**{"temperature": 1.0} | wish)) > 0).sum()
    )


wishes = [
    {"top_k": 40},
    {"top_p": 0.9},
    {"min_p": 0.1},
    {"top_p": 0.9, "temperature": 0.7},
    {"min_p": 0.1, "temperature": 1.5},
]
print(f"{'tokens left':33}", *(f"{text!r:>27}" for text in prompts))
for wish in wishes:
    name = ", ".join(f"{key}={value}" for key, value in wish.items())
    print(f"{name:33}", *(f"{survivors(text, **wish):27,}" for text in prompts))

# %% [markdown]
# Top-p and min-p follow the distribution, and top-k does not. Now one more row. At temperature 1.5 the
# improbable tokens hold so much together that it takes thousands of tokens to reach 90%:

# %%
hot = [survivors(text, temperature=1.5, top_p=0.9) for text in prompts]
print("top_p=0.9, temperature=1.5, to the nearest thousand:", [f"{round(n, -3):,}" for n in hot])
assert min(hot) > 1_000

# %% [markdown]
# That is thousands of tokens after "Once upon a time" too. Min-p solves this: its bar depends on the best
# token only, so a long tail of improbable tokens does not lower it. Try the settings below. The
# outlined bars are the model's probabilities. The filled bars are the probabilities of the draw.

# %% tags=["nbval-ignore-output"]
after = logits["Once upon a time,"]
labels = [repr(tokenizer.decode([i])) for i in after.topk(14).indices.tolist()]
today.widget("sampling", logits=after, tokens=labels)

# %% [markdown]
# ## The draw
#
# Take one uniform random number between 0 and 1, and the running sum of the probabilities. The first
# token whose sum exceeds the number is drawn. So each token is drawn with its probability, and a token
# of probability 0 is never drawn.
#
# A **seed** makes draws repeatable. It starts a random generator, which belongs to one sequence. Make
# the generator once: a new generator at each step would give the same number each time.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/sampling.py: draw, make_generator
def draw(probs: torch.Tensor, generator: torch.Generator | None = None) -> int:
    """Draw one id from probs [vocab] with one uniform number: the first id whose running sum
    exceeds the number. Never draws an id of probability 0. Default: torch's global generator."""
    sums = probs.double().cumsum(dim=-1)  # [vocab]; in float32 the rounding would favour some ids
    device = probs.device if generator is None else generator.device
    uniform = torch.rand((), dtype=torch.float64, device=device, generator=generator)
    return int(torch.searchsorted(sums, uniform.to(sums.device) * sums[-1], right=True))


def make_generator(seed: int | None, device: str | torch.device = "cpu") -> torch.Generator | None:
    """A generator that starts from `seed`; None, for torch's global generator, if seed is None.

    A generator on the CPU draws the same numbers for logits on every device.
    """
    return None if seed is None else torch.Generator(device).manual_seed(seed)


# %%
generator = make_generator(7)
probs = torch.tensor([0.5, 0.0, 0.3, 0.2])
once = [draw(probs, generator) for _ in range(12)]
generator = make_generator(7)
again = [draw(probs, generator) for _ in range(12)]
print("the same 12 draws:", once == again, "  the token of probability 0 was drawn:", 1 in once)
assert once == again and 1 not in once

# %% [markdown]
# ## Penalties
#
# Three more options help against text that repeats itself. They are applied before temperature and the
# masks, and to greedy too.
#
# | field | effect on a logit | for tokens in |
# | --- | --- | --- |
# | `repetition_penalty` | divides a positive one, multiplies a negative one | the prompt or the answer |
# | `presence_penalty` | subtracts, once | the answer |
# | `frequency_penalty` | subtracts, once for each use | the answer |
#
# Why not always divide? A logit of -2 divided by 2 is -1, and that is *more* probable.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/sampling.py: apply_penalties, _count
def apply_penalties(
    logits: torch.Tensor,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    params: SamplingParams,
) -> torch.Tensor:
    """Make used tokens less likely: [..., vocab] -> [..., vocab].

    Repetition (Keskar et al. 2019, section 4.1) divides the positive logits of all tokens in the
    prompt or the output, and multiplies the negative ones. Presence is subtracted once from each
    token in the output, frequency once for each time that the token occurs there.
    """
    repetition, presence = params.repetition_penalty, params.presence_penalty
    if (repetition, presence, params.frequency_penalty) == (1, 0, 0):
        return logits
    uses = _count(output_ids, logits)  # [vocab]
    seen = uses + _count(prompt_ids, logits) > 0
    scaled = torch.where(logits < 0, logits * repetition, logits / repetition)
    logits = torch.where(seen, scaled, logits)
    return logits - presence * (uses > 0) - params.frequency_penalty * uses


def _count(ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """How often each id of the vocabulary occurs in ids: int64 [vocab]."""
    ids = torch.as_tensor(ids, dtype=torch.long, device=logits.device)
    return torch.bincount(ids, minlength=logits.shape[-1])


# %%
cat = tokenizer.encode("The cat sat on the mat. The cat sat on the")
row = next_logits(model, cat)
for penalty in (1.0, 1.3):
    scores = apply_penalties(row, cat, [], SamplingParams(repetition_penalty=penalty))
    print(penalty, [tokenizer.decode([i]) for i in scores.topk(3).indices.tolist()])

# %% [markdown]
# ## All of it, for one token
#
# Note three things as you read. At temperature 0 no random number is drawn. If the largest logit is NaN
# or infinite, `sample` raises an error: a broken model must not look like an odd choice of words. And
# the logprobs are the model's own, from before penalties, temperature and masks.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/sampling.py: Sample, sample
@dataclass(frozen=True)
class Sample:
    """One chosen token. Logprobs are the model's: before penalties, temperature and masks.

    `logprob` and `top` are None unless SamplingParams.logprobs is set. `top` maps the ids of the
    most probable tokens to their logprobs, best first; the chosen token may be absent from it.
    """

    token_id: int
    logprob: float | None = None
    top: dict[int, float] | None = None


def sample(
    logits: torch.Tensor,
    params: SamplingParams,
    generator: torch.Generator | None = None,
    prompt_ids: Sequence[int] = (),
    output_ids: Sequence[int] = (),
) -> Sample:
    """Choose the token after prompt_ids + output_ids, from the logits [vocab] of the last position.

    Temperature 0 takes the largest logit after penalties; the lowest id wins a tie. A seed needs
    one generator of make_generator(seed) for the whole sequence. Raises ValueError if the generator
    is missing, if logits has another shape, and if the largest logit is not finite.
    """
    if params.temperature > 0 and params.seed is not None and generator is None:
        raise ValueError(f"seed {params.seed} needs a generator: pass make_generator(seed)")
    if logits.ndim != 1:
        raise ValueError(f"logits must be [vocab], got shape {list(logits.shape)}")
    raw = logits.float()
    scores = apply_penalties(raw, prompt_ids, output_ids, params)
    peak, best = scores.max(dim=-1)
    if not math.isfinite(peak):
        raise ValueError(f"the largest logit is {peak.item()}: nothing to sample from")
    token = int(best) if params.temperature == 0 else draw(distribution(scores, params), generator)
    if params.logprobs is None:
        return Sample(token)
    logprobs = torch.log_softmax(raw, dim=-1)  # [vocab]
    top = logprobs.topk(min(params.logprobs, len(logprobs)))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return Sample(token, logprobs[token].item(), dict(pairs))


# %%
chosen = sample(logits["The capital of France is"], SamplingParams(logprobs=3))
print(
    f"{tokenizer.decode([chosen.token_id])!r}, logprob {chosen.logprob:.2f}, {math.exp(chosen.logprob):.0%}"
)
print({tokenizer.decode([i]): round(logprob, 2) for i, logprob in chosen.top.items()})

# %% [markdown]
# ## Prove it
#
# `transformers` has the same masks, written by other people. Real logits rarely tie, so a test on them
# would miss the edges. Make logits that tie often, some of them -inf, and compare bit for bit.

# %%
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


def random_logits(generator):
    """Two rows of 43 logits on a coarse grid, so that many are equal, and some are -inf."""
    rows = torch.randint(-8, 9, (2, 43), generator=generator) / 4
    return rows.masked_fill(torch.rand(rows.shape, generator=generator) < 0.2, -torch.inf)


def theirs(warper, rows):
    return warper(None, rows.clone())


# %%
generator, same = make_generator(10), {"top-k": 0, "top-p": 0, "min-p": 0, "temperature": 0}
for _ in range(300):
    rows = random_logits(generator)
    k = int(torch.randint(1, 60, (), generator=generator))
    p = float(torch.rand((), generator=generator)) if k % 4 else 0.5
    warm = theirs(TemperatureLogitsWarper(0.1 + p), rows).softmax(dim=-1)
    same["top-k"] += torch.equal(mask_top_k(rows, k), theirs(TopKLogitsWarper(k), rows))
    same["top-p"] += torch.equal(mask_top_p(rows, p), theirs(TopPLogitsWarper(p), rows))
    same["min-p"] += torch.equal(mask_min_p(rows, p), theirs(MinPLogitsWarper(p), rows))
    same["temperature"] += torch.allclose(apply_temperature(rows, 0.1 + p).softmax(dim=-1), warm)
print("equal, of 300:", same)
assert set(same.values()) == {300}

# %% [markdown]
# (`k` is sometimes larger than the vocabulary of 43, and `p` sometimes exactly 0.5. For temperature the
# probabilities are compared, up to rounding, since we shift the logits and `transformers` does not.)
#
# Temperature 0 is greedy, a tiny temperature is greedy here too, and a seed repeats its draws:


# %%
def draws(wish, count=8):
    """Tokens drawn from the open distribution, as one sequence would."""
    generator = make_generator(wish.seed)
    return [sample(after, wish, generator).token_id for _ in range(count)]


best = int(after.argmax())
print("temperature 0 is greedy:   ", draws(SamplingParams()) == [best] * 8)
print("0.00001 is greedy in effect:", draws(SamplingParams(temperature=1e-5, seed=1)) == [best] * 8)
one, two = SamplingParams(temperature=1.0, seed=1), SamplingParams(temperature=1.0, seed=2)
print("a seed repeats:            ", draws(one) == draws(one))
print("another seed differs:      ", draws(one) != draws(two))
assert draws(SamplingParams()) == draws(SamplingParams(temperature=1e-5, seed=1)) == [best] * 8
assert draws(one) == draws(one) != draws(two)

# %% [markdown]
# And are the draws fair? Draw 10,000 times from six tokens. The counts never fit the probabilities
# exactly; **chi-square** measures how far they are apart. One of the six has probability 0, so there
# are five counts. They add up to 10,000, so four of them are free. With four free counts, a fair
# sampler exceeds 18.47 in one of a thousand tries.

# %%
small = torch.tensor([1.0, -0.5, 0.25, -torch.inf, 2.0, 0.0])
wish = SamplingParams(temperature=0.7, seed=10)
generator = make_generator(wish.seed)
counts = torch.zeros(6)
for _ in range(10_000):
    counts[sample(small, wish, generator).token_id] += 1
expected = 10_000 * distribution(small, wish)
fair = expected > 0
chi_square = ((counts - expected)[fair] ** 2 / expected[fair]).sum()
print(
    "chi-square below 18.47:",
    bool(chi_square < 18.47),
    "  times the impossible one was drawn:",
    int(counts[3]),
)
assert chi_square < 18.47 and counts[3] == 0

# %% jupyter={"source_hidden": true}
# Draws the plot: 10,000 draws, and what was expected
fig, ax = plots.figure(
    height=3.2, xlabel="token", ylabel="times drawn", title="10,000 draws, and what was expected"
)
with plots.style():
    ax.bar(range(6), counts, color=COLOURS["engine"], width=0.6)
    for token, height in enumerate(expected.tolist()):
        ax.hlines(height, token - 0.4, token + 0.4, color=COLOURS["ink"], linestyle="--")
plots.label_line(ax, 4.4, expected[4], "expected", COLOURS["ink"])
ax.set(xlim=(-0.6, 6.2), xticks=range(6))
ax.grid(axis="x", visible=False)
fig

# %% [markdown]
# ## Your answer is the engine
#
# The same beginning four times, with one seed. `today.mine()` runs the engine with those of your answers
# that have passed. Below the texts it shows how often each was called.

# %%
from nanoserve import LLM, SamplingParams

llm = LLM("smollm2")


def story(**wish):
    (completion,) = llm.generate("Once upon a time,", SamplingParams(max_tokens=14, seed=1, **wish))
    return completion.text


with today.mine():
    print(repr(story(temperature=0.8, top_p=0.9)))
    print(repr(story(temperature=0.8, top_k=40)))
    print(repr(story(temperature=1.5, min_p=0.1)))
    print(repr(story(temperature=1.5)))

# %% [markdown]
# The last one has no mask. At that temperature the improbable tokens hold much of the probability
# together, so sooner or later one of them is drawn, and the text loses its sense.
#
# Today does not show which setting is *best*. That depends on readers, and no test of the engine can
# decide it. A test can show that each setting does what its name says.
#
# ## What you learned
#
# 1. **A model gives a distribution; a rule chooses from it.** Greedy is one rule, and it ignores how
#    close the second token is.
# 2. **A good mask follows the distribution.** One comma turns one likely token into hundreds, and no
#    fixed k fits both.
# 3. **Sampling goes wrong at the edges:** the token that reaches top-p, the tie at the k-th place, the
#    temperature near 0. Test on logits that have many of them.
#
# ## Tomorrow
#
# The loop still runs the whole text through the model for each token, although nothing before the new
# token has changed. Day 11 keeps the keys and values.
#
# **In one paragraph.** We drew the next token instead of taking the best. Temperature changes the
# probabilities, top-k keeps by rank, top-p by the sum of probabilities, min-p by the ratio to the best,
# and three penalties make repetition less likely. On 300 pairs of rows with many ties the masks equal
# those of transformers bit for bit, ten thousand draws were fair, and a seed repeats its draws. After
# "Once upon a time" one token holds 90%; after the comma it takes 665.

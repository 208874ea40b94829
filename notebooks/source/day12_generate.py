# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Day 12 · One loop for both
#
# Week 3 · Phase 1, correct generation · you need: Day 10 (Sampling), Day 11 (Remember the keys)
#
# **Today** the pieces become an engine. One loop serves greedy and sampled, cached and not; text
# streams while it is made; and a stop string ends an answer before anybody has seen a letter of it.

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

today = day(12)
today.picture("one-loop")

# %% [markdown]
# ## Why it matters
#
# So far you have called the model and looked at ids. People who use an engine see something else:
# text that begins soon, runs steadily, and stops where it should. Behind that stand three promises:
#
# 1. What is shown is never taken back. A screen, or a client on the network, cannot un-see.
# 2. What is held back is as little as possible, for as short as possible.
# 3. An answer is the same whether it streams or comes in one piece.
#
# The third is where engines drift apart: two code paths, one for streams and one for batches, and a
# bug in one of them. Ours has one.

# %%
today.glossary(
    "streaming",
    "stop string",
    "finish reason",
    "end token",
    "time to first token",
    "time per token",
)

# %% [markdown]
# ## The loop, at last
#
# Day 9 wrote a greedy loop, and Day 11 changed what a step hands over. Put Day 10's `sample` where
# the argmax was, and all is in one place. Two lines decide everything:
#
# - `sample(next_logits(...), params, ...)`: temperature 0 is greedy, so greedy is not a second loop.
# - `step = ids if cache is None else [chosen.token_id]`: with or without memory is not one either.

# %%
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path

import torch

from nanoserve.cache import NaiveKVCache
from nanoserve.layers import Cache
from nanoserve.generate import next_logits
from nanoserve.model import Model, load_model
from nanoserve.sampling import Sample, SamplingParams, make_generator, sample
from nanoserve.tokenizer import Detokenizer, Tokenizer, load_tokenizer


# %% jupyter={"source_hidden": true}
# lands in nanoserve/generate.py: generate_tokens
def generate_tokens(
    model: Model,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    cache: Cache | None = None,
    eos_ids: Sequence[int] = (),
) -> Iterator[Sample]:
    """The loop: run the model, choose a token, append it.

    Stops after an end token (which it yields), after max_tokens, or when the context is full. With
    a cache, which must be empty, each step after the first computes one token.
    """
    generator = make_generator(params.seed, model.device)
    ids = list(prompt_ids)
    step = ids  # the tokens to compute: first the prompt, then one at a time
    for _ in range(min(params.max_tokens, model.config.context - len(ids) + 1)):
        chosen = sample(
            next_logits(model, step, cache), params, generator, prompt_ids, ids[len(prompt_ids) :]
        )
        yield chosen
        if chosen.token_id in eos_ids:
            return
        ids.append(chosen.token_id)
        step = ids if cache is None else [chosen.token_id]


# %% [markdown]
# Four ways through one loop. A seed makes the dice fall the same way each time, so that even sampled
# text can be compared with and without the cache.

# %%
model, tokenizer = load_model("smollm2"), load_tokenizer("smollm2")
prompt = tokenizer.encode("The best thing about the sea is")
for name, params in (
    ("greedy ", SamplingParams(max_tokens=8)),
    ("sampled", SamplingParams(max_tokens=8, temperature=0.8, top_p=0.95, seed=12)),
):
    plain = [s.token_id for s in generate_tokens(model, prompt, params)]
    cached = [
        s.token_id for s in generate_tokens(model, prompt, params, NaiveKVCache(model.config))
    ]
    print(f"{name} with and without a cache the same {len(cached)} tokens: {plain == cached}")
    assert plain == cached

# %% [markdown]
# ## Text that must not be shown
#
# A caller may ask to stop at some text: a blank line, "User:", a closing bracket. It is easy to ask
# for, and it is harder to do than it looks, because the text comes in tokens and nobody cut the
# tokens where the stop string begins. Here is an answer of the oracle's, token by token:

# %%
recorded = today.data("reference_greedy")["greedy"]
answer = recorded["chat-list"]["greedy_ids"]
print([tokenizer.decode([i]) for i in answer])

# %% [markdown]
# Ask it to stop at "Oranges". No token is that word. What would a loop show that looks at each piece
# alone, or one that looks at the whole text but shows every piece at once?

# %%
shown, seen = "", ""
for token_id in answer:
    piece = tokenizer.decode([token_id])
    seen += piece
    if "Oranges" in seen:
        break
    shown += piece
print(repr(shown))

# %% [markdown]
# The stop was found, and half of it is on the screen. What *should* be shown after each piece? All of
# the text, except an **end that could still become a stop string**. With the stop string `END`:
#
# | text so far | shown | held back | why |
# | --- | --- | --- | --- |
# | `All done` | `All done` | | no end of it begins END |
# | `All done. E` | `All done. ` | `E` | E begins END |
# | `All done. EN` | `All done. ` | `EN` | so does EN |
# | `All done. ENT` | `All done. ENT` | | no more; it was only text |
# | `All done. END of` | `All done. ` | | it is one: stop, and show nothing of it |
#
# ## Your turn: `StopStrings`
#
# A small class between the tokens and the reader:
#
# 1. `add(piece)` takes new text and returns what can be shown now.
# 2. It holds back the **longest** end of the text that begins some stop string, and nothing more.
# 3. When a stop string is complete, `found` becomes True, what stands before it is shown, and
#    nothing from then on.
# 4. Of several, the one that is **complete first** counts; of two that end together, the longer. This
#    is what you get letter by letter, so the answer does not depend on how the text was cut.
# 5. `finish()` returns what was held and never became a stop string. No more text will come.
#
# The check's table lists what each piece let through; the last in the list is what `finish` gave, and
# behind it stands `found`. `(['All done', '. ', '', '', '', ''], True)` means: two pieces showed
# something, and then the stop string came.
# Stuck? `today.hint()` looks at the case that failed.


# %%
class StopStrings:
    """Holds text back for as long as it may still turn out to be a stop string."""

    def __init__(self, stops):
        self.found = False
        raise NotImplementedError("your turn")

    def add(self, piece: str) -> str:
        """The text that can be shown now; once a stop string has come, nothing from it on."""
        raise NotImplementedError("your turn")

    def finish(self) -> str:
        """What was held back and never became a stop string."""
        raise NotImplementedError("your turn")


today.check(StopStrings)


# %% jupyter={"source_hidden": true}
# lands in nanoserve/generate.py: StopStrings
class StopStrings:
    """Holds text back while it may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found = False

    def add(self, piece: str) -> str:
        """The text that can be shown now. From the first stop string on, nothing."""
        if self.found:
            return ""
        text = self._held + piece
        found = [(text.find(s) + len(s), text.find(s)) for s in self._stops if s in text]
        if found:  # The stop string that is complete first: the cut between pieces does not matter.
            self.found, self._held = True, ""
            return text[: min(found)[1]]
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text that is still held back."""
        text, self._held = self._held, ""
        return text

    def _undecided(self, text: str) -> int:
        """The length of the longest suffix of text that is a prefix of a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        return next(
            (
                n
                for n in range(min(longest, len(text)), 0, -1)
                if any(stop.startswith(text[-n:]) for stop in self._stops)
            ),
            0,
        )


# %%
stop, shown = StopStrings(["Oranges"]), []
for token_id in answer:
    shown.append(stop.add(tokenizer.decode([token_id])))
print([*shown, stop.finish()], stop.found)

# %% [markdown]
# The empty strings are moments of waiting. Nothing of "Oranges" came through.
#
# ## Prove it: every stop string there is
#
# Ten recorded answers. Take **every** run of 1 to 8 characters in each of them as a stop string; send
# the answer through token by token, and compare with the plain truth: the text up to where that
# string first ends.


# %%
def streamed(ids, stops):
    """The pieces that a reader sees of these tokens."""
    detokenizer, stop = Detokenizer(tokenizer), StopStrings(stops)
    pieces = [stop.add(detokenizer.add(i)) for i in ids]
    return [*pieces, stop.add(detokenizer.finish()), stop.finish()]


tried, split, leaked = 0, 0, 0
for case in recorded.values():
    ids = [i for i in case["greedy_ids"] if i not in model.config.eos_ids]
    text, parts = tokenizer.decode(ids), [tokenizer.decode([i]) for i in ids]
    for wanted in {text[i : i + n] for i in range(len(text)) for n in range(1, 9)}:
        tried += 1
        split += not any(wanted in part for part in parts)
        leaked += "".join(streamed(ids, [wanted])) != text[: text.find(wanted)]
print(
    f"more than {tried // 1000},000 stop strings, more than {split // 1000},000 of them over several tokens"
)
print("leaked or lost:", leaked)
assert leaked == 0

# %% [markdown]
# And without any of them, nothing is lost: the pieces are the text.

# %%
for name in ("emoji", "japanese", "story"):
    ids = recorded[name]["greedy_ids"]
    pieces = streamed(ids, ["no such text"])
    print(name, "".join(pieces) == tokenizer.decode(ids))

# %% [markdown]
# ## A stream, and what is left of it
#
# `Stream` is the loop with its three filters in a row: tokens, then characters (Day 3's detokeniser),
# then stop strings. `Completion` is what remains when it is over.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/generate.py: Completion, Stream
@dataclass(frozen=True)
class Completion:
    """The result of one prompt.

    `text` excludes the end token and the stop string; `token_ids` has every generated token.
    `finish_reason` is "stop" (an end token or a stop string) or "length". `logprobs` has one Sample
    per token if SamplingParams.logprobs is set, else it is None.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[Sample] | None = None


class Stream:
    """Yields pieces of text; iterate once. The pieces joined are completion.text."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        ids: list[int],
        params: SamplingParams,
        cache: Cache | None,
    ) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason = "length"
        self._logprobs: list[Sample] = []
        self._params = params
        self._pieces = self._run(model, tokenizer, ids, cache)

    def __iter__(self) -> Iterator[str]:
        for piece in self._pieces:
            if piece:
                self.text += piece
                yield piece

    def _run(
        self, model: Model, tokenizer: Tokenizer, ids: list[int], cache: Cache | None
    ) -> Iterator[str]:
        eos_ids = model.config.eos_ids
        detokenizer = Detokenizer(tokenizer, ids)
        stop = StopStrings(self._params.stop)
        for chosen in generate_tokens(model, ids, self._params, cache, eos_ids):
            self.token_ids.append(chosen.token_id)
            self._logprobs.append(chosen)
            if chosen.token_id in eos_ids:
                self.finish_reason = "stop"
                break
            yield stop.add(detokenizer.add(chosen.token_id))
            if stop.found:
                break
        yield stop.add(detokenizer.finish())
        yield stop.finish()
        if stop.found:
            self.finish_reason = "stop"

    @property
    def completion(self) -> Completion:
        """The whole result; runs the rest of the stream first."""
        for _ in self:
            pass
        logprobs = None if self._params.logprobs is None else self._logprobs
        return Completion(self.text, self.token_ids, self.finish_reason, logprobs)


# %% [markdown]
# Look at `completion`: the batch answer is the stream, read to its end. There is no second path that
# could give other text.
#
# Then the public face. It is long, but it holds no idea that you have not met: it loads a model and a
# tokenizer, makes **a new cache for every prompt** (Day 11's stale past), and refuses bad prompts by
# name before any work is done.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/generate.py: LLM
class LLM:
    """A model, its tokenizer and a kind of cache: the public interface of the engine."""

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        params: SamplingParams | None = None,
    ) -> list[Completion]:
        """Complete one prompt or several. A prompt is text, or token ids, which are used unchanged.

        Raises ValueError, before any work, for a prompt that is empty or longer than the model's
        context, and for an id outside the vocabulary.
        """
        if not isinstance(prompts, str) and not hasattr(prompts, "__len__"):
            raise ValueError(f"prompts must be text, token ids, or a list of them, got {prompts!r}")
        single = isinstance(prompts, str) or (len(prompts) and not isinstance(prompts[0], Sequence))
        checked = [self._prompt_ids(prompt) for prompt in ([prompts] if single else prompts)]
        return [self.stream(ids, params).completion for ids in checked]

    def chat(
        self, messages: list[dict[str, str]], params: SamplingParams | None = None
    ) -> Completion:
        """Complete a conversation [{"role": "user", "content": …}, …]; errors as for generate."""
        return self.stream(self.chat_ids(messages), params).completion

    def chat_ids(self, messages: list[dict[str, str]]) -> list[int]:
        """The token ids of a conversation in the checkpoint's chat template."""
        return self.tokenizer.encode(self.tokenizer.render_chat(messages), parse_special=True)

    def _prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            ids = self.tokenizer.prefix_ids + self.tokenizer.encode(prompt)
        else:
            for i in prompt:
                if isinstance(i, bool) or not isinstance(i, Integral):
                    raise ValueError(f"a prompt is text or integer token ids, got {i!r} in it")
            ids = [int(i) for i in prompt]
        config = self.model.config
        if not ids:
            raise ValueError("the prompt is empty")
        if len(ids) > config.context:
            raise ValueError(
                f"the prompt has {len(ids)} tokens, the model's context holds {config.context}"
            )
        for i in ids:
            if not 0 <= i < config.vocab_size:
                raise ValueError(f"token id {i} is outside the vocabulary of {config.vocab_size}")
        return ids


# %% [markdown]
# What is missing is how it begins, and how a stream gets its cache. There is one kind today; Day 19 adds
# the paged one and rewrites this cell.


# %% jupyter={"source_hidden": true}
# until day 19: lands in nanoserve/generate.py: CACHES, new_cache, LLM.__init__, LLM.stream
CACHES = ("naive",)


def new_cache(kind: str | None, model: Model, tokens: int) -> Cache | None:
    """An empty cache of a kind in CACHES with room for `tokens` tokens; None is no cache."""
    return None if kind is None else NaiveKVCache(model.config)


class LLM(LLM):
    def __init__(
        self,
        source: str | Path = "smollm2",
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        cache: str | None = "naive",
    ) -> None:
        """source as for load_model; cache "naive", or None to recompute every step."""
        if cache is not None and cache not in CACHES:
            known = ", ".join(map(repr, CACHES))
            raise ValueError(f"cache {cache!r} is not known; supported: {known}, None")
        self.model = load_model(source, dtype, device)
        self.tokenizer = load_tokenizer(source)
        self._cache = cache

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Stream:
        """Complete one prompt, giving pieces of text as they come; errors as for generate."""
        ids, params = self._prompt_ids(prompt), params or SamplingParams()
        tokens = min(len(ids) + params.max_tokens, self.model.config.context)
        cache = new_cache(self._cache, self.model, tokens)
        return Stream(self.model, self.tokenizer, ids, params, cache)


# %% [markdown]
# ## Prove it: the engine
#
# The engine whole, made of the cells above. Streamed and in one piece, with a stop string that is split
# over tokens, and with one that never comes:

# %%
llm = LLM("smollm2")
question = llm.chat_ids([{"role": "user", "content": "List three fruits that are red."}])
for stop in (["Oranges"], ["\n2"], ["Melon"]):
    params = SamplingParams(max_tokens=20, stop=stop)
    pieces = list(llm.stream(question, params))
    (batch,) = llm.generate(question, params)
    print(f"{stop[0]!r:10} {batch.finish_reason} {batch.text!r}")
    assert "".join(pieces) == batch.text
    assert stop[0] not in batch.text

# %% [markdown]
# An answer ends for one of two reasons. `"stop"`: the model wrote an end token, or a stop string came.
# `"length"`: `max_tokens` were written, or the context is full. A program that sees "length" knows
# that the answer is cut off.

# %%
for tokens in (4, 20):
    (c,) = llm.generate(question, SamplingParams(max_tokens=tokens))
    print(f"{len(c.token_ids):2} tokens, {c.finish_reason:6} {c.text!r}")

# %% [markdown]
# Bad requests are told in one sentence, before anything runs:

# %%
for prompt_or_ids in ("", [1, 49_152], ["a", 2.5]):
    try:
        llm.generate([prompt_or_ids])
    except ValueError as error:
        print(error)

# %% [markdown]
# ## Measure it: what a reader waits for
#
# A reader feels two numbers: the **time to first token**, and the **time per token** after that. The
# first is prefill, so it grows with the prompt. The second is decode.
#
# Two prompts, 16 tokens long and 256, and 12 tokens of answer to each. If the answer came in one piece,
# a reader would wait for all of it. With a stream they wait for the first piece only.

# %%
today.predict(
    "share",
    "Short prompt: after what share of the whole time is the first piece there? (0 to 1)",
    guess=None,
)

# %%
import time

long_prompt = tokenizer.encode("One day at the harbour, the gulls and the boats. " * 30)


def arrivals(length):
    """Milliseconds from the question to each token of its answer."""
    begin, stamps = time.perf_counter(), []
    cache = NaiveKVCache(model.config)
    for _ in generate_tokens(model, long_prompt[:length], SamplingParams(max_tokens=12), cache):
        stamps.append((time.perf_counter() - begin) * 1e3)
    return stamps


# %% tags=["nbval-ignore-output"]
arrivals(16)  # warm up
waits = {
    length: min((arrivals(length) for _ in range(2)), key=lambda w: w[-1]) for length in (16, 256)
}
for length, stamps in waits.items():
    per_token = (stamps[-1] - stamps[0]) / 11
    print(f"prompt of {length:3}: first token {stamps[0]:4.0f} ms, then {per_token:3.0f} ms each")
share = waits[16][0] / waits[16][-1]
print(f"first piece after {share:.2f} of the time; your guess: {today.guess('share') or 'none'}")
assert waits[16][0] < waits[16][-1] / 2
assert waits[256][0] > 2 * waits[16][0]

# %%
from nanoserve.course.plots import COLOURS, figure, label_line, prediction_marker

fig, ax = figure(height=3.0, xlabel="milliseconds after the question", title="When the tokens come")
for row, stamps in enumerate(waits.values()):
    ax.plot([0, stamps[0]], [row, row], color=COLOURS["muted"], linewidth=1.5)
    ax.plot(stamps, [row] * 12, "o", color=COLOURS["contiguous"])
    label_line(ax, stamps[-1], row, "in one piece", COLOURS["ink"])
label_line(ax, waits[256][0] / 2, 1, "prefill", COLOURS["muted"], "above")
if guess := today.guess("share"):
    prediction_marker(ax, guess * waits[16][-1], 0, where="below")
ax.set(yticks=[0, 1], ylim=(-0.6, 1.6), xlim=(0, 1.27 * max(s[-1] for s in waits.values())))
ax.set_yticklabels(["16 tokens\nof prompt", "256 tokens\nof prompt"])
fig

# %% [markdown]
# Each dot is a token that a streaming reader has and a waiting one has not. The dots are nearly equally
# far apart in both rows: a step of decode costs nearly the same whatever came before. The line in front of
# them is prefill, which no stream can shorten.
#
# What it does not show: a stop string makes some dots late, since held text is not shown; and two
# readers at once. With one prompt after another, the second reader waits for the first to finish. A
# later phase is about that.
#
# ## Your answer is the engine
#
# The package's engine, inside `today.mine()` with your `StopStrings`, once it has passed. It runs the
# loop that you have just read.

# %%
import nanoserve

engine = nanoserve.LLM("smollm2")
with today.mine():
    for piece in engine.stream(question, SamplingParams(max_tokens=20, stop="Grapes")):
        print(repr(piece), end=" ")

# %% [markdown]
# ## What you learned
#
# 1. **What is shown cannot be taken back,** so hold what may still change, and not a letter more.
# 2. **One loop, many faces.** Greedy is a temperature, batch is a stream read to its end, and paths that
#    are one cannot disagree.
# 3. **A reader feels two numbers:** the time to the first token, and the time per token after it.
#
# ## Tomorrow
#
# The engine is whole, and it has a cache. What did the cache buy, in numbers that can be defended? Day
# 13 builds the benchmark and bends Day 1's curve.
#
# **In one paragraph.** We wrote one loop for all of it: greedy or sampled, cached or not. Text goes out
# as soon as it is sure: half a character waits for its other half, and a beginning of a stop string
# waits until it is none. A batch answer is a stream read to its end. So the reader has the first word
# after the prompt is read, and never a letter that should not have been there.

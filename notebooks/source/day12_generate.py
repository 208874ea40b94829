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
# **Today** the pieces become an engine. One loop serves greedy and sampled text, with a cache and
# without. Text streams while it is made. A stop string ends an answer, and a reader sees no letter of
# the stop string.

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
# So far you have called the model and looked at ids. Users of an engine see text that begins soon, runs
# steadily and stops at the right place. That needs three promises:
#
# 1. Text that was shown is never taken back: it is on a screen already.
# 2. As little text as possible is held back, for as short a time as possible.
# 3. An answer is the same whether it streams or comes in one piece.
#
# The third promise breaks easily when an engine has two code paths, one for streams and one for whole
# answers, and a bug in one of them. Ours has one code path.

# %%
today.glossary(
    "streaming",
    "stop string",
    "finish reason",
    "end token",
    "time to first token",
    "time per output token",
)

# %% [markdown]
# ## One loop
#
# Day 9 has a greedy loop, and Day 11 changed which tokens a step passes to the model. Put Day 10's
# `sample` in the place of the argmax, and one loop does everything. Two lines make the difference:
#
# - `sample(next_logits(...), params, ...)`: temperature 0 is greedy, so greedy needs no second loop.
# - `step = ids if cache is None else [chosen.token_id]`: the same loop runs with and without a cache.

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

    Yields one Sample per token. Stops after an end token (which is yielded), after max_tokens, or
    when the context is full. A cache must be empty; each step after the first then computes one
    token.
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
# That makes four combinations. A seed makes the draws the same each time, so sampled text can be compared
# with and without the cache too.

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
# A caller can set a text at which to stop: a blank line, "User:", a closing bracket. This is harder than
# it looks, because the text comes in tokens, and a stop string can begin in the middle of one. Here is
# an answer of the oracle, token by token:

# %%
recorded = today.data("reference_greedy")["greedy"]
answer = recorded["chat-list"]["greedy_ids"]
print([tokenizer.decode([i]) for i in answer])

# %% [markdown]
# Let it stop at "Oranges". No token is that word. The loop below looks for the word in the whole text,
# and shows every piece at once. What does it show?

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
# It found the stop string, but its first letters are shown already. So after each piece, show all
# of the text except an **end that could still become a stop string**. With the stop string `END`:
#
# | text so far | shown | held back | why |
# | --- | --- | --- | --- |
# | `All done` | `All done` | | no end of it begins END |
# | `All done. E` | `All done. ` | `E` | E begins END |
# | `All done. EN` | `All done. ` | `EN` | EN begins END |
# | `All done. ENT` | `All done. ENT` | | no end of it begins END |
# | `All done. END of` | `All done. ` | | END is complete: stop, and show nothing of it |
#
# ## Your turn: `StopStrings`
#
# Write a small class between the tokens and the reader:
#
# 1. `add(piece)` takes new text and returns the text that can be shown now.
# 2. It holds back the **longest** end of the text that is the beginning of a stop string, and nothing
#    more.
# 3. When a stop string is complete, `found` becomes True in that call. The call returns the text before
#    the stop string; later calls return an empty string.
# 4. Of several stop strings, the one that is **complete first** counts; of two that end together, the
#    longer. So the result is the same as letter by letter, wherever the cuts between pieces are.
# 5. `finish()` returns the text that was held and never became a stop string. It is called last.
# 6. A stop string is plain text: every character stands for itself.
#
# `stops` is a list or tuple of strings. It may be empty, and a piece may be an empty string.
#
# The check's table lists the text that each call returned, and when `found` became True. With
# `{'add 1': 'All done', 'add 2': '. ', 'add 3': '', 'finish': '', 'found': 'in add 3'}` two calls of
# `add` returned text, and in the third call the stop string was complete.
#
# If you are stuck: `today.hint()`.
#
# After a kernel restart, run the cells above first (Run → Run All Above Selected Cell).


# %%
class StopStrings:
    """Holds text back while it may be the beginning of a stop string."""

    def __init__(self, stops):
        self.found = False
        raise NotImplementedError("your turn")

    def add(self, piece: str) -> str:
        """The text that can be shown now. From the first stop string on, nothing."""
        raise NotImplementedError("your turn")

    def finish(self) -> str:
        """The text that is still held back."""
        raise NotImplementedError("your turn")


today.check(StopStrings)

# %% [markdown]
# The cell below holds the package's version; from here on this notebook uses it.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/tokenizer.py: StopStrings
class StopStrings:
    """Holds text back while it may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found = False

    def add(self, piece: str) -> str:
        """Return the text that can be shown now; "" after the first stop string."""
        if self.found:
            return ""
        text = self._held + piece
        found = [(text.find(s) + len(s), text.find(s)) for s in self._stops if s in text]
        if found:  # the stop string that ends first, however the text is cut into pieces
            self.found, self._held = True, ""
            return text[: min(found)[1]]
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return the text that is still held back."""
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
assert "".join(shown) == "1. Bananas\n2. " and stop.found

# %% [markdown]
# An empty string means that nothing could be shown. No letter of "Oranges" was shown.
#
# ## Prove it: thousands of stop strings
#
# Take the ten recorded answers. Use **every** run of 1 to 8 characters in each of them as a stop string,
# send the answer through token by token, and compare with the right result: the text before the
# string's first occurrence.


# %%
def streamed(ids, stops):
    """The pieces of text that a reader sees of these tokens."""
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
# And where no stop string comes, nothing is lost: the pieces joined are the text.

# %%
for name in ("emoji", "japanese", "story"):
    ids = recorded[name]["greedy_ids"]
    pieces = streamed(ids, ["no such text"])
    print(name, "".join(pieces) == tokenizer.decode(ids))
    assert "".join(pieces) == tokenizer.decode(ids)

# %% [markdown]
# ## A stream, and the completion
#
# `Stream` puts three things in a row: the loop gives tokens, Day 3's detokeniser makes characters, and
# `StopStrings` holds some of them back. `Completion` is the whole answer at the end.


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

    def close(self) -> None:
        """End the stream: no more tokens are computed for it."""
        self._pieces.close()

    @property
    def completion(self) -> Completion:
        """The whole result; runs the rest of the stream first."""
        for _ in self:
            pass
        logprobs = None if self._params.logprobs is None else self._logprobs
        return Completion(self.text, self.token_ids, self.finish_reason, logprobs)


# %% [markdown]
# Look at `completion`: it reads the stream to its end. So no second code path can give other text.
#
# Then `LLM`, the class that users see. It is long, but has no new idea: it loads a model and a
# tokenizer, makes **a new cache for every prompt** (see the mistake on Day 11), and raises a clear
# error for a bad prompt before any work is done.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/generate.py: Prompt, prompts_of, LLM
Prompt = str | Sequence[int]  # text, or token ids, which are used unchanged


def prompts_of(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list. Raises ValueError for anything else."""
    if not isinstance(prompts, str) and not hasattr(prompts, "__len__"):
        raise ValueError(f"prompts must be text, token ids, or a list of them, got {prompts!r}")
    single = isinstance(prompts, str) or (len(prompts) and not isinstance(prompts[0], Sequence))
    return [prompts] if single else list(prompts)


class LLM:
    """A model, its tokenizer and a kind of cache: the public interface of the engine."""

    def chat(
        self, messages: list[dict[str, str]], params: SamplingParams | None = None
    ) -> Completion:
        """Complete a conversation [{"role": "user", "content": …}, …]; errors as for generate."""
        return self.stream(self.chat_ids(messages), params).completion

    def chat_ids(self, messages: list[dict[str, str]]) -> list[int]:
        """The token ids of a conversation in the checkpoint's chat template."""
        return self.tokenizer.encode(self.tokenizer.render_chat(messages), parse_special=True)


# %% jupyter={"source_hidden": true}
# until day 35: lands in nanoserve/generate.py: LLM.generate, LLM._prompt_ids
class LLM(LLM):
    def generate(
        self,
        prompts: Prompt | list[Prompt],
        params: SamplingParams | None = None,
    ) -> list[Completion]:
        """Complete one prompt or several. A prompt is text, or token ids, which are used unchanged.

        Raises ValueError, before the model runs, for a prompt that is empty or longer than the
        model's context, and for an id outside the vocabulary.
        """
        checked = [self._prompt_ids(prompt) for prompt in prompts_of(prompts)]
        return [self.stream(ids, params).completion for ids in checked]

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            ids = self.tokenizer.prefix_ids + self.tokenizer.encode(prompt)
        else:
            for i in prompt:
                if isinstance(i, bool) or not isinstance(i, Integral):
                    raise ValueError(f"a prompt must be text or integer token ids, got {i!r}")
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
# The constructor and `stream`, which makes the cache, stand in a cell of their own. There is one kind of
# cache today; Day 19 adds the paged one and rewrites this cell.


# %% jupyter={"source_hidden": true}
# until day 19: lands in nanoserve/generate.py: CACHES, new_cache, LLM.__init__, LLM.stream
CACHES = ("naive",)


def new_cache(kind: str | None, model: Model, tokens: int) -> Cache | None:
    """An empty cache of a kind in CACHES, for up to `tokens` tokens; None is no cache."""
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
# Run the whole engine, made of the cells above, as a stream and in one piece: with a stop string that is
# split over tokens, with one that begins with a line break, and with one that never comes:

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
# `"length"`: `max_tokens` tokens were written, or the context is full. So "length" tells a program that
# the answer is cut off.

# %%
for tokens in (4, 20):
    (c,) = llm.generate(question, SamplingParams(max_tokens=tokens))
    print(f"{len(c.token_ids):2} tokens, {c.finish_reason:6} {c.text!r}")

# %% [markdown]
# A bad request raises an error of one sentence, before anything runs:

# %%
for prompt_or_ids in ("", [1, 49_152], ["a", 2.5]):
    try:
        llm.generate([prompt_or_ids])
    except ValueError as error:
        print(error)

# %% [markdown]
# ## Measure it: what a reader waits for
#
# A reader notices two numbers: the **time to first token** (TTFT) and the **time per output token**
# (TPOT) after that. The first is mostly prefill, so it grows with the prompt. The second is decode.
#
# Take two prompts, of 16 and of 256 tokens, and 12 tokens of answer to each. If the answer came in one
# piece, a reader would wait for all of it. With a stream the reader waits for the first token only.

# %%
today.predict(
    "share",
    "Short prompt: after what share of the whole time does the first token come? (0 to 1)",
    guess=None,
    low=0,
    high=1,
)

# %%
import time

long_prompt = tokenizer.encode("One day at the harbour, the gulls and the boats. " * 30)


def arrivals(length):
    """Milliseconds from the request to each token of its answer."""
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
print(f"first token after {share:.2f} of the time; your guess: {today.guess_text('share')}")
assert waits[16][0] < waits[16][-1] / 2
assert waits[256][0] > 2 * waits[16][0]

# %% jupyter={"source_hidden": true}
# Draws the plot: When the tokens come
from nanoserve.course.plots import COLOURS, figure, label_line, prediction_marker

fig, ax = figure(height=3.0, xlabel="milliseconds after the request", title="When the tokens come")
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
# Each dot is a token. With a stream a reader sees it at once; without one, only when the last has come.
# The line in front of the dots is prefill, and a stream cannot shorten it: it is longer for the longer
# prompt. The distance between two dots is a step of decode. If the dots of both rows are about equally
# far apart in your run, 240 more cached tokens cost little in each step.
#
# The limits of this plot: text that is held back reaches the reader later than its dot. And there is
# only one reader. With one prompt after another, a second reader waits until the first answer is
# complete. A later phase is about that.
#
# ## Your answer is the engine
#
# This is the package's engine. Inside `today.mine()` it runs your `StopStrings`, if it has passed its
# check.

# %%
import nanoserve

engine = nanoserve.LLM("smollm2")
with today.mine():
    for piece in engine.stream(question, SamplingParams(max_tokens=20, stop="Grapes")):
        print(repr(piece), end=" ")

# %% [markdown]
# ## What you learned
#
# 1. **Shown text cannot be taken back,** so hold what may become a stop string, and nothing more.
# 2. **One loop for all.** Greedy is temperature 0, and a whole answer is a stream read to its end. One
#    code path cannot disagree with itself.
# 3. **A reader notices two numbers:** the time to first token, and the time per output token.
#
# ## Tomorrow
#
# The engine is complete, and it has a cache. How much faster is it with the cache? Day 13 builds a
# benchmark to answer that, and draws Day 1's curve again.
#
# **In one paragraph.** We wrote one loop for greedy and sampled text, with a cache and without. Text is
# shown as soon as it is certain: half a character waits for its other half, and the beginning of a
# stop string waits until it can no longer become one. A whole answer is a stream read to its end. So a
# reader sees the first word right after prefill, and never a letter of a stop string.

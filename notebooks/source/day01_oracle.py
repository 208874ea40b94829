# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Day 1 · The oracle comes first
#
# Week 1 · Phase 0, foundations · you need: nothing but Python and a little PyTorch
#
# **Today** you meet the model that you are going to serve, and you wrap a library that runs it
# correctly but slowly. From tomorrow on, what you write is compared with what you wrap today.

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

today = day(1)
today.picture("oracle-first")

# %% [markdown]
# ## Why it matters
#
# A language model that is slightly wrong does not crash. It writes fluent sentences, a little worse
# than it should, and nobody can tell by looking. A rotation with the wrong sign, an attention head
# that reads its neighbour's memory, a rounding in the wrong place: each of them still produces
# English.
#
# So before you build anything, get an answer that you can trust, and make it easy to compare with.
# We call it the **oracle**. Ours is the library `transformers`, running the same weights.
#
# The words of the day:

# %%
today.glossary("token", "token id", "logits", "greedy", "oracle", "hook")

# %% [markdown]
# ## A model that answers
#
# SmolLM2-135M-Instruct is a real chat model, small enough for a laptop. `make lab` has fetched it
# for you; elsewhere the next cell does so, once. Text must become token ids first. A tokenizer does
# that; Day 3 explains how.

# %%
from nanoserve import load_tokenizer

tokenizer = load_tokenizer("smollm2")
prompt = tokenizer.encode("The capital of France is")
prompt

# %% [markdown]
# ## The oracle that lands
#
# The course needs answers to three questions:
#
# | question | method | used on |
# | --- | --- | --- |
# | what follows this prompt? | `generate(ids)` | Day 9, token for token |
# | how likely is each next token? | `logits(ids)` | Day 8, number for number |
# | what went into that part, and what came out? | `capture(ids, names)` | Days 4 to 7, part by part |
#
# The third uses PyTorch's forward hooks: a function that PyTorch calls whenever a module has run.
# The cell below is the package's own `oracle.py`. In every notebook, a cell that begins with `#
# lands in` stands word for word in the package, and a test compares the two. Read it or leave it
# folded: nothing below depends on its details.

# %%
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from nanoserve.fetch import resolve


# %% jupyter={"source_hidden": true}
# lands in nanoserve/oracle.py: Activation, Oracle, _Streamer, load_oracle
@dataclass(frozen=True)
class Activation:
    """The first input and the output of a module, captured by a hook."""

    input: torch.Tensor
    output: torch.Tensor


class Oracle:
    """A reference model: logits, greedy generation and activations."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model.eval()

    @torch.no_grad()
    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [batch, seq] -> logits [batch, seq, vocab]."""
        return self.model(ids, use_cache=False).logits

    @torch.no_grad()
    def generate(
        self,
        ids: Sequence[int],
        max_tokens: int = 16,
        use_cache: bool = True,
        on_token: Callable[[int], None] | None = None,
        stop: bool = True,
    ) -> list[int]:
        """Return the greedy continuation of a prompt: at most max_tokens ids, end token included.

        Calls on_token with each id. With stop=False, generation continues after an end token.
        """
        prompt = torch.tensor([list(ids)], device=self.model.device)
        out = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_tokens,
            do_sample=False,
            use_cache=use_cache,
            streamer=None if on_token is None else _Streamer(on_token),
            pad_token_id=0,  # only to avoid a warning: one sequence needs no padding
            **({} if stop else {"eos_token_id": self.model.config.vocab_size}),  # no such token
        )
        return out[0, prompt.shape[1] :].tolist()

    @torch.no_grad()
    def capture(self, ids: torch.Tensor, names: Iterable[str]) -> dict[str, Activation]:
        """Run ids [batch, seq] and return the activations of modules, by names such as
        "model.layers.0.mlp". Raises ValueError for a name that the model lacks."""
        modules = dict(self.model.named_modules())
        seen: dict[str, Activation] = {}
        with ExitStack() as hooks:
            for name in names:
                if name not in modules:
                    raise ValueError(f"the oracle has no module {name!r}")

                def record(module, args, kwargs, output, name=name) -> None:
                    x = args[0] if args else kwargs["hidden_states"]
                    y = output[0] if isinstance(output, tuple) else output
                    seen[name] = Activation(x, y)

                hook = modules[name].register_forward_hook(record, with_kwargs=True)
                hooks.callback(hook.remove)
            self.model(ids, use_cache=False)
        return seen

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Every weight by its Hugging Face name."""
        return self.model.state_dict()


class _Streamer:
    """A streamer for transformers, which calls put() with the prompt, then with each token."""

    def __init__(self, on_token: Callable[[int], None]) -> None:
        self._on_token, self._prompt_seen = on_token, False

    def put(self, ids: torch.Tensor) -> None:
        if self._prompt_seen:
            self._on_token(int(ids))
        self._prompt_seen = True

    def end(self) -> None:
        pass


def load_oracle(
    source: str | Path = "smollm2",
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Oracle:
    """Load a model with transformers; source, dtype and device as for load_model.

    Raises ValueError for an unknown source.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(resolve(source), dtype=dtype)
    return Oracle(model.to(device))


# %% [markdown]
# Load it. `resolve` turns the name into a folder, and `transformers` reads the folder.

# %%
oracle = load_oracle("smollm2")
sum(p.numel() for p in oracle.model.parameters())

# %% [markdown]
# That is the number of parameters: 134.5 million. Ask the model something.

# %%
answer = oracle.generate(prompt, max_tokens=8)
print(answer)
print(tokenizer.decode(prompt + answer))

# %% [markdown]
# ## One token at a time
#
# `generate` hides a simple loop. The model maps a row of ids to one row of **logits** per position:
# 49,152 numbers, one for each token of the vocabulary. A larger logit means that the token is more
# likely to come next.

# %%
logits = oracle.logits(torch.tensor([prompt]))
logits.shape

# %% [markdown]
# Only the last position says what comes after the text. Take its largest logit, append that token,
# and run the model again. That is all of **greedy** generation:

# %%
ids = list(prompt)
for _ in range(8):
    last = oracle.logits(torch.tensor([ids]))[0, -1]
    ids.append(int(last.argmax()))

ids[len(prompt) :] == answer

# %% [markdown]
# To choose the eighth token, the loop runs the model over all twelve tokens before it, though
# eleven of them were run one step earlier. Move the slider: grey is work that was done before.

# %% tags=["nbval-ignore-output"]
today.widget("work")

# %% [markdown]
# ## Your turn: the work of one token
#
# How much arithmetic is that? A `config` holds the sizes of a model:
#
# After a kernel restart, run the cells above first (Run → Run All Above Selected Cell).

# %%
from nanoserve.config import load_config

config = load_config(resolve("smollm2"))
print(config.num_layers, "blocks,", config.hidden_size, "wide, vocabulary", config.vocab_size)
print(config.n_q, "query heads,", config.n_kv, "KV heads of", config.head_dim)

# %% [markdown]
# The parts, in a word each. Later days explain them one by one.
#
# | word | what it is |
# | --- | --- |
# | block | one of the model's equal stages: attention, then an MLP |
# | query head, KV head | attention works on several vectors of length `head_dim` side by side, the heads; keys and values have fewer heads than queries |
# | q, k, v, o | the matrices that make queries, keys and values, and the matrix that joins the results of the heads |
# | gate, up, down | the matrices of the MLP |
# | score, softmax | a query times a key; the function that turns scores into shares that add up to 1 |
# | output head | the last matrix, from a vector to the logits |
#
# Every block runs these at **every position** of the text:
#
# | part | what it is | numbers it holds |
# | --- | --- | --- |
# | q, o | two matrices | `hidden_size` × `n_q * head_dim` each |
# | k, v | two matrices | `hidden_size` × `n_kv * head_dim` each |
# | gate, up, down | three matrices | `hidden_size` × `intermediate_size` each |
#
# A matrix of $N$ numbers costs $2N$ operations per position: a multiplication and an addition for
# each number. Two more parts cost operations:
#
# - **attention** pairs each position with itself and all earlier ones: $1 + 2 + \dots + n$ pairs.
#   In each query head, a pair costs one product of length `head_dim` for its score and one more for
#   its share of the values: $4 \cdot$ `head_dim` operations.
# - **the output head**, after the last block, multiplies by `hidden_size` × `vocab_size`. Only the
#   last position needs it.
#
# Norms, rotations, softmax and the look-up of the embedding cost little; leave them out. How many
# operations choose the next token after `length` tokens, when nothing is remembered? Return an int.
# Stuck? `today.hint()` gives a hint about your mistake.


# %%
def work_of_a_token(config, length: int) -> int:
    """Floating-point operations that choose the next token after `length`, nothing remembered.

    Uses config.hidden_size, .intermediate_size, .num_layers, .n_q, .n_kv, .head_dim, .vocab_size.
    """
    raise NotImplementedError("your turn")


today.check(work_of_a_token)

# %% [markdown]
# Below is one solution, folded; from here on this notebook uses it. It counts the
# engine's work and is no part of the engine, so it does not land.


# %% jupyter={"source_hidden": true}
# solution: work_of_a_token
def work_of_a_token(config, length: int) -> int:
    """Floating-point operations that choose the next token after `length`, nothing remembered."""
    q_size, kv_size = config.n_q * config.head_dim, config.n_kv * config.head_dim
    attention = config.hidden_size * (2 * q_size + 2 * kv_size)  # q and o, k and v
    mlp = 3 * config.hidden_size * config.intermediate_size
    pairs = length * (length + 1) // 2
    layer = 2 * length * (attention + mlp) + 4 * pairs * q_size
    return config.num_layers * layer + 2 * config.hidden_size * config.vocab_size


# %%
for length in (1, 16, 256, 4_096):
    print(f"{length:>5} tokens: {work_of_a_token(config, length) / 1e9:8.2f} billion operations")

# %% [markdown]
# ## Measure it
#
# Sixteen times as many tokens, 256 instead of 16, cost a little more than sixteen times the
# operations. Does the clock agree? Guess first: your machine chooses a token after 32 tokens of
# text, and then after 512, sixteen times as many.

# %%
today.predict("growth", "How many times longer does the token after 512 take?", guess=None)

# %% [markdown]
# Now a live run: `transformers` with its cache switched off, one token at each length, the median
# of three. The lengths take turns, so that a machine that slows down slows all of them.

# %% tags=["nbval-ignore-output"]
from nanoserve.bench.timing import median_times

text = tokenizer.encode("One day at the harbour, the gulls and the boats. " * 60)
lengths = [16, 32, 64, 128, 256, 512]
runs = {n: lambda n=n: oracle.generate(text[:n], 1, use_cache=False) for n in lengths}
seconds = median_times(runs, rounds=3)
growth = seconds[512] / seconds[32]
print(f"after 32 tokens {seconds[32] * 1e3:.0f} ms, after 512 {seconds[512] * 1e3:.0f} ms")
assert 2 < growth < 60

# %% [markdown]
# If the time depended on this arithmetic alone, it would follow the dashed line, which is drawn
# through the last measured point.

# %% jupyter={"source_hidden": true}
# Draws the plot: the time of the next token, by the length of the text
from nanoserve.course.plots import COLOURS, figure, label_line, line, log2_axis, prediction_marker

fig, ax = figure(xlabel="tokens of text", ylabel="milliseconds for the next token")
rate = work_of_a_token(config, 512) / seconds[512]  # operations per second
counted = [work_of_a_token(config, n) / rate * 1e3 for n in lengths]
ax.plot(lengths, counted, color=COLOURS["limit"], linestyle="--", linewidth=1)
label_line(ax, 32, counted[1], "the count", COLOURS["limit"], "right")
line(ax, lengths, [seconds[n] * 1e3 for n in lengths], "measured", COLOURS["oracle"])
if guess := today.guess("growth"):
    prediction_marker(ax, 512, guess * seconds[32] * 1e3)
log2_axis(ax), log2_axis(ax, "y")
fig

# %% [markdown]
# Read it from the right. Where your curve runs along the dashed line, arithmetic decides the time,
# and doubling the text about doubles it. Where your curve lies above the line, on the left,
# something else decides: all 134.5 million weights are read from memory, however few tokens there
# are. Both cases come back, one as prefill (reading a whole prompt) and one as decode (writing a
# token at a time). On Day 13 you measure this curve again, with a cache.
#
# The plot shows one machine, one number of threads and one library. Another machine gives other
# numbers.
#
# ## Look inside
#
# Now the third question to the oracle. Name parts of the model, and get the input and the output of
# each:

# %%
seen = oracle.capture(torch.tensor([prompt]), ["model.layers.0.mlp", "model.norm"])
for name, activation in seen.items():
    print(name, list(activation.input.shape), "->", list(activation.output.shape))

# %% [markdown]
# On Day 5 you write that first MLP and compare it with these numbers. A name that does not exist is
# an error that says so:

# %%
try:
    oracle.capture(torch.tensor([prompt]), ["model.layers.30.mlp"])
except ValueError as error:
    print(error)

# %% [markdown]
# ## What you learned
#
# 1. **A wrong model speaks fluently.** Only a comparison with something independent can tell.
# 2. **Generation is a loop of one question:** given these tokens, which comes next?
# 3. **Without memory, every token costs a run over all tokens before it.** Your curve shows the
#    price. The KV cache of Day 11 removes most of it.
#
# ## Tomorrow
#
# The oracle reads a folder of weights. What is in that folder? Day 2 opens it: 272 names, and
# numbers of four bits.
#
# **In one paragraph.** Before writing an engine, we wrapped one that is known to be right. It
# answers three questions: what comes next, how likely is each token, what went through that part.
# Then we counted the arithmetic behind one token and compared the count with the clock. A model
# that remembers nothing computes everything again for each token it writes.

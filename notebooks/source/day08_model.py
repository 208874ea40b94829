# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Day 8 · The whole forward pass
#
# Week 2 · Phase 1, correct generation · you need: Day 7 (one block)
#
# **Today** you stack thirty blocks between an embedding and a head, and have a model: token ids in,
# logits out. Then you hold all of it to the oracle, on the real weights and on families of models
# that you have never run.

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

today = day(8)
today.picture("forward-pass")

# %% [markdown]
# ## Why it matters
#
# Until now each part was fed with the oracle's own input, so that no error could travel. From today
# on a part gets what the parts before it made. Small differences add up over thirty blocks, and a
# mistake anywhere shows at the end. That makes the last number, the logits, the strictest test of
# all, and the only one that a user ever feels.

# %%
today.glossary("embedding", "logits", "tied head", "final norm", "forward pass", "logit lens")

# %% [markdown]
# ## Four steps
#
# 1. **Embedding**: each id picks its row from a table, `[batch, seq]` to `[batch, seq, 576]`.
# 2. **Blocks**: thirty times, the output of one being the input of the next.
# 3. **Final norm**: the only norm that the stream itself passes through.
# 4. **Head**: one product with a matrix of 49,152 rows, a score for every token of the vocabulary.
#
# In SmolLM2 the head is the embedding used again, a **tied head**: the loader of Day 2 has put the
# same tensor under both names.

# %%
from pathlib import Path

import torch
import torch.nn.functional as F

from nanoserve import load_tokenizer
from nanoserve.config import ModelConfig, load_config
from nanoserve.fetch import resolve
from nanoserve.layers import Cache, block, linear, rms_norm, rope_tables
from nanoserve.weights import load_weights

weights = load_weights(resolve("smollm2"), load_config(resolve("smollm2")))
print(len(weights), "names")
print("tied:", weights["lm_head.weight"] is weights["model.embed_tokens.weight"])

# %% [markdown]
# ## Your turn: `_layer`
#
# `block` wants one layer's weights under names without a number. So sort the names:
#
# | in `weights` | for layer 3 |
# | --- | --- |
# | `model.layers.3.self_attn.q_proj.weight` | `self_attn.q_proj.weight` |
# | `model.layers.3.self_attn.q_proj.bias`, if there is one | `self_attn.q_proj.bias` |
# | any other name | left out |
#
# The tensors stay the very same objects. It is one line, with one trap for layer 1. Stuck?
# `today.hint()` looks at the case that failed.


# %%
def _layer(weights: dict[str, torch.Tensor], i: int) -> dict[str, torch.Tensor]:
    """Layer i's weights, by names that are the same for every layer."""
    raise NotImplementedError("your turn")


today.check(_layer)


# %% jupyter={"source_hidden": true}
# lands in nanoserve/model.py: _layer
def _layer(weights: dict[str, torch.Tensor], i: int) -> dict[str, torch.Tensor]:
    """Layer i's weights, by names that are the same for every layer."""
    prefix = f"model.layers.{i}."
    return {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}


# %% [markdown]
# ## What a model is
#
# A config and a dictionary, nothing more: no modules, no registry. The constructor sorts the layers
# once. `_rope` keeps the tables of Day 4 and doubles them when a text outgrows them, so that they are
# not computed anew at each call. It also refuses what the model was never made for, a position past
# its context.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/model.py: Model
class Model:
    """A decoder-only transformer: a config, and weights by their Hugging Face names."""

    def __init__(self, config: ModelConfig, weights: dict[str, torch.Tensor]) -> None:
        self.config = config
        self.weights = weights
        self.layers = [_layer(weights, i) for i in range(config.num_layers)]
        self._cos, self._sin = rope_tables(config, 0)

    @property
    def device(self) -> torch.device:
        return self.weights["lm_head.weight"].device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights["lm_head.weight"].dtype

    def _rope(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of positions start to stop. The tables double when they are too short."""
        if stop > self.config.context:
            raise ValueError(
                f"position {stop - 1} is past the model's context of {self.config.context}"
            )
        if stop > len(self._cos):
            length = min(max(2 * stop, 512), self.config.context)
            self._cos, self._sin = (t.to(self.device) for t in rope_tables(self.config, length))
        return self._cos[start:stop], self._sin[start:stop]


# %% [markdown]
# ## Your turn: `hidden`
#
# Steps 1 to 3. It will be a method, so its first argument is a model:
#
# | you have | it is |
# | --- | --- |
# | `self.weights` | the tensors by name; here `model.embed_tokens.weight` and `model.norm.weight` |
# | `self.layers` | a list with a dictionary for each block |
# | `self.config` | the config; `norm_eps` for the final norm |
# | `self._rope(start, stop)` | cos and sin of the positions from `start` to `stop - 1` |
# | `F.embedding(ids, table)` | the rows of a table |
#
# Without a cache the positions begin at 0. With one (Day 11) they begin at `cache.seq_len`, the
# number of tokens that it holds. Every block gets the cache and its own number.


# %%
def hidden(self, ids, cache=None):
    """The last block's output, normed: ids [batch, seq] -> [batch, seq, hidden]."""
    raise NotImplementedError("your turn")


today.check(hidden)

# %% [markdown]
# The engine's version first refuses ids that cannot be right: a float where a number of a token is
# wanted, or a missing batch axis, would otherwise fail somewhere deep inside, or not at all.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/model.py: Model.hidden, Model._check
class Model(Model):
    def hidden(self, ids: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        """The last block's output, normed: ids [batch, seq] -> [batch, seq, hidden]."""
        self._check(ids)
        start = 0 if cache is None else cache.seq_len
        cos, sin = self._rope(start, start + ids.shape[1])
        x = F.embedding(ids, self.weights["model.embed_tokens.weight"])
        for index, layer in enumerate(self.layers):
            x = block(x, layer, cos, sin, self.config, cache, index)
        return rms_norm(x, self.weights["model.norm.weight"], self.config.norm_eps)

    def _check(self, ids: torch.Tensor) -> None:
        if ids.dim() != 2 or ids.shape[1] == 0 or ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"ids must be integers [batch, seq], got {ids.dtype} {list(ids.shape)}"
            )
        if ids.device.type == "cpu":  # on a GPU, reading them would wait for all queued work
            low, high = (int(i) for i in ids.aminmax())
            if low < 0 or high >= self.config.vocab_size:
                raise ValueError(
                    f"token id {low if low < 0 else high} is outside the vocabulary of "
                    f"{self.config.vocab_size}"
                )


# %% [markdown]
# ## Your turn: `head`
#
# Step 4, and the shortest exercise of the course. `[..., hidden]` in, `[..., vocab]` out, with the
# matrix `lm_head.weight`. Think of models whose head is not tied.


# %%
def head(self, hidden):
    """Logits from the final hidden states: [..., hidden] -> [..., vocab]."""
    raise NotImplementedError("your turn")


today.check(head)

# %% [markdown]
# Why are `hidden` and `head` two methods? The head is a fifth of all weights, and to choose the next
# token only the last position needs it. Day 9 calls them one by one.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/model.py: Model.__call__, Model.head
class Model(Model):
    def __call__(self, ids: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        """Logits of the token after each position: ids [batch, seq] -> [batch, seq, vocab].

        With a cache (batch 1), ids are the tokens after those in the cache, and their keys and
        values are added to the cache. Raises ValueError for ids of another shape or type, and for
        positions past the model's context.
        """
        return self.head(self.hidden(ids, cache))

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits from the final hidden states: [..., hidden] -> [..., vocab]."""
        return linear(hidden, self.weights["lm_head.weight"])


# %% jupyter={"source_hidden": true}
# until day 13: lands in nanoserve/model.py: load_model
def load_model(
    source: str | Path = "smollm2",
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Model:
    """Load "smollm2" (fetched on first use), a folder, a .gguf file or a hub id.

    Raises ValueError, naming it, for whatever the engine does not support or finds broken.
    """
    path = resolve(source)
    config = load_config(path)
    return Model(config, load_weights(path, config, dtype, device))


# %%
model, tokenizer = load_model("smollm2"), load_tokenizer("smollm2")
prompt = "The capital of France is"
ids = torch.tensor([tokenizer.encode(prompt)])
logits = model(ids)
print(list(ids.shape), "->", list(logits.shape))
print(repr(tokenizer.decode([int(logits[0, -1].argmax())])))

# %% [markdown]
# It speaks. As Day 1 said, that proves nothing.
#
# ## Prove it
#
# The gate: on the real model, no logit may differ from the oracle's by more than 1e-5 of the largest
# logit. Why not 1e-5 flat? float32 keeps seven digits *of the largest number in a sum*, and two right
# programs that add in another order differ in the last of them. `transformers` with its two ways of
# computing attention differs from itself by that much.

# %%
from nanoserve.oracle import load_oracle

oracle = load_oracle("smollm2")


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference, as a share of the largest logit."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


texts = [
    prompt,
    "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n",
    "Tel. +49 30 901820, 3.14159, 東京, naïve café 😀",
    "One day at the harbour, the gulls and the boats. " * 8,
]
for text in texts:
    row = torch.tensor([tokenizer.encode(text)])
    with torch.no_grad():
        off = apart(model(row), oracle.logits(row))
    print(f"{row.shape[1]:3} tokens, {text[:24]!r:28} within 1e-5: {off < 1e-5}")
    assert off < 1e-5

# %% [markdown]
# One checkpoint exercises one path. It has no biases, no norm on its queries, a tied head and nine
# heads over three. Other families differ in just these things, so make some: tiny models with random
# weights, written to disk by `transformers` and loaded by you. Random is good here, because every
# weight matters and none is close to 0 by training.

# %%
import tempfile

from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()
sizes = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3}
sizes |= {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64}


def random_model(family: str, **options):
    torch.manual_seed(0)
    other = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(sizes | options)))
    for name, weight in other.named_parameters():
        weight.data = 0.3 * torch.randn_like(weight) + ("norm" in name)
    return other.eval()


# %%
small_ids = torch.randint(0, 97, (2, 29), generator=torch.Generator().manual_seed(1))
for family, options in (
    ("llama", {}),
    ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("qwen2", {}),
    ("qwen3", {"head_dim": 14}),
):
    other = random_model(family, **options)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        other.save_pretrained(folder)
        off = apart(load_model(folder)(small_ids), other(small_ids).logits)
    print(f"{family:6} {options!s:58} within 1e-5: {off < 1e-5}")
    assert off < 1e-5

# %% [markdown]
# Biases on q, k and v (Qwen2), a norm on each query and key (Qwen3), heads whose sizes do not add up
# to the hidden size, one KV head for all: the same four steps, and the same agreement.
#
# Two things that must not pass silently:

# %%
for bad in (torch.zeros(1, 3), torch.zeros(1, 8_193, dtype=torch.long)):
    try:
        model(bad)
    except ValueError as error:
        print(error)

# %% [markdown]
# ## Measure it: when does the model know?
#
# The stream has the same shape after every block. So stop early, norm it, hand it to the head, and
# ask what the model would say *by now*. That trick is called the **logit lens** (nostalgebraist,
# 2020). Blocks are counted from 1 here.

# %%
today.predict(
    "paris",
    'After which of the 30 blocks is " Paris" ranked first for the first time? (1 to 30)',
    guess=None,
)


# %%
@torch.no_grad()
def lens(text: str) -> torch.Tensor:
    """The logits that each block would give for the next token: [layers, vocab]."""
    ids = torch.tensor([tokenizer.encode(text)])
    cos, sin = rope_tables(model.config, ids.shape[1])
    x, rows = F.embedding(ids, model.weights["model.embed_tokens.weight"]), []
    for layer in model.layers:
        x = block(x, layer, cos, sin, model.config)
        last = rms_norm(x[0, -1], model.weights["model.norm.weight"], model.config.norm_eps)
        rows.append(model.head(last))
    return torch.stack(rows)


by_block = lens(prompt)
print("the last block's are the model's:", torch.allclose(by_block[-1], logits[0, -1], atol=1e-3))
for number in (1, 4, 12, 20, 27, 28, 29, 30):
    best = int(by_block[number - 1].argmax())
    share = by_block[number - 1].softmax(-1)[best]
    print(f"after block {number:2}: {tokenizer.decode([best])!r:12} with probability {share:.2f}")

# %% [markdown]
# It takes until the very last block, and one before the end the favourite is " capital". But being
# first is a coarse measure. Where in the ranking of 49,152 tokens does the right answer stand?

# %%
from nanoserve.course.plots import COLOURS, figure, label_line, prediction_marker

fig, ax = figure(
    xlabel="blocks passed", ylabel="rank of the model's answer", title="The logit lens"
)
ax.set(yscale="log", ylim=(60_000, 0.5), xlim=(0, 36), xticks=range(0, 31, 5))
prompts = {
    prompt: COLOURS["engine"],
    "The opposite of hot is": COLOURS["ink"],
    "The sky is blue and the grass is": COLOURS["muted"],
}
for number, (text, colour) in enumerate(prompts.items()):
    rows = lens(text)
    answer = int(rows[-1].argmax())
    ranks = (rows > rows[:, answer : answer + 1]).sum(-1) + 1
    ax.plot(range(1, 31), ranks.tolist(), color=colour, marker="o", markersize=4)
    label_line(ax, 30.2, 1.2 * 3.2**number, tokenizer.decode([answer]).strip(), colour)
ax.set_yticks(*zip(*((10**n, f"{10**n:,}") for n in range(5)), strict=True))
if guess := today.guess("paris"):
    prediction_marker(ax, guess, 1, where="below")
fig

# %% [markdown]
# Read it from left to right. For two thirds of the way the answer stands in the crowd, between places
# 1,000 and 5,000: those blocks work out what is being asked. From block 20 on it climbs steeply, and first
# place comes in the last block or two. No single block knows the answer; each one pushes the stream a
# little further towards it.
#
# What the plot does not show: the lens reads every block as if it were the last one, though an early
# block writes for later ones and owes the head nothing. A low rank early on may be a language that
# the head cannot read yet. Three prompts, one small model.
#
# ## With your own code
#
# Whatever passed today runs the engine: your names, your stack, your head.

# %% tags=["nbval-ignore-output"]
from nanoserve import LLM, SamplingParams

with today.mine():
    [answer] = LLM("smollm2").generate("The opposite of hot is", SamplingParams(max_tokens=4))
print(answer.text)
assert answer.text.startswith(" cold")

# %% [markdown]
# ## What you learned
#
# 1. **A model is a config and a dictionary.** Four steps turn ids into logits, and none is long.
# 2. **Hold the end to the oracle, on more than one model.** A checkpoint tests only the paths it uses.
# 3. **The answer is made late.** The stream carries the question through most of the blocks, and the
#    last few turn it into a word.
#
# ## Tomorrow
#
# You have the scores for the next token. Day 9 takes the best one, appends it and asks again, and
# holds 64 tokens in a row to the oracle's: one wrong token, and everything after it is wrong too.
#
# **In one paragraph.** An embedding, thirty blocks, a norm and one large matrix: the model is whole,
# and its logits are the oracle's to 1e-5 of the largest, on code, digits, Japanese and prose. So are
# those of tiny random Llamas and Qwens, which use what SmolLM2 leaves unused. Reading the stream
# after every block showed how the answer arrives: not at all for twenty blocks, and then quickly.

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
# **Today** you put thirty blocks between an embedding and a head, and have a model: token ids in,
# logits out. Then you compare all of it with the oracle, on the real weights and on families of
# models that you have not run before.

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
# Until now each part got the oracle's own input, so errors could not add up. From today on each part
# gets the output of the parts before it. Small differences add up over thirty blocks, and a mistake
# anywhere shows at the end. That makes the logits the strictest test so far. They also decide which
# text a user reads.

# %%
today.glossary("embedding", "logits", "tied head", "final norm", "forward pass", "logit lens")

# %% [markdown]
# ## Four steps
#
# 1. **Embedding**: each id picks its row from a table, `[batch, seq]` to `[batch, seq, 576]`.
# 2. **Blocks**: thirty of them; the output of one is the input of the next.
# 3. **Final norm**: the only norm that is applied to the stream itself.
# 4. **Head**: one product with a matrix of 49,152 rows, a score for every token of the vocabulary.
#
# In SmolLM2 the head is the embedding, used a second time: a **tied head**. The loader of Day 2 puts
# the same tensor under both names.

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
# `block` takes one layer's weights, by names without a number. So pick one layer's names and shorten
# them:
#
# | in `weights` | for layer 3 |
# | --- | --- |
# | `model.layers.3.self_attn.q_proj.weight` | `self_attn.q_proj.weight` |
# | `model.layers.3.self_attn.q_proj.bias`, if there is one | `self_attn.q_proj.bias` |
# | any other name | left out |
#
# Keep the very same tensors, without a copy. It is one line, with one trap for layer 1. If you are
# stuck: `today.hint()`.
#
# After a kernel restart, run the cells above first (Run → Run All Above Selected Cell).


# %%
def _layer(weights: dict[str, torch.Tensor], i: int) -> dict[str, torch.Tensor]:
    """Layer i's weights, by names that are the same for every layer."""
    raise NotImplementedError("your turn")


today.check(_layer)

# %% [markdown]
# The cell below holds the package's version; from here on this notebook uses it.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/model.py: _layer
def _layer(weights: dict[str, torch.Tensor], i: int) -> dict[str, torch.Tensor]:
    """Layer i's weights, by names that are the same for every layer."""
    prefix = f"model.layers.{i}."
    return {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}


# %% [markdown]
# ## What a model is
#
# A model is a config and a dictionary of weights: no modules, no registry. The constructor calls
# `_layer` once for each layer. `_rope` stores the tables of Day 4 and doubles them when a text is
# longer, so that they are not computed again in each call. It raises ValueError for a position past
# the model's context.


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
        """The device of the weights."""
        return self.weights["model.norm.weight"].device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the activations, and of all weights that are not quantised."""
        return self.weights["model.norm.weight"].dtype

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
# Steps 1 to 3. It is a method, so its first argument is a model:
#
# | name | meaning |
# | --- | --- |
# | `self.weights` | the tensors by name; here `model.embed_tokens.weight` and `model.norm.weight` |
# | `self.layers` | a list with a dictionary for each block |
# | `self.config` | the config; `norm_eps` for the final norm |
# | `self._rope(start, stop)` | cos and sin of the positions from `start` to `stop - 1` |
# | `F.embedding(ids, table)` | the rows of a table |
#
# Without a cache the positions begin at 0. With a cache (Day 11) they begin at `cache.seq_len`, the
# number of tokens that the cache holds. Pass each block the cache, and the block's number as `index`.
#
# After a kernel restart, run the cells above first (Run → Run All Above Selected Cell).


# %%
def hidden(self, ids, cache=None):
    """The last block's output, normed: ids [batch, seq] -> [batch, seq, hidden]."""
    raise NotImplementedError("your turn")


today.check(hidden)

# %% [markdown]
# The cell below holds the package's version; from here on this notebook uses it.
# It begins with a check of the ids: floats, or ids without a batch axis, would otherwise fail deep
# inside the model, or not at all.


# %% jupyter={"source_hidden": true}
# until day 32: lands in nanoserve/model.py: Model.hidden
class Model(Model):
    def hidden(self, ids: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        """The final norm's output: ids [batch, seq] -> [batch, seq, hidden]; errors as __call__."""
        self._check(ids)
        start = 0 if cache is None else cache.seq_len
        cos, sin = self._rope(start, start + ids.shape[1])
        x = F.embedding(ids, self.weights["model.embed_tokens.weight"])
        for index, layer in enumerate(self.layers):
            x = block(x, layer, cos, sin, self.config, cache, index)
        return rms_norm(x, self.weights["model.norm.weight"], self.config.norm_eps)


# %% jupyter={"source_hidden": true}
# lands in nanoserve/model.py: Model._check
class Model(Model):
    def _check(self, ids: torch.Tensor) -> None:
        if ids.dim() != 2 or ids.shape[1] == 0 or ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"ids must be integers [batch, seq], got {ids.dtype} {list(ids.shape)}"
            )
        if ids.device.type == "cpu":  # on a GPU, reading the ids would wait for all queued work
            low, high = (int(i) for i in ids.aminmax())
            if low < 0 or high >= self.config.vocab_size:
                raise ValueError(
                    f"token id {low if low < 0 else high} is outside the vocabulary of "
                    f"{self.config.vocab_size}"
                )


# %% [markdown]
# ## Your turn: `head`
#
# Step 4, and the shortest exercise of the course: `[..., hidden]` in, `[..., vocab]` out. Multiply with
# the head's matrix, not with the embedding: in other models the two differ.
#
# After a kernel restart, run the cells above first.


# %%
def head(self, hidden):
    """Logits from the final hidden states: [..., hidden] -> [..., vocab]."""
    raise NotImplementedError("your turn")


today.check(head)

# %% [markdown]
# The cell below holds the package's version; from here on this notebook uses it.
#
# Why are `hidden` and `head` two methods? The head is a fifth of all weights, and choosing the next
# token needs it for the last position only. Day 9 calls the two one by one.


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
best = tokenizer.decode([int(logits[0, -1].argmax())])
print(repr(best))
assert best == " Paris"

# %% [markdown]
# The answer is right. As Day 1 said, one right answer proves nothing.
#
# ## Prove it
#
# The check: on the real model, no logit may differ from the oracle's by more than 1e-5 of the largest
# logit. Why a share of the largest, and not a fixed number? float32 keeps about seven digits *of the
# largest number in a sum*, and two right programs that add in another order differ in the last of
# them. (`transformers` has two implementations of attention, and their logits can differ a little
# too.)

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
# One checkpoint tests one combination: no biases, no norm on the queries, a tied head, nine query heads
# over three KV heads. Other families differ in these points, so make some: tiny models with random
# weights, which `transformers` writes to disk and your loader reads. Random weights are good for a
# test: none of them is zero or one, so leaving any of them out changes the result.

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
# Biases on q, k and v (Qwen2), a norm on each query and key (Qwen3), a head size that is no fraction of
# the hidden size, one KV head for all queries: the same four steps, and they agree as well.
#
# Two kinds of bad input must raise an error, and not give numbers:

# %%
for bad in (torch.zeros(1, 3), torch.zeros(1, 8_193, dtype=torch.long)):
    try:
        model(bad)
    except ValueError as error:
        print(error)

# %% [markdown]
# ## Measure it: when does the model know?
#
# The stream has the same shape after every block. So take it after any block, norm it, and apply the
# head: that gives the logits of a model that stops there. This is called the **logit lens**
# (nostalgebraist, 2020). Blocks are counted from 1 here.

# %%
today.predict(
    "paris",
    'After which of the 30 blocks is " Paris" ranked first for the first time?',
    guess=None,
    low=1,
    high=30,
)


# %%
@torch.no_grad()
def lens(text: str) -> torch.Tensor:
    """The logits of the next token, computed from the stream after each block: [layers, vocab]."""
    ids = torch.tensor([tokenizer.encode(text)])
    cos, sin = rope_tables(model.config, ids.shape[1])
    x, rows = F.embedding(ids, model.weights["model.embed_tokens.weight"]), []
    for layer in model.layers:
        x = block(x, layer, cos, sin, model.config)
        last = rms_norm(x[0, -1], model.weights["model.norm.weight"], model.config.norm_eps)
        rows.append(model.head(last))
    return torch.stack(rows)


by_block = lens(prompt)
same = apart(by_block[-1], logits[0, -1]) < 1e-5
print("the last block's are the model's, within 1e-5 of the largest:", same)
assert same
for number in (1, 4, 12, 20, 27, 28, 29, 30):
    best = int(by_block[number - 1].argmax())
    share = by_block[number - 1].softmax(-1)[best]
    print(f"after block {number:2}: {tokenizer.decode([best])!r:12} with probability {share:.2f}")
firsts = [tokenizer.decode([i]) for i in by_block.argmax(-1).tolist()]
assert firsts.index(" Paris") == 29 and firsts[28] == " capital"

# %% [markdown]
# " Paris" is first only after the last block; one block before it, " capital" is first. But first
# place is a coarse measure. Which rank has the model's answer, among 49,152 tokens, after each block?

# %% jupyter={"source_hidden": true}
# Draws the plot: The logit lens
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
    assert ranks[:18].min() > 1_000 and ranks[:27].min() > 1 and ranks[29] == 1
ax.set_yticks(*zip(*((10**n, f"{10**n:,}") for n in range(5)), strict=True))
if guess := today.guess("paris"):
    prediction_marker(ax, guess, 1, where="below")
fig

# %% [markdown]
# Read the plot from left to right. In the first 18 blocks the answer's rank is worse than 1,000. After that it
# climbs, and it reaches first place in one of the last three blocks. No single block produces the
# answer: many blocks move the stream towards the answer.
#
# The limits of this plot: the lens applies the head after every block, although early blocks prepare
# the input of later blocks and not of the head. So a poor rank early on does not prove that the
# answer is not in the stream yet. Three prompts, one small model.
#
# ## With your own code
#
# The engine runs with those of your answers that passed: your names, your stack, your head.

# %% tags=["nbval-ignore-output"]
from nanoserve import LLM, SamplingParams

with today.mine():
    [answer] = LLM("smollm2").generate("The opposite of hot is", SamplingParams(max_tokens=4))
print(answer.text)
assert answer.text.startswith(" cold")

# %% [markdown]
# ## What you learned
#
# 1. **A model is a config and a dictionary.** Four short steps turn ids into logits.
# 2. **Compare the logits with the oracle's, on more than one model.** A checkpoint tests only the
#    features it has.
# 3. **The answer comes late.** On our prompts the head ranks it first only in the last few blocks.
#
# ## Tomorrow
#
# You have the scores of the next token. Day 9 takes the best one, appends it and runs again, and
# compares up to 64 tokens in a row with the oracle's: after one wrong token, all later ones are wrong
# too.
#
# **In one paragraph.** An embedding, thirty blocks, a norm and one large matrix: the model is complete,
# and its logits are the oracle's within 1e-5 of the largest, on code, digits, Japanese and prose. So
# are the logits of tiny random Llamas and Qwens, with features that SmolLM2 lacks. The logit lens
# showed how the answer arrives: slowly at first, and first in rank only in the last few blocks.

"""Day 8: one layer's weights by name, the stack of blocks, the head."""

from dataclasses import replace

import torch
import torch.nn.functional as F

from nanoserve.course.exercise import Case, Exercise, close, wrong
from nanoserve.course.exercises.day07 import CONFIG as DAY7
from nanoserve.course.exercises.day07 import random_layer
from nanoserve.layers import block, rms_norm

CONFIG = replace(DAY7, num_layers=3, vocab_size=13, context=64)


def random_weights(tied: bool = True) -> dict[str, torch.Tensor]:
    """A small model's weights, by their Hugging Face names."""
    generator = torch.Generator().manual_seed(8)
    vocab, hidden = CONFIG.vocab_size, CONFIG.hidden_size
    embedding = torch.randn(vocab, hidden, generator=generator)
    weights = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": 1 + 0.5 * torch.randn(hidden, generator=generator),
        "lm_head.weight": embedding if tied else torch.randn(vocab, hidden, generator=generator),
    }
    for i in range(CONFIG.num_layers):
        weights |= {f"model.layers.{i}.{k}": w for k, w in random_layer(seed=i).items()}
    return weights


# _layer ------------------------------------------------------------------------------------------


def _prefix(i: int) -> str:
    return f"model.layers.{i}."


@wrong(
    "Layer 1 also gets the weights of layers 10 to 19: their names begin with `model.layers.1` "
    "too. End the prefix with its dot.",
    hints="twelve",
)
def _no_dot(weights, i):
    start = _prefix(i)[:-1]
    return {n[len(start) + 1 :]: w for n, w in weights.items() if n.startswith(start)}


@wrong(
    "The names still hold the layer's number. Cut the prefix off: every layer uses the same names.",
    hints="names",
)
def _keeps_prefix(weights, i):
    return {n: w for n, w in weights.items() if n.startswith(_prefix(i))}


@wrong(
    "`lstrip` removes single letters, so it also removes the beginning of the name that follows. "
    "`removeprefix` removes the prefix as a whole.",
    hints="prefix",
)
def _lstrip(weights, i):
    return {n.lstrip(_prefix(i)): w for n, w in weights.items() if n.startswith(_prefix(i))}


@wrong(
    "Only names that end in `.weight` are kept. Some models have biases (`.bias`): keep those too.",
    hints="prefix",
)
def _no_bias(weights, i):
    return {n: w for n, w in _right(weights, i).items() if n.endswith(".weight")}


@wrong("`.weight` and `.bias` are cut off. Cut the names only at the front.", hints="prefix")
def _cut_behind(weights, i):
    return {n.rpartition(".")[0]: w for n, w in _right(weights, i).items()}


@wrong("It takes layer i - 1. Layers count from 0, both in the checkpoint and here.", hints="names")
def _from_one(weights, i):
    return _right(weights, i - 1)


@wrong("The tensors are copied. A second set of weights would take twice the memory.", hints="same")
def _copies(weights, i):
    return {n: w.clone() for n, w in _right(weights, i).items()}


@wrong(
    "The prefix is cut off by a fixed number of characters. `model.layers.11.` is one character "
    "longer than `model.layers.1.`.",
    hints="prefix",
)
def _fixed_length(weights, i):
    start = len(_prefix(0))
    return {n[start:]: w for n, w in weights.items() if n.startswith(_prefix(i))}


@wrong(
    "Each name begins with a dot. The dot after the number belongs to the prefix: cut it off too.",
    hints="prefix",
)
def _dot_left(weights, i):
    return {"." + n: w for n, w in _right(weights, i).items()}


@wrong(
    "The names of other layers, or of no layer, are kept too. Keep only the names that begin with "
    "this layer's prefix.",
    hints="names",
)
def _all_names(weights, i):
    return {n.removeprefix(_prefix(i)): w for n, w in weights.items()}


def _right(weights, i):
    return {n[len(_prefix(i)) :]: w for n, w in weights.items() if n.startswith(_prefix(i))}


def _named() -> dict[str, torch.Tensor]:
    """Tensors that are told apart by their one number."""
    names = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    for i in (0, 1, 2, 10, 11):
        parts = ("self_attn.q_proj.weight", "self_attn.q_proj.bias", "mlp.down_proj.weight")
        names += [_prefix(i) + part for part in (*parts, "input_layernorm.weight")]
    return {name: torch.tensor([float(number)]) for number, name in enumerate(names)}


def _same_memory(answer, weights, i):
    """For each name of layer i: the same tensor as in `weights`, or a copy."""
    same = {id(w) for w in weights.values()}
    return {n: "the same" if id(w) in same else "a copy" for n, w in answer(weights, i).items()}


def _layer_cases() -> list[Case]:
    return [
        Case("layer 2", (_named(), 2), kind="names"),
        Case("layer 0", (_named(), 0), kind="names"),
        Case("layer 1 of 12", (_named(), 1), kind="twelve"),
        Case("layer 11 of 12", (_named(), 11), kind="twelve"),
        Case("the very same tensors?", (_named(), 2), kind="same", call=_same_memory),
    ]


# hidden ------------------------------------------------------------------------------------------


def _run(self, ids, cache=None, layers=None, norm=True, position=None, scale=1.0, handed=True):
    """The stack, with the places where people go wrong as options."""
    start = (0 if cache is None else cache.seq_len) if position is None else position
    cos, sin = self._rope(start, start + ids.shape[1])
    x = scale * F.embedding(ids, self.weights["model.embed_tokens.weight"])
    for index, layer in enumerate(self.layers):
        if layers is None or index in layers:
            x = block(x, layer, cos, sin, self.config, cache if handed else None, index)
    return rms_norm(x, self.weights["model.norm.weight"], self.config.norm_eps) if norm else x


@wrong(
    "The final norm is missing: the head expects the stream normed with `model.norm.weight`.",
    hints="ends",
)
def _no_norm(self, ids, cache=None):
    return _run(self, ids, cache, norm=False)


@wrong("The last block is left out: go through all of self.layers.", hints="stack")
def _one_short(self, ids, cache=None):
    return _run(self, ids, cache, layers=range(len(self.layers) - 1))


@wrong(
    "Each block reads the embedding. The input of a block is the output of the block before it.",
    hints="stack",
)
def _not_a_chain(self, ids, cache=None):
    cos, sin = self._rope(0, ids.shape[1])
    start = x = F.embedding(ids, self.weights["model.embed_tokens.weight"])
    for index, layer in enumerate(self.layers):
        x = block(start, layer, cos, sin, self.config, cache, index)
    return rms_norm(x, self.weights["model.norm.weight"], self.config.norm_eps)


@wrong(
    "The first layer's weights are used in every block: take each layer of self.layers once.",
    hints="stack",
)
def _same_layer(self, ids, cache=None):
    cos, sin = self._rope(0, ids.shape[1])
    x = F.embedding(ids, self.weights["model.embed_tokens.weight"])
    for index in range(len(self.layers)):
        x = block(x, self.layers[0], cos, sin, self.config, cache, index)
    return rms_norm(x, self.weights["model.norm.weight"], self.config.norm_eps)


@wrong("The blocks run from the last to the first: layer 0 comes first.", hints="stack")
def _backwards(self, ids, cache=None):
    cos, sin = self._rope(0, ids.shape[1])
    x = F.embedding(ids, self.weights["model.embed_tokens.weight"])
    for index in reversed(range(len(self.layers))):
        x = block(x, self.layers[index], cos, sin, self.config, cache, index)
    return rms_norm(x, self.weights["model.norm.weight"], self.config.norm_eps)


@wrong(
    "The embedding is multiplied by the root of the hidden size. Gemma does that; Llama does not.",
    hints="ends",
)
def _scaled(self, ids, cache=None):
    return _run(self, ids, cache, scale=self.config.hidden_size**0.5)


@wrong("The norm is applied after every block. Apply it once, after the last block.", hints="stack")
def _norms_everywhere(self, ids, cache=None):
    cos, sin = self._rope(0, ids.shape[1])
    x = F.embedding(ids, self.weights["model.embed_tokens.weight"])
    for index, layer in enumerate(self.layers):
        x = block(x, layer, cos, sin, self.config, cache, index)
        x = rms_norm(x, self.weights["model.norm.weight"], self.config.norm_eps)
    return x


@wrong(
    "The positions start at 0, but the cache holds tokens already: the first new position is "
    "cache.seq_len.",
    hints="cache",
)
def _from_zero(self, ids, cache=None):
    return _run(self, ids, cache, position=0)


@wrong(
    "The positions are one too high. The cache holds positions 0 to cache.seq_len - 1, so the "
    "first new one is cache.seq_len.",
    hints="cache",
)
def _off_by_one(self, ids, cache=None):
    return _run(self, ids, cache, position=1 + (0 if cache is None else cache.seq_len))


@wrong(
    "`self._rope(start, stop)` takes two positions. Here stop is the number of new tokens, which "
    "is right only without a cache: use start + ids.shape[1].",
    hints="cache",
)
def _stop_without_start(self, ids, cache=None):
    start = 0 if cache is None else cache.seq_len
    cos, sin = self._rope(start, ids.shape[1])
    x = F.embedding(ids, self.weights["model.embed_tokens.weight"])
    for index, layer in enumerate(self.layers):
        x = block(x, layer, cos, sin, self.config, cache, index)
    return rms_norm(x, self.weights["model.norm.weight"], self.config.norm_eps)


@wrong(
    "The number of positions is taken from len(ids), which is the batch. ids are [batch, seq]: use "
    "ids.shape[1].",
    hints="positions",
)
def _batch_for_seq(self, ids, cache=None):
    start = 0 if cache is None else cache.seq_len
    cos, sin = self._rope(start, start + len(ids))
    x = F.embedding(ids, self.weights["model.embed_tokens.weight"])
    for index, layer in enumerate(self.layers):
        x = block(x, layer, cos, sin, self.config, cache, index)
    return rms_norm(x, self.weights["model.norm.weight"], self.config.norm_eps)


@wrong("The cache is not passed on to the blocks: block(..., cache, index).", hints="cache")
def _cache_dropped(self, ids, cache=None):
    return _run(self, ids, cache, handed=False)


@wrong("Every block gets the number 0. Pass each block its own number as `index`.", hints="cache")
def _index_forgotten(self, ids, cache=None):
    start = 0 if cache is None else cache.seq_len
    cos, sin = self._rope(start, start + ids.shape[1])
    x = F.embedding(ids, self.weights["model.embed_tokens.weight"])
    for layer in self.layers:
        x = block(x, layer, cos, sin, self.config, cache)
    return rms_norm(x, self.weights["model.norm.weight"], self.config.norm_eps)


@wrong("The norm uses a fixed eps. Use the model's own: self.config.norm_eps.", hints="ends")
def _own_eps(self, ids, cache=None):
    return rms_norm(_run(self, ids, cache, norm=False), self.weights["model.norm.weight"], 1e-6)


def _hidden(model, config, weights, ids):
    return model(config, weights).hidden(ids)


class _SevenTokens:
    """A cache that holds seven random tokens in each layer and stores the layers that wrote."""

    def __init__(self) -> None:
        self.seq_len, self.layers = 7, []

    def append(self, layer, k, v):
        self.layers.append(layer)
        generator = torch.Generator().manual_seed(layer)
        past = 2 * torch.randn(2, *k.shape[:2], self.seq_len, k.shape[3], generator=generator)
        return torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)


def _hidden_with_a_cache(model, config, weights, ids):
    cache = _SevenTokens()
    return model(config, weights).hidden(ids, cache)


def _layers_that_wrote(model, config, weights, ids):
    cache = _SevenTokens()
    model(config, weights).hidden(ids, cache)
    return cache.layers


def _hidden_cases() -> list[Case]:
    ids = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 12]])
    loose, first = close(1e-4, 1e-4), replace(CONFIG, num_layers=1)
    full = torch.arange(CONFIG.context)[None] % CONFIG.vocab_size
    return [
        Case("one block, one token", (first, random_weights(), ids[:1, :1]),
             kind="ends", compare=loose, call=_hidden),
        Case("three blocks, a batch of 2, 5 tokens", (CONFIG, random_weights(), ids),
             kind="stack", compare=loose, call=_hidden),
        Case("a cache that holds 7 tokens", (CONFIG, random_weights(), ids[:1]),
             kind="cache", compare=loose, call=_hidden_with_a_cache),
        Case("which layers write to a cache", (CONFIG, random_weights(), ids[:1]),
             kind="cache", call=_layers_that_wrote),
        Case("a text that fills the context of 64", (first, random_weights(), full),
             kind="ends", compare=loose, call=_hidden),
    ]  # fmt: skip


# head --------------------------------------------------------------------------------------------


@wrong(
    "It uses the embedding. That is right only for a tied head; `lm_head.weight` is always there.",
    hints="name",
)
def _embedding(self, hidden):
    return F.linear(hidden, self.weights["model.embed_tokens.weight"])


@wrong("It returns probabilities. Logits are the scores before any softmax.")
def _probabilities(self, hidden):
    return F.linear(hidden, self.weights["lm_head.weight"]).softmax(-1)


@wrong("It returns logarithms of probabilities. Logits are the scores before log_softmax.")
def _log_probabilities(self, hidden):
    return F.linear(hidden, self.weights["lm_head.weight"]).log_softmax(-1)


@wrong("It returns the best token. The head gives all scores; Day 9 chooses among them.")
def _picked(self, hidden):
    return F.linear(hidden, self.weights["lm_head.weight"]).argmax(-1)


@wrong(
    "It returns the last position only. The head computes a row for every position it is given.",
    hints="rows",
)
def _last_only(self, hidden):
    return F.linear(hidden[..., -1:, :], self.weights["lm_head.weight"])


@wrong("The norm is applied a second time: `hidden` has applied it.")
def _normed_again(self, hidden):
    hidden = rms_norm(hidden, self.weights["model.norm.weight"], self.config.norm_eps)
    return F.linear(hidden, self.weights["lm_head.weight"])


@wrong("The logits are divided by the root of the hidden size. Nothing is scaled here.")
def _scaled_logits(self, hidden):
    return F.linear(hidden, self.weights["lm_head.weight"]) / self.config.hidden_size**0.5


def _head(model, config, weights, hidden):
    return model(config, weights).head(hidden)


def _head_cases() -> list[Case]:
    generator = torch.Generator().manual_seed(3)
    batch = torch.randn(2, 5, CONFIG.hidden_size, generator=generator)
    return [
        Case("a tied head, a batch of 2, 5 tokens", (CONFIG, random_weights(), batch),
             kind="head", compare=close(1e-4, 1e-4), call=_head),
        Case("a head of its own", (CONFIG, random_weights(tied=False), batch),
             kind="head", compare=close(1e-4, 1e-4), call=_head),
        Case("a single vector", (CONFIG, random_weights(), batch[0, 0]),
             kind="head", compare=close(1e-4, 1e-4), call=_head),
    ]  # fmt: skip


EXERCISES = (
    Exercise(
        "_layer",
        _layer_cases,
        hints={
            "names": (
                "Print the names of one layer. Which beginning do they share, and what is left "
                "when you cut it off?",
                "Keep the names that start with f'model.layers.{i}.', cut that part off, and leave "
                "the tensor itself alone.",
                "prefix = f'model.layers.{i}.', then {name.removeprefix(prefix): w for name, w in "
                "weights.items() if name.startswith(prefix)}",
            ),
            "twelve": (
                "Which names begin with `model.layers.1`?",
                "model.layers.10 and model.layers.11 do as well. Which character follows the "
                "number?",
                "The prefix ends with a dot: f'model.layers.{i}.'",
            ),
            "prefix": (
                "Compare one of your names with the table above: which part should be gone, and "
                "which part should still be there?",
                "Everything after `model.layers.3.` stays, `.weight` and `.bias` included.",
                "name.removeprefix(f'model.layers.{i}.')",
            ),
            "same": (
                "Does your dictionary hold the tensors of `weights`, or new ones?",
                "clone, contiguous and arithmetic make new tensors. Putting a tensor into a "
                "dictionary does not.",
                "{name.removeprefix(prefix): w for name, w in weights.items() if ...}: w itself",
            ),
        },
        target="nanoserve.model:_layer",
        wrong=(
            _no_dot, _keeps_prefix, _lstrip, _no_bias, _cut_behind, _from_one, _copies,
            _fixed_length, _dot_left, _all_names,
        ),
    ),
    Exercise(
        "hidden",
        _hidden_cases,
        hints={
            "ends": (
                "There is one block here. Which step comes before it, and which comes after it?",
                "Before: look up a row of the embedding for each id (F.embedding), and call "
                "self._rope for cos and sin. After: the final norm.",
                'x = F.embedding(ids, self.weights["model.embed_tokens.weight"]), and at the end '
                'rms_norm(x, self.weights["model.norm.weight"], self.config.norm_eps).',
            ),
            "stack": (
                "One block is right and three are not: what is the input of the second block?",
                "self.layers holds a dictionary for each block. The output of a block is the input "
                "of the next block.",
                "for index, layer in enumerate(self.layers): "
                "x = block(x, layer, cos, sin, self.config, cache, index)",
            ),
            "positions": (
                "Each token of `ids` needs cos and sin of its own position. How many positions are "
                "there?",
                "As many as a row of ids has tokens, and ids are [batch, seq].",
                "cos, sin = self._rope(start, start + ids.shape[1])",
            ),
            "cache": (
                "The cache holds seven tokens. At which position does the first new token stand?",
                "start = 0 if cache is None else cache.seq_len. Blocks need the cache and their "
                "number.",
                "cos, sin = self._rope(start, start + ids.shape[1]), and for every block "
                "block(x, layer, cos, sin, self.config, cache, index).",
            ),
        },
        target="nanoserve.model:Model.hidden",
        wrong=(
            _no_norm, _one_short, _not_a_chain, _same_layer, _backwards, _scaled,
            _norms_everywhere, _from_zero, _off_by_one, _cache_dropped, _index_forgotten, _own_eps,
            _stop_without_start, _batch_for_seq,
        ),
    ),
    Exercise(
        "head",
        _head_cases,
        hints={
            "head": (
                "The head is one matrix with a row for each token. What is done with its rows?",
                "A score is the product of the vector with one row, so all scores are one linear "
                "layer without a bias. Nothing comes before it and nothing after it.",
                'F.linear(hidden, self.weights["lm_head.weight"])',
            ),
            "name": (
                "Two names can hold this matrix: one is the embedding, one is the head. When are "
                "they the same tensor?",
                "Only when the head is tied. The loader of Day 2 fills the head's own name in "
                "either case.",
                'self.weights["lm_head.weight"]',
            ),
            "rows": (
                "`hidden` is [..., hidden_size]. Which shape should come out?",
                "[..., vocab_size]: the leading axes stay. Choosing the last position is the "
                "caller's work.",
                'F.linear(hidden, self.weights["lm_head.weight"])',
            ),
        },
        target="nanoserve.model:Model.head",
        wrong=(
            _embedding, _probabilities, _log_probabilities, _picked, _last_only, _normed_again,
            _scaled_logits,
        ),
    ),
)  # fmt: skip

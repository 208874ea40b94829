"""Day 8: right answers to `_layer`, `hidden` and `head`, in several styles."""

import re

import torch
import torch.nn.functional as F

from nanoserve.layers import block, linear, rms_norm, rope_tables


def layer_by_a_loop(weights, i):
    found = {}
    for name, tensor in weights.items():
        parts = name.split(".")
        if parts[:2] == ["model", "layers"] and int(parts[2]) == i:
            found[".".join(parts[3:])] = tensor
    return found


def layer_by_a_pattern(weights, i):
    matches = ((re.fullmatch(rf"model\.layers\.{i}\.(.+)", name), w) for name, w in weights.items())
    return {match[1]: w for match, w in matches if match}


def layer_by_length(weights, i):
    prefix = "model.layers." + str(i) + "."
    names = [name for name in weights if name[: len(prefix)] == prefix]
    return {name[len(prefix) :]: weights[name] for name in names}


def hidden_with_sliced_tables(self, ids, cache=None):
    """The tables from position 0, and the rows of the new positions taken from them."""
    past = cache.seq_len if cache is not None else 0
    cos, sin = self._rope(0, past + ids.size(1))
    x = self.weights["model.embed_tokens.weight"][ids]
    for number, layer in enumerate(self.layers):
        x = block(x, layer, cos[past:], sin[past:], self.config, cache, number)
    return rms_norm(x, self.weights["model.norm.weight"], self.config.norm_eps)


def hidden_with_tables_of_its_own(self, ids, cache=None):
    start = getattr(cache, "seq_len", 0)
    cos, sin = (t[start:] for t in rope_tables(self.config, start + ids.shape[1]))
    x = F.embedding(ids, self.weights["model.embed_tokens.weight"])
    for i in range(self.config.num_layers):
        x = block(x, self.layers[i], cos, sin, self.config, cache=cache, index=i)
    scale = torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + self.config.norm_eps)
    return x * scale * self.weights["model.norm.weight"]


def hidden_with_keywords(self, ids, cache=None):
    start = cache.seq_len if cache else 0
    cos, sin = self._rope(start=start, stop=start + ids.shape[-1])
    rows = [self.weights["model.embed_tokens.weight"].index_select(0, row) for row in ids]
    x = torch.stack(rows)
    for index, layer in enumerate(self.layers):
        x = block(x=x, layer=layer, cos=cos, sin=sin, config=self.config, cache=cache, index=index)
    return rms_norm(x, self.weights["model.norm.weight"], self.config.norm_eps)


def head_by_matmul(self, hidden):
    return hidden @ self.weights["lm_head.weight"].T


def head_by_einsum(self, hidden):
    return torch.einsum("...h,vh->...v", hidden, self.weights["lm_head.weight"])


def head_by_the_engine_s_linear(self, hidden):
    return linear(hidden, self.weights["lm_head.weight"])


def head_row_by_row(self, hidden):
    rows = self.weights["lm_head.weight"].unbind(0)
    return torch.stack([(hidden * row).sum(dim=-1) for row in rows], dim=-1)


RIGHT = {
    "_layer": (layer_by_a_loop, layer_by_a_pattern, layer_by_length),
    "hidden": (hidden_with_sliced_tables, hidden_with_tables_of_its_own, hidden_with_keywords),
    "head": (head_by_matmul, head_by_einsum, head_by_the_engine_s_linear, head_row_by_row),
}

"""Day 11: right answers to `causal_mask` and `append`, in several styles."""

import torch


def mask_by_positions(query_len, kv_len):
    position = torch.arange(kv_len - query_len, kv_len)[:, None]
    return torch.arange(kv_len)[None, :] > position


def mask_by_loops(query_len, kv_len):
    mask = torch.zeros(query_len, kv_len, dtype=torch.bool)
    for i in range(query_len):
        mask[i, kv_len - query_len + i + 1 :] = True
    return mask


def mask_by_lower_triangle(query_len, kv_len):
    return ~torch.tril(torch.ones(query_len, kv_len), diagonal=kv_len - query_len).bool()


def mask_from_the_square(query_len, kv_len):
    return torch.ones(kv_len, kv_len).triu(1).bool()[kv_len - query_len :]


def append_by_heads(self, layer, k, v):
    batch, heads, new, _ = k.shape
    if batch != 1:
        raise ValueError(f"one sequence only, not {batch}")
    start, end = self.seq_len, self.seq_len + new
    if self._k is None or self._capacity < end:
        self._grow(needed=end, like=v)
    for strip, rows in ((self._k, k), (self._v, v)):
        for head in range(heads):
            strip[layer][head][start:end] = rows[0][head]
    if layer + 1 == self._config.num_layers:
        self.seq_len += new
    return self._k[layer][None, :, :end], self._v[layer][None, :, :end]


def append_by_copy(self, layer, k, v):
    if len(k) != 1:
        raise ValueError("a cache holds one sequence")
    query_len = k.size(2)
    end = self.seq_len + query_len
    while self._k is None or end > self._capacity:
        self._grow(end, k)
    views = []
    for strip, new in ((self._k, k), (self._v, v)):
        one = strip[layer : layer + 1]
        one.narrow(2, self.seq_len, query_len).copy_(new)
        views.append(one.narrow(2, 0, end))
    last = self._config.num_layers - 1
    self.seq_len = end if layer == last else self.seq_len
    return views[0], views[1]


def append_by_index(self, layer, k, v):
    (one, _, query_len, _) = k.shape
    if one > 1 or one < 1:
        raise ValueError(f"batch {one}")
    where = torch.arange(self.seq_len, self.seq_len + query_len)
    end = int(where[-1]) + 1
    if self._k is None or end > self._k.shape[2]:
        self._grow(end, k)
    self._k[layer].index_copy_(1, where, k.squeeze(0))
    self._v[layer].index_copy_(1, where, v.squeeze(0))
    history = self._k[layer].unsqueeze(0)[..., :end, :], self._v[layer].unsqueeze(0)[..., :end, :]
    if layer == len(self._k) - 1:
        self.seq_len = end
    return history


RIGHT = {
    "causal_mask": (
        mask_by_positions,
        mask_by_loops,
        mask_by_lower_triangle,
        mask_from_the_square,
    ),
    "append": (append_by_heads, append_by_copy, append_by_index),
}

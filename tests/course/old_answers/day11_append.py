# Day 11, append: your answer, saved when it passed its check.

import torch


def append(self, layer: int, k: torch.Tensor, v: torch.Tensor):
    """Write k, v [1, n_kv, seq_q, head_dim] behind the history; return views of all of it."""
    batch, _, seq_q, _ = k.shape
    if batch != 1:
        raise ValueError(f"a cache holds one sequence, got a batch of {batch}")
    seq_total = self.seq_len + seq_q
    if self._k is None or seq_total > self._capacity:
        self._grow(seq_total, k)
    self._k[layer, :, self.seq_len : seq_total] = k[0]
    self._v[layer, :, self.seq_len : seq_total] = v[0]
    if layer == self._config.num_layers - 1:
        self.seq_len = seq_total
    return self._k[layer : layer + 1, :, :seq_total], self._v[layer : layer + 1, :, :seq_total]

"""What a sequence remembers: the keys and values of the tokens it has seen."""

import torch

from nanoserve.config import ModelConfig


class NaiveKVCache:
    """One contiguous strip of memory per sequence, doubled when it is full."""

    def __init__(self, config: ModelConfig, capacity: int = 64) -> None:
        self.seq_len = 0
        self._config = config
        self._capacity = capacity
        self._k: torch.Tensor | None = None  # [num_layers, n_kv, capacity, head_dim]
        self._v: torch.Tensor | None = None

    def append(
        self, layer: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write k, v [1, n_kv, seq_q, head_dim] behind the history; return views of all of it.

        Raises ValueError for more than one sequence. A step that fails half-way leaves seq_len.
        """
        if k.shape[0] != 1:
            raise ValueError(f"a cache holds one sequence, got a batch of {k.shape[0]}")
        end = self.seq_len + k.shape[2]
        if self._k is None or end > self._capacity:
            self._grow(end, k)
        self._k[layer, :, self.seq_len : end] = k[0]
        self._v[layer, :, self.seq_len : end] = v[0]
        if layer == self._config.num_layers - 1:
            self.seq_len = end
        return self._k[layer : layer + 1, :, :end], self._v[layer : layer + 1, :, :end]

    def _grow(self, needed: int, like: torch.Tensor) -> None:
        """Move the history into strips at least twice as long: growth then costs O(1) a token."""
        if self._k is not None:
            needed = max(needed, 2 * self._capacity)
        self._capacity = max(needed, self._capacity)
        shape = (self._config.num_layers, self._config.n_kv, self._capacity, self._config.head_dim)
        k, v = like.new_empty(shape), like.new_empty(shape)
        if self._k is not None:
            k[:, :, : self.seq_len] = self._k[:, :, : self.seq_len]
            v[:, :, : self.seq_len] = self._v[:, :, : self.seq_len]
        self._k, self._v = k, v

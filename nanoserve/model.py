"""The whole forward pass: token ids in, logits out."""

from pathlib import Path

import torch
import torch.nn.functional as F

from nanoserve.config import ModelConfig, load_config
from nanoserve.fetch import resolve
from nanoserve.layers import Cache, block, linear, rms_norm, rope_tables
from nanoserve.weights import load_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
        return self.weights["lm_head.weight"].device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights and activations."""
        return self.weights["lm_head.weight"].dtype

    def __call__(self, ids: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        """Logits of the token after each position: ids [batch, seq] -> [batch, seq, vocab].

        With a cache (batch 1), ids are the tokens after those in the cache, and their keys and
        values are added to the cache. Raises ValueError for ids of another shape or type, and for
        positions past the model's context.
        """
        return self.head(self.hidden(ids, cache))

    def hidden(self, ids: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        """The final norm's output: ids [batch, seq] -> [batch, seq, hidden]; errors as __call__."""
        self._check(ids)
        cos, sin = self._angles(ids.shape[1], cache)
        x = F.embedding(ids, self.weights["model.embed_tokens.weight"])
        for index, layer in enumerate(self.layers):
            x = block(x, layer, cos, sin, self.config, cache, index)
        return rms_norm(x, self.weights["model.norm.weight"], self.config.norm_eps)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits from the final hidden states: [..., hidden] -> [..., vocab]."""
        return linear(hidden, self.weights["lm_head.weight"])

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

    def _angles(self, seq: int, cache: Cache | None) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin at the positions of this step's tokens: [seq, head_dim] each.

        A cache with `positions`, as PagedBatch has, names the position of each token. Otherwise the
        tokens follow those in the cache.
        """
        if hasattr(cache, "positions"):
            cos, sin = self._rope(0, cache.tables.max_kv_len)
            return cos[cache.positions], sin[cache.positions]
        start = 0 if cache is None else cache.seq_len
        return self._rope(start, start + seq)

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


def _layer(weights: dict[str, torch.Tensor], i: int) -> dict[str, torch.Tensor]:
    """Layer i's weights, by names that are the same for every layer."""
    prefix = f"model.layers.{i}."
    return {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}


def load_model(
    source: str | Path = "smollm2",
    dtype: str | torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Model:
    """Load "smollm2" (fetched on first use), a folder, a .gguf file or a hub id.

    dtype: float32, bfloat16 or float16, or its name. Raises ValueError for a dtype or device that
    cannot be used, and for a checkpoint that is broken or not supported.
    """
    dtype, device = as_dtype(dtype), as_device(device)
    path = resolve(source)
    config = load_config(path)
    model = Model(config, load_weights(path, config, dtype, device))
    join_qkv(model)
    return model


def as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return a dtype of DTYPES, given as a dtype or by name. Raises ValueError for any other."""
    found = DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if found not in DTYPES.values():
        raise ValueError(f"dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}")
    return found


def as_device(device: str | torch.device) -> torch.device:
    """Return a device that can hold tensors here. Raises ValueError, with torch's reason."""
    try:
        found = torch.device(device)
        torch.empty(1, device=found).cpu()
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise ValueError(f"device {str(device)!r} cannot be used: {reason}") from None
    return found


def join_qkv(model: Model) -> None:
    """Give each layer "self_attn.qkv_proj.weight", the joined rows of q, k and v; likewise a bias.

    The weights of q, k and v become views of those rows, so no value is stored twice. In-place
    edits show in qkv_proj; rebinding a name does not.
    """
    for i, layer in enumerate(model.layers):
        for kind in ("weight", "bias") if model.config.qkv_bias else ("weight",):
            names = [f"self_attn.{letter}_proj.{kind}" for letter in "qkv"]
            joined = torch.cat([layer[name] for name in names])
            views = joined.split([len(layer[name]) for name in names])
            for name, view in zip(names, views, strict=True):
                layer[name] = model.weights[f"model.layers.{i}.{name}"] = view
            layer[f"self_attn.qkv_proj.{kind}"] = joined

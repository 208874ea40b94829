"""The whole forward pass: token ids in, logits out."""

import warnings
from pathlib import Path

import torch

from nanoserve.config import ModelConfig, load_config
from nanoserve.fetch import resolve
from nanoserve.layers import Cache, block, embedding, linear, rms_norm, rope_tables
from nanoserve.q4_file import load_kept
from nanoserve.quant import Q4Weight, check_quantization, concatenate, why_not
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
        return self.weights["model.norm.weight"].device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the activations, and of all weights that are not quantised."""
        return self.weights["model.norm.weight"].dtype

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
        x = embedding(ids, self.weights["model.embed_tokens.weight"], self.dtype)
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
    quantization: str | None = None,
) -> Model:
    """Load "smollm2" (fetched on first use), a folder, a .gguf file or a hub id.

    dtype: float32, bfloat16 or float16, or its name. With quantization "q4", matrices are kept in
    four bits, and dtype is that of the activations. Raises ValueError for a dtype, device or
    quantization that cannot be used, and for a checkpoint that is broken or not supported.
    """
    dtype, device = as_dtype(dtype), as_device(device)
    check_quantization(quantization)
    path = resolve(source)
    config = load_config(path)
    load = load_weights if quantization is None else load_kept
    model = Model(config, load(path, config, dtype, device))
    join_qkv(model)
    if quantization is not None:
        pack_weights(model)
        warn_dequantized(model)
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
            rows = [layer[name] for name in names]
            if len({type(weight) for weight in rows}) > 1:
                continue  # a part of them is in four bits
            joined = concatenate(rows) if isinstance(rows[0], Q4Weight) else torch.cat(rows)
            views = joined.split([len(weight) for weight in rows])
            for name, view in zip(names, views, strict=True):
                layer[name] = model.weights[f"model.layers.{i}.{name}"] = view
            layer[f"self_attn.qkv_proj.{kind}"] = joined


def pack_weights(model: Model) -> None:
    """Pack the weights in four bits that the model multiplies by; no other weight is changed.

    The embedding is looked up by row, and q, k and v are parts of qkv_proj: these need no packed
    form.
    """
    for layer in model.layers:
        parts = [f"self_attn.{letter}_proj.weight" for letter in "qkv"]
        joined = "self_attn.qkv_proj.weight" in layer
        for name, weight in layer.items():
            if isinstance(weight, Q4Weight) and not (joined and name in parts):
                weight.pack()
    head = model.weights["lm_head.weight"]
    if isinstance(head, Q4Weight):
        head.pack()


def warn_dequantized(model: Model) -> None:
    """Warn, in one line, about matrices that are not in four bits; the line gives one reason."""
    matrices = {name: w for name, w in model.weights.items() if len(w.shape) == 2}
    others = {name: w for name, w in matrices.items() if not isinstance(w, Q4Weight)}
    if others:
        name, weight = next(iter(others.items()))
        warnings.warn(
            f"q4: {len(others)} of {len(matrices)} matrices are dequantised to {weight.dtype}; "
            f"{name}: {why_not(weight.shape, weight.device)}",
            stacklevel=3,
        )

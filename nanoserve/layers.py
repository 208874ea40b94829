"""The parts of a decoder block, as plain functions of tensors.

Shapes: batch, seq; n_q query heads, n_kv key and value heads, n_rep = n_q // n_kv; head_dim.
A layer's weights are a dictionary: the checkpoint's names, without the prefix "model.layers.3.".
"""

import math
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F

from nanoserve.config import ModelConfig

QUERY_TILE = 128  # queries in one matrix product: enough for speed, few enough to skip future keys


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide each vector by its root mean square, then scale (Zhang and Sennrich 2019, eq. 4).

    x [..., n], weight [n] -> [..., n] in x's dtype; the mean is taken in float32.
    """
    h = x.float()
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return h.to(x.dtype).mul_(weight)


def plain_frequencies(config: ModelConfig) -> torch.Tensor:
    """The angle per position of each rotated pair, in radians: float32 [head_dim / 2].

    theta ** (-2i / head_dim) (Su et al. 2021, section 3.2); `config.rope_scaling` is not applied.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    return 1.0 / config.rope_theta**exponents


def rope_frequencies(config: ModelConfig) -> torch.Tensor:
    """The angle per position that the model uses, in radians: float32 [head_dim / 2].

    Without scaling, these are the plain frequencies. Llama 3's scaling (transformers: rope_type
    "llama3") counts a pair's turns within the original context. A pair with high_freq_factor turns
    or more keeps its frequency. With low_freq_factor turns or fewer, the frequency is divided by
    `factor`. Between the two limits, both frequencies are blended.
    """
    frequencies = plain_frequencies(config)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_context * frequencies / (2 * math.pi)  # within the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def rope_tables(config: ModelConfig, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position times frequency: float32 [length, head_dim] for every model dtype.

    Not computed in bfloat16, which would round positions: 15,962 to 15,936.
    """
    positions = torch.arange(length, dtype=torch.float32)
    angles = torch.outer(positions, rope_frequencies(config))  # [length, head_dim / 2]
    angles = torch.cat([angles, angles], dim=-1)  # both members of a pair turn by the same angle
    return angles.cos(), angles.sin()


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """Rotate each pair (i, i + head_dim / 2) of the last axis by 90 degrees: (a, b) -> (-b, a)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads [..., seq, head_dim] by their positions' angles; cos, sin [seq, head_dim].

    The rotation is done in float32; the result has x's dtype.
    """
    h = x.float()
    return torch.addcmul(h * cos, rotate_half(h), sin).to(x.dtype)


class PackedWeight(Protocol):
    """A weight [out, in] that is no tensor, as layers use it: quant.Q4Weight is one."""

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The rows with these ids: ids [...] -> [..., in] in `dtype`."""
        ...

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] times the weight -> [..., out], in x's dtype."""
        ...


def embedding(
    ids: torch.Tensor, weight: torch.Tensor | PackedWeight, dtype: torch.dtype
) -> torch.Tensor:
    """The rows of weight [vocab, hidden] with these ids: ids [...] -> [..., hidden] in `dtype`."""
    if isinstance(weight, torch.Tensor):
        return F.embedding(ids, weight).to(dtype)
    return weight.rows(ids, dtype)


def linear(
    x: torch.Tensor, weight: torch.Tensor | PackedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [..., in] times weight [out, in], plus bias [out] -> [..., out].

    A packed weight multiplies by itself. With a tensor, a single row, as in a decode step, is
    multiplied by torch.mv, a matrix-vector routine. For bfloat16 on a CPU with bfloat16 products,
    F.linear is faster and is used instead.
    """
    if not isinstance(weight, torch.Tensor):
        out = weight.linear(x)
        return out if bias is None else out + bias
    if x.numel() > x.shape[-1] or (x.dtype == torch.bfloat16 and _bfloat16_products()):
        return F.linear(x, weight, bias)
    out = torch.mv(weight, x.flatten())
    return (out if bias is None else out + bias).view(*x.shape[:-1], -1)


@cache
def _bfloat16_products() -> bool:
    """Whether this CPU has instructions for products of bfloat16: avx512_bf16 or AMX.

    On such a CPU, F.linear takes 0.6 to 0.9 times as long as torch.mv for SmolLM2's shapes (torch
    2.13; 13.0 and 22.6 ms for all products of a decode step). With oneDNN limited to AVX2, the
    ratio is 1.0 to 1.15. In float32 and float16, both take the same time.
    """
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)  # a CPU with AMX has it too
    return supported is not None and supported()


def swiglu(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """The gated MLP, down(silu(gate x) * up x) (Shazeer 2020, section 2).

    x [..., hidden]; gate, up [intermediate, hidden]; down [hidden, intermediate] -> [..., hidden].
    """
    h = F.silu(linear(x, gate), inplace=True)  # in place: nothing else refers to this tensor
    return linear(h.mul_(linear(x, up)), down)


def sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """Causal attention as an explicit sum (Vaswani et al. 2017, eq. 1), in tiles of queries.

    q [batch, n_q, query_len, head_dim]; k, v [batch, n_kv, kv_len, head_dim]; the queries are the
    last query_len of kv_len positions -> [batch, n_q, query_len, head_dim]. Query head h reads KV
    head h // n_rep; no head is copied. `scale` defaults to head_dim ** -0.5. A tile of queries
    skips the keys after its last query. A single query is computed in float32 or wider.
    """
    batch, n_q, query_len, head_dim = q.shape
    n_kv, kv_len = k.shape[1:3]
    scale = head_dim**-0.5 if scale is None else scale
    if query_len == 1:  # no mask, and reading k and v takes most of the time
        wide = torch.promote_types(q.dtype, torch.float32)
        rows = (q.to(wide) * scale).reshape(batch * n_kv, n_q // n_kv, head_dim)
        k, v = k.to(wide).flatten(0, 1), v.to(wide).flatten(0, 1)
        weights = torch.bmm(rows, k.transpose(1, 2)).softmax(dim=-1)
        return torch.bmm(weights, v).to(q.dtype).view(q.shape)
    q = q * scale  # q has fewer elements than the scores
    # the query heads of one KV head form a group
    q = q.reshape(batch * n_kv, n_q // n_kv, query_len, head_dim)
    k, v = k.flatten(0, 1), v.flatten(0, 1)  # [batch * n_kv, kv_len, head_dim]
    out = torch.empty_like(q)
    # scores of one tile; all tiles share this memory, because new memory for each tile is slow
    workspace = q.new_empty(batch * n_q * min(query_len, QUERY_TILE) * kv_len)
    for start in range(0, query_len, QUERY_TILE):
        tile = slice(start, min(start + QUERY_TILE, query_len))
        keys = kv_len - query_len + tile.stop
        out[:, :, tile] = _attend(q[:, :, tile], k[:, :keys], v[:, :keys], workspace)
    return out.view(batch, n_q, query_len, head_dim)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, workspace: torch.Tensor
) -> torch.Tensor:
    """Attention of one tile of queries: q [groups, n_rep, tile, head_dim], scaled already; k, v
    [groups, keys, head_dim] -> the shape of q.

    The scores are written to `workspace`, which has at least groups * n_rep * tile * keys elements.
    """
    groups, n_rep, tile, _ = q.shape
    shape = (groups, n_rep * tile, k.shape[1])
    scores = workspace[: math.prod(shape)].view(shape)
    torch.bmm(q.flatten(1, 2), k.transpose(1, 2), out=scores)
    if tile > 1:
        future = torch.ones(tile, tile, dtype=torch.bool, device=q.device).triu_(1)
        scores.unflatten(1, (n_rep, tile))[..., -tile:].masked_fill_(future, -torch.inf)
    weights = torch.softmax(scores, dim=-1, out=scores)  # torch sums in float32 for every dtype
    return torch.bmm(weights, v).view(q.shape)


class Cache(Protocol):
    """The interface of a cache of one sequence, as the model uses it.

    A cache may also have paged_attention(layer, k, v, q, n_rep); gqa_attention then calls that.
    """

    seq_len: int  # tokens held before this step: the position of the next token

    def append(
        self, layer: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store this step's k and v [1, n_kv, query_len, head_dim] of one layer. Return all keys
        and values of the layer, [1, n_kv, kv_len, head_dim]. The last layer advances seq_len."""
        ...


def gqa_attention(
    x: torch.Tensor,
    layer: dict[str, torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    config: ModelConfig,
    cache: Cache | None = None,
    index: int = 0,
) -> torch.Tensor:
    """Grouped-query attention (Ainslie et al. 2023): n_q query heads share n_kv KV heads.

    x [batch, seq, hidden], cos and sin [seq, head_dim] of x's positions -> [batch, seq, hidden].
    A cache stores this step's keys and values under layer `index`. If the cache has a method
    paged_attention, that method computes attention; otherwise sdpa does, over the keys and values
    that the cache returns. Without a cache, sdpa attends to this step's keys and values.
    """
    heads = _heads(_qkv(x, layer), config.n_q + 2 * config.n_kv)  # of q, then of k, then of v
    qk, v = heads.split([config.n_q + config.n_kv, config.n_kv], dim=1)
    if config.qk_norm:  # Qwen3: normalise each head's query and key before RoPE
        q, k = qk.split([config.n_q, config.n_kv], dim=1)
        q = rms_norm(q, layer["self_attn.q_norm.weight"], config.norm_eps)
        k = rms_norm(k, layer["self_attn.k_norm.weight"], config.norm_eps)
        qk = torch.cat([q, k], dim=1)
    q, k = apply_rope(qk, cos, sin).split([config.n_q, config.n_kv], dim=1)
    if cache is None:
        out = sdpa(q, k, v)
    elif hasattr(cache, "paged_attention"):  # the cache attends over its own memory
        out = cache.paged_attention(index, k, v, q, config.n_rep)
    else:
        out = sdpa(q, *cache.append(index, k, v))
    return _linear(out.transpose(1, 2).flatten(2), layer, "self_attn.o_proj")


def _qkv(x: torch.Tensor, layer: dict[str, torch.Tensor]) -> torch.Tensor:
    """q, k and v of x, concatenated: [batch, seq, (n_q + 2 * n_kv) * head_dim].

    One product where the layer has the joined weight of `join_qkv`, else three.
    """
    if "self_attn.qkv_proj.weight" in layer:
        return _linear(x, layer, "self_attn.qkv_proj")
    return torch.cat([_linear(x, layer, f"self_attn.{letter}_proj") for letter in "qkv"], dim=-1)


def _heads(x: torch.Tensor, n: int) -> torch.Tensor:
    """[batch, seq, n * head_dim] -> [batch, n, seq, head_dim], a view."""
    return x.unflatten(-1, (n, -1)).transpose(1, 2)


def _linear(x: torch.Tensor, layer: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    return linear(x, layer[f"{name}.weight"], layer.get(f"{name}.bias"))


def block(
    x: torch.Tensor,
    layer: dict[str, torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    config: ModelConfig,
    cache: Cache | None = None,
    index: int = 0,
) -> torch.Tensor:
    """One decoder block: x + attention(norm(x)), then x + MLP(norm(x)).

    x [batch, seq, hidden] -> the same shape; the other arguments are gqa_attention's.
    """
    normed = rms_norm(x, layer["input_layernorm.weight"], config.norm_eps)
    x = x + gqa_attention(normed, layer, cos, sin, config, cache, index)
    normed = rms_norm(x, layer["post_attention_layernorm.weight"], config.norm_eps)
    names = ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")
    return x + swiglu(normed, *(layer[name] for name in names))

"""Right answers to the exercise of Day 19, in different styles."""

import torch

from nanoserve.layers import apply_rope, linear, rms_norm, sdpa


def _projected(x, layer, cos, sin, config):
    """q, k, v with one product each, RoPE applied."""
    made = []
    for letter, heads in (("q", config.n_q), ("k", config.n_kv), ("v", config.n_kv)):
        name = f"self_attn.{letter}_proj"
        y = linear(x, layer[f"{name}.weight"], layer.get(f"{name}.bias"))
        y = y.view(*x.shape[:2], heads, config.head_dim).transpose(1, 2)
        if config.qk_norm and letter != "v":
            y = rms_norm(y, layer[f"self_attn.{letter}_norm.weight"], config.norm_eps)
        made.append(y if letter == "v" else apply_rope(y, cos, sin))
    return made


def _output(out, layer):
    name = "self_attn.o_proj"
    flat = out.transpose(1, 2).reshape(out.shape[0], out.shape[2], -1)
    return linear(flat, layer[f"{name}.weight"], layer.get(f"{name}.bias"))


def with_getattr(x, layer, cos, sin, config, cache=None, index=0):
    """getattr with a default finds the method."""
    q, k, v = _projected(x, layer, cos, sin, config)
    attend = getattr(cache, "paged_attention", None)
    if attend is not None:
        out = attend(index, k, v, q, config.n_rep)
    elif cache is not None:
        k, v = cache.append(index, k, v)
        out = sdpa(q, k, v)
    else:
        out = sdpa(q, k, v)
    return _output(out, layer)


def with_its_scale(x, layer, cos, sin, config, cache=None, index=0):
    """Arguments by name, and the default scale handed over as a number."""
    q, k, v = _projected(x, layer, cos, sin, config)
    if hasattr(cache, "paged_attention"):
        scale = config.head_dim**-0.5
        return _output(
            cache.paged_attention(layer=index, k=k, v=v, q=q, n_rep=config.n_rep, scale=scale),
            layer,
        )
    if cache is not None:
        k, v = cache.append(index, k, v)
    return _output(sdpa(q, k, v, config.head_dim**-0.5), layer)


def with_try(x, layer, cos, sin, config, cache=None, index=0):
    """The method is looked up, and its absence caught."""
    q, k, v = _projected(x, layer, cos, sin, config)
    try:
        attend = cache.paged_attention
    except AttributeError:
        history = (k, v) if cache is None else cache.append(index, k, v)
        out = sdpa(q, *history)
    else:
        out = attend(index, k, v, q, torch.tensor(config.n_q).item() // config.n_kv)
    return _output(out, layer)


RIGHT = {"gqa_attention": (with_getattr, with_its_scale, with_try)}

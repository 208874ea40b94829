"""Day 7: right answers to `block`, in several styles."""

import torch
import torch.nn.functional as F

from nanoserve.layers import gqa_attention, rms_norm, swiglu


def step_by_step(x, layer, cos, sin, config, cache=None, index=0):
    residual = x
    h = rms_norm(x, layer["input_layernorm.weight"], config.norm_eps)
    h = gqa_attention(h, layer, cos, sin, config, cache=cache, index=index)
    h = residual + h
    residual = h
    h = rms_norm(h, layer["post_attention_layernorm.weight"], config.norm_eps)
    gate, up = layer["mlp.gate_proj.weight"], layer["mlp.up_proj.weight"]
    return residual + swiglu(h, gate, up, layer["mlp.down_proj.weight"])


def two_branches(x, layer, cos, sin, config, cache=None, index=0):
    def attend(h):
        return gqa_attention(h, layer, cos, sin, config, cache, index)

    def mlp(h):
        return swiglu(h, *(layer[f"mlp.{part}_proj.weight"] for part in ("gate", "up", "down")))

    for name, branch in (("input_layernorm", attend), ("post_attention_layernorm", mlp)):
        x = torch.add(x, branch(rms_norm(x, layer[name + ".weight"], config.norm_eps)))
    return x


def in_place_on_a_copy(x, layer, cos, sin, config, cache=None, index=0):
    def norm(h, weight):
        return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + config.norm_eps) * weight

    stream = x.clone()
    stream += gqa_attention(
        norm(stream, layer["input_layernorm.weight"]), layer, cos, sin, config, cache, index
    )
    h = norm(stream, layer["post_attention_layernorm.weight"])
    gate = F.silu(F.linear(h, layer["mlp.gate_proj.weight"]))
    inner = gate * F.linear(h, layer["mlp.up_proj.weight"])
    stream += F.linear(inner, layer["mlp.down_proj.weight"])
    return stream


RIGHT = {"block": (step_by_step, two_branches, in_place_on_a_copy)}

"""Day 4: right answers in other styles than the package's."""

import math

import numpy as np
import torch
import torch.nn.functional as F


def with_torch(x, weight, eps):
    return (F.rms_norm(x.float(), weight.shape, eps=eps) * weight.float()).to(x.dtype)


def vector_by_vector(x, weight, eps):
    out = torch.empty_like(x)
    rows, done = x.reshape(-1, x.shape[-1]), out.view(-1, x.shape[-1])
    for row, place in zip(rows, done, strict=True):
        numbers = [float(number) for number in row]
        root = math.sqrt(sum(number * number for number in numbers) / len(numbers) + eps)
        place.copy_(torch.tensor([number / root for number in numbers]) * weight.float())
    return out


def by_length(x, weight, eps):
    """The root mean square is the length over the root of the number of numbers."""
    h, n = x.to(torch.float32), x.size(-1)
    squared = torch.linalg.vector_norm(h, dim=-1, keepdim=True).pow(2) / n
    return torch.mul(h / torch.sqrt(squared + eps), weight).type_as(x)


def by_slices(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def by_complex_number(x):
    """A quarter turn is a product with i."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half], x[..., half:]) * 1j
    return torch.cat([turned.real, turned.imag], dim=-1)


def by_filling(x):
    out, half = torch.zeros_like(x), x.shape[-1] // 2
    for i in range(half):
        out[..., i] = -x[..., i + half]
        out[..., i + half] = x[..., i]
    return out


def by_roll(x):
    half = x.shape[-1] // 2
    signs = torch.ones(x.shape[-1])
    signs[:half] = -1
    return x.roll(half, dims=-1) * signs


def pair_by_pair(config):
    d = config.head_dim
    return torch.tensor([config.rope_theta ** (-2 * i / d) for i in range(d // 2)])


def in_numpy(config):
    exponents = np.arange(0, config.head_dim, 2) / config.head_dim
    return torch.from_numpy(1 / config.rope_theta**exponents).float()


def by_logarithm(config):
    pairs = torch.arange(config.head_dim // 2, dtype=torch.float64)
    return torch.exp(-2 * pairs / config.head_dim * math.log(config.rope_theta)).float()


def _plain(config):
    return [config.rope_theta ** (-2 * i / config.head_dim) for i in range(config.head_dim // 2)]


def scaled_pair_by_pair(config):
    out, s = [], config.rope_scaling
    for frequency in _plain(config):
        if s is None:
            out.append(frequency)
            continue
        turns = s.original_context * frequency / (2 * math.pi)
        if turns >= s.high_freq_factor:
            out.append(frequency)
        elif turns <= s.low_freq_factor:
            out.append(frequency / s.factor)
        else:
            share = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
            out.append(share * frequency + (1 - share) * frequency / s.factor)
    return torch.tensor(out)


def scaled_by_where(config):
    """By wavelengths, as in Meta's own code."""
    plain = torch.tensor(_plain(config), dtype=torch.float64)
    if not config.rope_scaling:
        return plain.float()
    s = config.rope_scaling
    waves = 2 * math.pi / plain
    smooth = (s.original_context / waves - s.low_freq_factor) / (
        s.high_freq_factor - s.low_freq_factor
    )
    middle = (1 - smooth) * plain / s.factor + smooth * plain
    slowed = torch.where(waves > s.original_context / s.low_freq_factor, plain / s.factor, middle)
    kept = torch.where(waves < s.original_context / s.high_freq_factor, plain, slowed)
    return kept.float()


def scaled_by_lerp(config):
    plain = pair_by_pair(config)
    if (s := config.rope_scaling) is None:
        return plain
    turns = s.original_context / (2 * math.pi) * plain
    low, high = s.low_freq_factor, s.high_freq_factor
    keep = turns.clamp(low, high).sub(low).div(high - low)
    return torch.lerp(plain / s.factor, plain, keep)


RIGHT = {
    "rms_norm": (with_torch, vector_by_vector, by_length),
    "rotate_half": (by_slices, by_complex_number, by_filling, by_roll),
    "plain_frequencies": (pair_by_pair, in_numpy, by_logarithm),
    "rope_frequencies": (scaled_pair_by_pair, scaled_by_where, scaled_by_lerp),
}

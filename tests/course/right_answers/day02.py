"""Day 2: right answers in other styles than the package's."""

import struct

import numpy as np
import torch

from nanoserve.weights import GGUF_NAMES


def by_split(gguf_name):
    *layer, part, kind = gguf_name.split(".")
    if part not in GGUF_NAMES or kind not in ("weight", "bias"):
        return gguf_name
    start = f"model.layers.{layer[1]}." if layer else ""
    return f"{start}{GGUF_NAMES[part]}.{kind}"


def by_ending(gguf_name):
    for kind in ("weight", "bias"):
        stem = gguf_name.removesuffix(f".{kind}")
        if stem == gguf_name:
            continue
        prefix = ""
        if stem.startswith("blk."):
            _, number, stem = stem.split(".", 2)
            prefix = "model.layers." + number + "."
        if stem in GGUF_NAMES:
            return prefix + GGUF_NAMES[stem] + "." + kind
    return gguf_name


def by_list_of_all(gguf_name):
    names = {}
    for kind in ("weight", "bias"):
        for theirs, ours in GGUF_NAMES.items():
            names[f"{theirs}.{kind}"] = f"{ours}.{kind}"
            for i in range(100):
                names[f"blk.{i}.{theirs}.{kind}"] = f"model.layers.{i}.{ours}.{kind}"
    return names.get(gguf_name, gguf_name)


def block_by_block(blocks):
    rows = []
    for block in blocks:
        scale, minimum = struct.unpack("<ee", bytes(block[:4].tolist()))
        packed = block[4:].tolist()
        numbers = [byte & 15 for byte in packed] + [byte >> 4 for byte in packed]
        rows.append([scale * number + minimum for number in numbers])
    return torch.tensor(rows, dtype=torch.float32)


def in_numpy(blocks):
    raw = blocks.numpy()
    head = np.ascontiguousarray(raw[:, :4]).view("<f2").astype(np.float32)
    packed = raw[:, 4:]
    out = np.empty((len(raw), 32), np.float32)
    out[:, :16] = packed % 16
    out[:, 16:] = packed // 16
    return torch.from_numpy(out * head[:, :1] + head[:, 1:])


def by_shift_and_table(blocks):
    scale = blocks[:, 0:2].contiguous().view(torch.float16).to(torch.float32)
    minimum = blocks[:, 2:4].contiguous().view(torch.float16).to(torch.float32)
    levels = torch.arange(16.0) * scale + minimum  # [n, 16]
    shifts = torch.tensor([0, 4], dtype=torch.uint8).view(1, 2, 1)
    numbers = (blocks[:, None, 4:] >> shifts) & 15  # [n, 2, 16]
    return levels.gather(1, numbers.flatten(1).long())


def by_loops(weight, n_heads):
    out = torch.empty_like(weight)
    d = weight.shape[0] // n_heads
    for head in range(n_heads):
        for i in range(d // 2):
            out[head * d + i] = weight[head * d + 2 * i]
            out[head * d + i + d // 2] = weight[head * d + 2 * i + 1]
    return out


def by_index(weight, n_heads):
    d = weight.shape[0] // n_heads
    inside = torch.cat([torch.arange(0, d, 2), torch.arange(1, d, 2)])
    rows = (torch.arange(n_heads)[:, None] * d + inside).flatten()
    return weight[rows]


def by_slices(weight, n_heads):
    heads = weight.chunk(n_heads)
    return torch.cat([half for head in heads for half in (head[::2], head[1::2])])


RIGHT = {
    "hf_name": (by_split, by_ending, by_list_of_all),
    "dequantize_q4_1": (block_by_block, in_numpy, by_shift_and_table),
    "unpermute": (by_loops, by_index, by_slices),
}

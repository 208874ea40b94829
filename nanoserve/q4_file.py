"""Keeps a model's four-bit weights in the cache folder (plumbing).

The file is safetensors, in the neutral order of Q4Weight, so that every processor can read it. It
holds a weight as NAME.numbers, NAME.scales and NAME.minimums, and a vector in float32 as NAME.
"""

import hashlib
import json
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import torch

from nanoserve.config import ModelConfig
from nanoserve.fetch import cache_dir, gguf_path, model_folder
from nanoserve.gguf_file import close_gguf
from nanoserve.quant import Q4Weight, Weight, why_not
from nanoserve.weights import expected_shapes, list_weights, load_q4, load_weights

VERSION = 1  # of the file's content; a file of another version is written again
PARTS = ("numbers", "scales", "minimums")
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8"}
HEADER_BYTES = 256  # for one tensor


def load_kept(
    path: Path, config: ModelConfig, dtype: torch.dtype, device: str | torch.device
) -> dict[str, Weight]:
    """load_weights with quantization "q4", through a file in the cache folder.

    The first load writes the file, one weight at a time, and every load maps it into memory. If a
    matrix cannot be multiplied in four bits, or the folder cannot be written, no file is used.
    """
    if path.resolve() == model_folder().resolve():
        path = gguf_path()  # the folder has the GGUF's values in float32
    shapes = [shape for shape in expected_shapes(config).values() if len(shape) == 2]
    if any(why_not(shape, torch.device(device)) or shape[0] % 16 for shape in shapes):
        return load_weights(path, config, dtype, device, "q4")
    file, stamp = q4_path(path), _stamp(path)
    weights = _read(file, stamp, config)
    if weights is None:
        _write(file, stamp, path, config)
        weights = _read(file, stamp, config)
    if weights is None:
        return load_weights(path, config, dtype, device, "q4")
    placed = {
        name: weight.to(device) if isinstance(weight, Q4Weight) else weight.to(device, dtype)
        for name, weight in weights.items()
    }
    placed.setdefault("lm_head.weight", placed["model.embed_tokens.weight"])
    return placed


def q4_path(path: Path) -> Path:
    """The file in the cache folder for a checkpoint: one for each folder or .gguf file."""
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    return cache_dir() / "q4" / f"{path.stem}-{digest}.safetensors"


def _stamp(path: Path) -> str:
    """Changes with VERSION and with any file of the checkpoint."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors*"))
    found = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return json.dumps([VERSION, found])


def _read(file: Path, stamp: str, config: ModelConfig) -> dict[str, Weight] | None:
    """The weights of a file, mapped into memory; None unless it is whole and has this stamp."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as content:
            if (content.metadata() or {}).get("stamp") != stamp:
                return None
            names = content.keys()
            tensors = {name: content.get_tensor(name) for name in names}
    except (OSError, SafetensorError):
        return None
    shapes = expected_shapes(config)
    weights: dict[str, Weight] = {}
    for name, tensor in tensors.items():
        stem, _, part = name.rpartition(".")
        if part not in PARTS:
            weights[name] = tensor
        elif part == "numbers":
            scales, minimums = (tensors[f"{stem}.{part}"] for part in PARTS[1:])
            width = shapes[stem.replace("lm_head", "model.embed_tokens")][1]
            weights[stem] = Q4Weight(tensor, scales, minimums, 2 * tensor.shape[1] // width)
    return weights


def _write(file: Path, stamp: str, path: Path, config: ModelConfig) -> None:
    """Write a checkpoint's file under a temporary name, then rename it. An OSError is ignored."""
    stored = list_weights(path, config)
    if config.tied_head and "lm_head.weight" in stored:
        return  # load_weights compares the head with the embedding
    work = file.with_name(f".{file.name}.{uuid.uuid4().hex}")
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        for stale in file.parent.glob(f".{file.name}.*"):  # of processes that were killed
            if time.time() - stale.stat().st_mtime > 3600:
                stale.unlink()
        with work.open("wb") as out:
            _write_tensors(out, stamp, len(PARTS) * len(stored), _tensors(stored))
        os.replace(work, file)
    with suppress(OSError):
        work.unlink(missing_ok=True)
    del stored
    if path.suffix == ".gguf":
        close_gguf()


def _tensors(stored: dict) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in stored.items():
        if len(tensor.shape) == 1:
            yield name, tensor.read().float()
        else:
            weight = load_q4(name, tensor)
            yield from ((f"{name}.{part}", getattr(weight, part)) for part in PARTS)


def _write_tensors(
    out: BinaryIO, stamp: str, most: int, tensors: Iterator[tuple[str, torch.Tensor]]
) -> None:
    """A safetensors file of at most `most` tensors; its own writer copies all of them in memory.

    The header comes first in the file but is written last, into bytes left free for it. Each tensor
    begins at a multiple of 4 bytes, because rows and row lengths are multiples of 16.
    """
    room = HEADER_BYTES * (most + 1) + len(stamp) * 2
    header: dict[str, dict] = {"__metadata__": {"stamp": stamp}}
    out.seek(8 + room)
    end = 0
    for name, tensor in tensors:
        start, end = end, end + tensor.nbytes
        shape = list(tensor.shape)
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
        out.write(tensor.contiguous().view(torch.uint8).numpy().data)
    out.seek(0)
    out.write(room.to_bytes(8, "little") + json.dumps(header).encode().ljust(room))

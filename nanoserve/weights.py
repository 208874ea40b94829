"""Loads a checkpoint's weights as a dictionary from Hugging Face names to tensors."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from nanoserve.config import ModelConfig, UnsupportedModel, read_json
from nanoserve.gguf_file import check_readable, open_gguf
from nanoserve.quant import (
    GROUP,
    Q4Weight,
    Weight,
    check_quantization,
    concatenate,
    from_q4_blocks,
    from_q8_blocks,
    quantize,
    why_not,
)

if TYPE_CHECKING:
    from gguf import ReaderTensor

GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

EIGHT_BITS = ("model.embed_tokens.weight", "lm_head.weight")  # in q4, these keep eight bits
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its shape, and read() to load its values.

    A GGUF tensor has read_q4(bits), which loads a matrix in four or eight bits.
    """

    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]
    read_q4: Callable[[int], Q4Weight] | None = None


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """{Hugging Face name: shape} of every weight but the head. A Linear weight is [out, in]."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.n_q * config.head_dim, config.n_kv * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    for i in range(config.num_layers):
        layer = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q_size, hidden),
            "self_attn.k_proj.weight": (kv_size, hidden),
            "self_attn.v_proj.weight": (kv_size, hidden),
            "self_attn.o_proj.weight": (hidden, q_size),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (mlp, hidden),
            "mlp.up_proj.weight": (mlp, hidden),
            "mlp.down_proj.weight": (hidden, mlp),
        }
        if config.qkv_bias:
            layer["self_attn.q_proj.bias"] = (q_size,)
            layer["self_attn.k_proj.bias"] = layer["self_attn.v_proj.bias"] = (kv_size,)
        if config.o_bias:
            layer["self_attn.o_proj.bias"] = (hidden,)
        if config.qk_norm:
            layer["self_attn.q_norm.weight"] = layer["self_attn.k_norm.weight"] = (config.head_dim,)
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def load_weights(
    path: Path,
    config: ModelConfig,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    quantization: str | None = None,
) -> dict[str, Weight]:
    """Read a folder of safetensors, or a .gguf file, into {Hugging Face name: tensor}.

    The result always has "lm_head.weight"; a tied head is the embedding itself, in the same memory.
    With quantization "q4", matrices are Q4Weights: the embedding and the head in eight bits, the
    others in four. A matrix that cannot be multiplied in four bits is dequantised (`why_not`).
    Raises a ValueError that names the file or tensor: a file that cannot be read or is not whole; a
    tensor that is missing, surplus or of the wrong shape; a head that contradicts the config.
    """
    check_quantization(quantization)

    def load(name: str, tensor: StoredTensor) -> Weight:
        if quantization is None or len(tensor.shape) == 1 or tensor.shape[1] % GROUP:
            return tensor.read().to(device, dtype)
        weight = load_q4(name, tensor).to(device)
        return weight if why_not(weight.shape, weight.device) is None else weight.dequantize(dtype)

    weights = {name: load(name, tensor) for name, tensor in list_weights(path, config).items()}
    embedding = weights["model.embed_tokens.weight"]
    head = weights.setdefault("lm_head.weight", embedding)
    if config.tied_head and head is not embedding:
        if not head.equal(embedding):
            raise ValueError(
                "tensor lm_head.weight differs from the embedding, but tie_word_embeddings is true"
            )
        weights["lm_head.weight"] = embedding
    return weights


def list_weights(path: Path, config: ModelConfig) -> dict[str, StoredTensor]:
    """The stored tensors of a checkpoint, after a check of their names and shapes.

    "lm_head.weight" is among them if the file has a head; without one, the head is tied.
    """
    stored = list_gguf(path, config) if path.suffix == ".gguf" else list_safetensors(path)
    expected = expected_shapes(config)
    if "lm_head.weight" in stored:
        expected["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    check_shapes(stored, expected)
    if "lm_head.weight" not in stored and not config.tied_head:
        raise ValueError("tensor lm_head.weight is missing, and tie_word_embeddings is not true")
    return stored


def load_q4(name: str, tensor: StoredTensor) -> Q4Weight:
    """A stored matrix in four bits; the embedding and the head in eight.

    These are the file's own numbers where it has them, else they are rounded to the nearest.
    """
    bits = 8 if name in EIGHT_BITS else 4
    return quantize(tensor.read(), bits) if tensor.read_q4 is None else tensor.read_q4(bits)


def check_shapes(stored: dict[str, StoredTensor], expected: dict[str, tuple[int, ...]]) -> None:
    """Raise ValueError for the first tensor that is missing, surplus or of the wrong shape."""
    for name, shape in expected.items():
        if name not in stored:
            raise ValueError(f"tensor {name} is missing from the checkpoint")
        if stored[name].shape != shape:
            raise ValueError(
                f"tensor {name} has shape {list(stored[name].shape)}, "
                f"but the config requires {list(shape)}"
            )
    for name in stored:
        if name not in expected:
            raise ValueError(
                f"tensor {name} is in the checkpoint, but the config has no place for it"
            )


def list_safetensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of model.safetensors, or of the shards in model.safetensors.index.json."""
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists():
        files = [folder / "model.safetensors"]
    elif index.exists():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(n, str) for n in names.values()):
            raise ValueError(f"{index} is not valid: weight_map must map names to files")
        files = [folder / name for name in sorted(set(names.values()))]
    else:
        raise ValueError(f"{folder} has no weights: no model.safetensors, no {index.name}")
    stored = {}
    for file in files:
        check_readable(file)
        try:
            shard = safe_open(file, framework="pt")
        except SafetensorError as error:
            raise ValueError(f"{file} is not a whole safetensors file: {error}") from None
        for name in shard.keys():  # a safetensors file is not a dict
            if name.endswith("rotary_emb.inv_freq"):  # a constant in old Llama files
                continue
            view = shard.get_slice(name)
            if view.get_dtype() not in FLOATS:
                raise UnsupportedModel(
                    f"tensor {name} is stored as {view.get_dtype()}; supported: {', '.join(FLOATS)}"
                )
            # Defaults bind shard and name now; a closure would use those of the last iteration.
            stored[name] = StoredTensor(
                tuple(view.get_shape()), lambda shard=shard, name=name: shard.get_tensor(name)
            )
    return stored


def list_gguf(path: Path, config: ModelConfig) -> dict[str, StoredTensor]:
    """The tensors of a GGUF file under their Hugging Face names, dequantised as they are read.

    Raises UnsupportedModel for a quantisation that the gguf package cannot undo.
    """
    from gguf import quants

    stored = {}
    for tensor in open_gguf(path).tensors:
        if tensor.name == "rope_freqs.weight":  # gguf_config reads it
            continue
        kind = tensor.tensor_type.name
        if kind not in FLOATS and not hasattr(quants, kind):
            raise UnsupportedModel(f"tensor {tensor.name}: quantisation {kind} is not supported")

        def read(tensor: "ReaderTensor" = tensor) -> torch.Tensor:
            heads = rotated_heads(tensor, config)
            return unpermute(dequantize(tensor), heads) if heads else dequantize(tensor)

        def read_q4(bits: int, tensor: "ReaderTensor" = tensor) -> Q4Weight:
            heads, weight = rotated_heads(tensor, config), keep_bits(tensor, bits)
            return weight.map(lambda t: unpermute(t, heads)) if heads else weight

        # GGUF lists dimensions from the innermost to the outermost.
        shape = tuple(map(int, tensor.shape[::-1]))
        stored[hf_name(tensor.name)] = StoredTensor(shape, read, read_q4)
    return stored


def rotated_heads(tensor: "ReaderTensor", config: ModelConfig) -> int | None:
    """The number of heads of a Llama's q or k, whose rows GGUF permutes; None for the others."""
    if config.family != "llama":
        return None
    return {"attn_q": config.n_q, "attn_k": config.n_kv}.get(tensor.name.split(".")[-2])


def keep_bits(tensor: "ReaderTensor", bits: int) -> Q4Weight:
    """A GGUF matrix in four or eight bits.

    Q4_0, Q4_1 and, for 8 bits, Q8_0 keep the file's own numbers. Other kinds are dequantised and
    rounded, some rows at a time.
    """
    from gguf.quants import dequantize as dequantize_any

    kind, rows = tensor.tensor_type.name, max(1, (1 << 20) // int(tensor.shape[0]))
    parts = []
    for start in range(0, len(tensor.data), rows):
        data = tensor.data[start : start + rows]
        if kind in ("Q4_0", "Q4_1"):
            parts.append(from_q4_blocks(torch.from_numpy(np.array(data)), kind))
        elif kind == "Q8_0" and bits == 8:
            parts.append(from_q8_blocks(torch.from_numpy(np.array(data))))
        else:
            values = dequantize_any(data, tensor.tensor_type)
            parts.append(quantize(torch.from_numpy(np.array(values)), bits))
    return concatenate(parts)


def hf_name(gguf_name: str) -> str:
    """The Hugging Face name of a GGUF tensor.

    For example, blk.3.attn_norm.weight becomes model.layers.3.input_layernorm.weight. A name with
    an unknown part is returned unchanged; check_shapes then refuses the tensor as surplus.
    """
    layer, part, kind = re.match(r"(?:blk\.(\d+)\.)?(\w*)\.?(.*)", gguf_name).groups()
    if part not in GGUF_NAMES or kind not in ("weight", "bias"):
        return gguf_name
    return f"{'' if layer is None else f'model.layers.{layer}.'}{GGUF_NAMES[part]}.{kind}"


def dequantize(tensor: "ReaderTensor") -> torch.Tensor:
    """A GGUF tensor's values in float32, with the dimensions in PyTorch's order."""
    from gguf.quants import dequantize as dequantize_any

    shape = tuple(map(int, tensor.shape[::-1]))
    if tensor.tensor_type.name == "Q4_1":
        return dequantize_q4_1(torch.from_numpy(np.array(tensor.data)).view(-1, 20)).view(shape)
    return torch.from_numpy(dequantize_any(tensor.data, tensor.tensor_type).copy()).view(shape)


def dequantize_q4_1(blocks: torch.Tensor) -> torch.Tensor:
    """Undo Q4_1 (ggml): uint8 [n, 20] -> float32 [n, 32], where value = scale * nibble + minimum.

    In each block, bytes 0-1 are the scale and bytes 2-3 the minimum, both float16. The low nibbles
    of the other 16 bytes are values 0 to 15; the high nibbles are values 16 to 31.
    """
    scale, minimum = blocks[:, :4].contiguous().view(torch.float16).float().split(1, dim=1)
    packed = blocks[:, 4:]  # [n, 16]
    nibbles = torch.cat([packed & 0xF, packed >> 4], dim=1)  # [n, 32]
    return scale * nibbles + minimum


def unpermute(weight: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Undo GGUF's order of a Llama's q or k rows: [n_heads * head_dim, ...], same shape out.

    RoPE rotates rows in pairs. GGUF stores the two rows of a pair side by side; the Hugging Face
    layout stores them half a head apart (rows i and i + head_dim / 2).
    """
    pairs = weight.unflatten(0, (n_heads, -1, 2))  # [n_heads, head_dim / 2, 2, ...]
    return pairs.transpose(1, 2).flatten(0, 2)

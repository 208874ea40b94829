"""What a checkpoint says about its own architecture."""

import json
from dataclasses import dataclass
from pathlib import Path

from nanoserve.gguf_file import gguf_config

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


class UnsupportedModel(ValueError):
    """The checkpoint asks for something this engine does not do; the message names it."""


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3's stretched RoPE (Llama 3.1 model card): slow frequencies are divided by `factor`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only transformer. Sizes count elements, the context tokens."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    n_q: int  # query heads
    n_kv: int  # key and value heads, each shared by n_rep query heads
    head_dim: int
    context: int  # the most positions the model was made for
    norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    qkv_bias: bool  # Qwen2; Llama and Qwen3 with attention_bias
    o_bias: bool
    qk_norm: bool  # Qwen3 normalises each head's query and key
    tied_head: bool  # the embedding is also the output head
    eos_ids: tuple[int, ...]
    bos_id: int | None

    @property
    def n_rep(self) -> int:
        """How many query heads read one KV head."""
        return self.n_q // self.n_kv


def load_config(path: Path) -> ModelConfig:
    """Read the config of a folder in the Hugging Face layout, or of a .gguf file.

    Raises UnsupportedModel, naming the option, before any weight is read; ValueError where the
    config is missing, is not JSON, lacks a key or contradicts itself.
    """
    if path.suffix == ".gguf":
        return parse_config(gguf_config(path))
    generation = path / "generation_config.json"
    return parse_config(
        read_json(path / "config.json"), read_json(generation) if generation.exists() else {}
    )


def parse_config(hf: dict, generation: dict | None = None) -> ModelConfig:
    """Turn the dictionary of a config.json (and of a generation_config.json) into a ModelConfig."""
    eos = (generation or {}).get("eos_token_id")
    family = hf.get("model_type")
    if family not in FAMILIES:
        raise UnsupportedModel(
            f"model_type {family!r} is not supported; supported: {', '.join(FAMILIES)}"
        )
    _refuse(hf, family)

    def need(key: str) -> int:
        value = hf.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"config.json: {key} must be a positive integer, got {value!r}")
        return value

    n_q = need("num_attention_heads")
    n_kv = n_q if hf.get("num_key_value_heads") is None else need("num_key_value_heads")
    if n_q % n_kv:
        raise ValueError(
            f"config.json: {n_q} query heads cannot be shared evenly by {n_kv} KV heads"
        )
    hidden_size = need("hidden_size")
    if hf.get("head_dim") is None and hidden_size % n_q:
        raise ValueError(
            f"config.json: hidden_size {hidden_size} is no multiple of {n_q} heads, and no head_dim"
        )
    head_dim = hidden_size // n_q if hf.get("head_dim") is None else need("head_dim")
    if head_dim % 2:
        raise ValueError(f"config.json: head_dim must be even for RoPE, got {head_dim}")
    theta, scaling = _rope(hf)
    bias = bool(hf.get("attention_bias", False))
    return ModelConfig(
        family=family,
        vocab_size=need("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=need("intermediate_size"),
        num_layers=need("num_hidden_layers"),
        n_q=n_q,
        n_kv=n_kv,
        head_dim=head_dim,
        context=need("max_position_embeddings"),
        norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=family == "qwen2" or bias,
        o_bias=family != "qwen2" and bias,
        qk_norm=family == "qwen3",
        tied_head=bool(hf.get("tie_word_embeddings", False)),
        eos_ids=_ids(hf.get("eos_token_id") if eos is None else eos),
        bos_id=hf.get("bos_token_id"),
    )


def _refuse(hf: dict, family: str) -> None:
    """Raise UnsupportedModel for an option that would silently change what the model computes."""
    if hf.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"hidden_act {hf['hidden_act']!r} is not supported; supported: silu")
    if hf.get("mlp_bias"):
        raise UnsupportedModel("mlp_bias is not supported")
    if hf.get("quantization_config"):
        method = hf["quantization_config"].get("quant_method", "unnamed")
        raise UnsupportedModel(
            f"quantization_config ({method}) is not supported; use float weights"
        )
    window = hf.get("sliding_window", 4096)  # transformers' own default, where it is switched on
    if window is not None and hf.get("use_sliding_window", family == "mistral"):
        raise UnsupportedModel(f"sliding_window {window} is not supported; supported: none")
    unusual = sorted(set(hf.get("layer_types") or ()) - {"full_attention"})
    if unusual:
        raise UnsupportedModel(f"layer_types {', '.join(unusual)} are not supported")
    rotated = (hf | (hf.get("rope_parameters") or {})).get("partial_rotary_factor", 1.0)
    if rotated != 1.0:
        raise UnsupportedModel(f"partial_rotary_factor {rotated} is not supported; supported: 1.0")


def _rope(hf: dict) -> tuple[float, Llama3Scaling | None]:
    """Theta and scaling, from rope_parameters (newer) or rope_theta and rope_scaling (older)."""
    rope = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    theta = float(rope.get("rope_theta", hf.get("rope_theta", 10_000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UnsupportedModel(f"RoPE type {kind!r} is not supported; supported: default, llama3")
    try:
        return theta, Llama3Scaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_context=int(rope["original_max_position_embeddings"]),
        )
    except KeyError as missing:
        raise ValueError(f"config.json: llama3 RoPE scaling lacks {missing}") from None


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    """One id, several, or none, as a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def read_json(path: Path) -> dict:
    """The object in a JSON file. ValueError, naming the file, where it is missing or holds none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: not a folder in the Hugging Face layout") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not valid JSON: it holds no object")
    return content

"""Reads a checkpoint's configuration, checks every field, and refuses what the engine cannot do."""

import json
import reprlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoserve.gguf_file import check_readable, gguf_config

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


class UnsupportedModel(ValueError):
    """The checkpoint needs an option that the engine lacks; the message names file and option."""


@dataclass(frozen=True)
class Llama3Scaling:
    """RoPE scaling of Llama 3.1 (rope_type "llama3"): low frequencies are divided by `factor`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int  # tokens, before the scaling


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only transformer. Sizes count elements; the context counts tokens."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    n_q: int  # query heads
    n_kv: int  # key and value heads, each shared by n_rep query heads
    head_dim: int
    context: int  # maximum number of tokens in a sequence
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
        """Number of query heads that share one KV head."""
        return self.n_q // self.n_kv


class Fields:
    """The fields of one JSON object. Each method checks type and range and returns the value.

    A ValueError names the file, the field and the value. `null` is a wrong type, unless a method
    says otherwise; `true` and `false` are not numbers.
    """

    def __init__(self, values: dict, file: str, prefix: str = "") -> None:
        self.values, self.file, self.prefix = values, file, prefix

    def wrong(self, key: str, problem: str) -> ValueError:
        """The error for a field with a wrong value; `problem` ends the message."""
        return ValueError(f"{self.file}: {self.prefix}{key} {problem}")

    def unsupported(self, key: str, supported: str) -> UnsupportedModel:
        """The error for a field whose value is valid, but not supported by this engine."""
        value = reprlib.repr(self.values[key])
        return UnsupportedModel(
            f"{self.file}: {self.prefix}{key} {value} is not supported; supported: {supported}"
        )

    def size(self, key: str, default: int | None = None, high: int = 2**31 - 1) -> int:
        """An integer from 1 to high. Without a default the field is required."""
        value = self.values.get(key, default)
        if not _is_int(value) or not 1 <= value <= high:
            limit = "a positive integer" if not _is_int(value) or value < 1 else f"at most {high}"
            raise self.wrong(key, f"must be {limit}, got {self._got(key, value)}")
        return value

    def number(
        self, key: str, default: float | None = None, high: float = sys.float_info.max
    ) -> float:
        """A number above 0 and below high, as a float. Without a default the field is required."""
        value = self.values.get(key, default)
        plain = isinstance(value, int | float) and not isinstance(value, bool)
        if not plain or not 0 < value < high:  # NaN fails this comparison
            limit = "a finite number above 0" if high > 1 else f"a number above 0 and below {high}"
            raise self.wrong(key, f"must be {limit}, got {self._got(key, value)}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """`true` or `false`."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, f"must be true or false, got {reprlib.repr(value)}")
        return value

    def token_ids(self, key: str, vocab_size: int, several: bool = True) -> tuple[int, ...]:
        """One token id, a list of ids if `several`, or no id (absent or null), as a tuple."""
        value = self.values.get(key)
        ids = value if several and isinstance(value, list) else [] if value is None else [value]
        if not all(_is_int(i) and 0 <= i < vocab_size for i in ids):
            raise self.wrong(
                key,
                f"must be {'token ids' if several else 'a token id'} from 0 to {vocab_size - 1}, "
                f"got {reprlib.repr(value)}",
            )
        return tuple(ids)

    def _got(self, key: str, value: Any) -> str:
        return reprlib.repr(value) if key in self.values else "nothing"

    def inner(self, key: str) -> "Fields | None":
        """The object under a key; None where the field is absent, null or empty."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(key, f"must be an object or null, got {reprlib.repr(value)}")
        return Fields(value, self.file, f"{self.prefix}{key}.") if value else None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def load_config(path: Path) -> ModelConfig:
    """Read the config of a folder in the Hugging Face layout, or of a .gguf file.

    Reads no weight. Raises UnsupportedModel for an option that the engine lacks. Raises ValueError
    for a file that is missing or is not JSON, and for a field that is missing or wrong or that
    contradicts another field.
    """
    if path.suffix == ".gguf":
        return parse_config(gguf_config(path), file=str(path))
    config, generation = path / "config.json", path / "generation_config.json"
    return parse_config(
        read_json(config),
        read_json(generation) if generation.exists() else None,
        str(config),
        str(generation),
    )


def parse_config(
    hf: dict,
    generation: dict | None = None,
    file: str = "config.json",
    generation_file: str = "generation_config.json",
) -> ModelConfig:
    """Turn the content of config.json (and of generation_config.json) into a ModelConfig.

    An absent field gets the default of transformers for its family; null is accepted where
    transformers accepts it. Errors as for load_config; they name `file` or `generation_file`.
    """
    fields = Fields(hf, file)
    family = hf.get("model_type")
    if family not in FAMILIES:
        shown = reprlib.repr(family)
        raise UnsupportedModel(
            f"{file}: model_type {shown} is not supported; supported: {', '.join(FAMILIES)}"
        )
    num_layers = fields.size("num_hidden_layers", high=10_000)
    _check_options(fields, family)
    _check_windows(fields, family, num_layers)
    n_q, n_kv, head_dim = _heads(fields, family)
    theta, scaling = _rope(fields)
    vocab_size = fields.size("vocab_size")
    bias = fields.flag("attention_bias") if family in ("llama", "qwen3") else False
    eos_ids = fields.token_ids("eos_token_id", vocab_size)
    chosen = Fields(generation or {}, generation_file)
    if chosen.values.get("eos_token_id") is not None:
        eos_ids = chosen.token_ids("eos_token_id", vocab_size)
    bos = fields.token_ids("bos_token_id", vocab_size, several=False)
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=fields.size("hidden_size"),
        intermediate_size=fields.size("intermediate_size"),
        num_layers=num_layers,
        n_q=n_q,
        n_kv=n_kv,
        head_dim=head_dim,
        context=fields.size("max_position_embeddings"),
        norm_eps=fields.number("rms_norm_eps", 1e-6, high=1),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=family == "qwen2" or bias,
        o_bias=bias,
        qk_norm=family == "qwen3",
        tied_head=fields.flag("tie_word_embeddings"),
        eos_ids=eos_ids,
        bos_id=bos[0] if bos else None,
    )


def _check_options(fields: Fields, family: str) -> None:
    """Raise UnsupportedModel for an option that changes what the model computes."""
    values = fields.values
    if values.get("hidden_act", "silu") != "silu":
        raise fields.unsupported("hidden_act", "silu")
    if family == "llama" and fields.flag("mlp_bias"):
        raise fields.unsupported("mlp_bias", "false")
    if values.get("quantization_config") is not None:
        raise fields.unsupported("quantization_config", "null")
    if values.get("per_layer_config") not in (None, {}):
        raise fields.unsupported("per_layer_config", "null")


def _check_windows(fields: Fields, family: str, num_layers: int) -> None:
    """Raise UnsupportedModel unless every layer attends to the whole sequence.

    Mistral applies sliding_window unless it is null, and ignores use_sliding_window. Qwen applies
    sliding_window only with use_sliding_window: to the layers from max_window_layers on, or to the
    layers that layer_types names. Llama has no window, but transformers' KV cache applies
    sliding_window to Llama too.
    """
    values, kinds = fields.values, fields.values.get("layer_types")
    if family == "mistral" and "layer_types" in values:
        raise fields.unsupported("layer_types", "an absent field (it marks a Ministral model)")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise fields.wrong(
                "layer_types",
                f"must be null or a list of {num_layers} names, got {reprlib.repr(kinds)}",
            )
        if any(kind != "full_attention" for kind in kinds):
            raise fields.unsupported("layer_types", "full_attention in every layer")
    window = values.get("sliding_window", None if family == "llama" else 4096)
    if window is not None and not _is_int(window):
        raise fields.wrong("sliding_window", f"must be an integer or null, got {window!r:.40}")
    if family in ("qwen2", "qwen3"):
        first = values.get("max_window_layers", 28)
        if not _is_int(first):
            raise fields.wrong("max_window_layers", f"must be an integer, got {first!r:.40}")
        if not fields.flag("use_sliding_window") or kinds is not None or first >= num_layers:
            return
    if window is not None:
        raise Fields({"sliding_window": window}, fields.file).unsupported(
            "sliding_window", "attention to the whole sequence"
        )


def _heads(fields: Fields, family: str) -> tuple[int, int, int]:
    """Query heads, KV heads and head_dim."""
    values, hidden = fields.values, fields.size("hidden_size")
    n_q = fields.size("num_attention_heads")
    kv_null = values.get("num_key_value_heads", ...) is None and family != "mistral"
    kv_absent = {"llama": n_q, "mistral": 8, "qwen2": 32, "qwen3": 32}[family]
    n_kv = n_q if kv_null else fields.size("num_key_value_heads", kv_absent)
    if n_q % n_kv:
        raise fields.wrong(
            "num_key_value_heads", f"must divide num_attention_heads {n_q}, got {n_kv}"
        )
    null = family in ("llama", "mistral") and values.get("head_dim", ...) is None
    derived = null or ("head_dim" not in values and family != "qwen3")
    if hidden % n_q and (derived or family == "llama"):
        raise fields.wrong(
            "hidden_size", f"{hidden} is not a multiple of num_attention_heads {n_q}"
        )
    head_dim = hidden // n_q if derived else fields.size("head_dim", 128)
    if head_dim % 2:
        raise fields.wrong("head_dim", f"must be even for RoPE, got {head_dim}")
    return n_q, n_kv, head_dim


def _rope(fields: Fields) -> tuple[float, Llama3Scaling | None]:
    """RoPE's theta and scaling, from rope_theta and rope_scaling.

    Newer files have both in rope_parameters. A file may use both forms if they agree.
    """
    theta = fields.number("rope_theta", 10_000.0)
    rotated = fields.values.get("partial_rotary_factor")
    if rotated is not None and rotated != 1:
        raise fields.unsupported("partial_rotary_factor", "1.0")
    inner = (fields.inner("rope_scaling"), fields.inner("rope_parameters"))
    meanings = [_rope_object(rope, fields) for rope in inner if rope is not None]
    if len(set(meanings)) > 1:
        raise fields.wrong("rope_scaling", "contradicts rope_parameters")
    return meanings[0] if meanings else (theta, None)


def _rope_object(rope: Fields, outer: Fields) -> tuple[float, Llama3Scaling | None]:
    """Theta and scaling of `rope`, the object rope_scaling or rope_parameters of `outer`."""
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UnsupportedModel(
            f"{rope.file}: {rope.prefix}rope_type {reprlib.repr(kind)} is not supported; "
            "supported: default, llama3"
        )
    if rope.values.get("type", kind) != kind:
        raise rope.wrong("type", f"contradicts rope_type {kind!r}")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if kind == "llama3":
        known |= {"factor", "low_freq_factor", "high_freq_factor"}
        known |= {"original_max_position_embeddings"}
    for key in sorted(rope.values.keys() - known):
        raise UnsupportedModel(
            f"{rope.file}: {rope.prefix}{reprlib.repr(key)[1:-1]} is not supported "
            f"with rope_type {kind}"
        )
    if rope.values.get("partial_rotary_factor", 1) != 1:
        raise rope.unsupported("partial_rotary_factor", "1.0")
    theta = rope.number("rope_theta", outer.number("rope_theta", 10_000.0))
    if outer.values.get("rope_theta", theta) != theta:
        raise rope.wrong(
            "rope_theta", f"{theta:g} contradicts rope_theta {outer.values['rope_theta']:g}"
        )
    if kind == "default":
        return theta, None
    scaling = Llama3Scaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_context=rope.size("original_max_position_embeddings"),
    )
    if scaling.factor < 1:
        raise rope.wrong("factor", f"must be at least 1, got {scaling.factor:g}")
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise rope.wrong("high_freq_factor", "must be above low_freq_factor")
    key = "original_max_position_embeddings"
    if outer.values.get(key, scaling.original_context) != scaling.original_context:
        raise rope.wrong(key, f"contradicts {key} at the top level")
    return theta, scaling


def read_json(path: Path) -> dict:
    """Return the object in a JSON file. Raises ValueError, with file and reason, if that fails."""
    check_readable(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not JSON or UTF-8, or 5,000 digits in a number
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not valid JSON: its content is not an object")
    return content

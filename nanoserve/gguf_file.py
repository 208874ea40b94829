"""Reads the header of a GGUF file and returns it in the Hugging Face layout (plumbing)."""

import json
import math
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gguf import GGUFReader

ARCHITECTURES = ("llama", "qwen2", "qwen3")

# Pre-tokenizers by their names in llama.cpp, as JSON for the tokenizers library.
_GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> list[dict]:
    return [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        {**_GPT2, "use_regex": False},
    ]


PRE_TOKENIZERS = {
    "smollm": [{"type": "Digits", "individual_digits": True}, _GPT2],
    "gpt-2": [_GPT2],
    "qwen2": _split(_WORDS % ""),
    "llama-bpe": _split(_WORDS % "{1,3}"),
}
ADDS_BOS = ("llama-bpe",)  # these put BOS first unless the file says otherwise, as in llama.cpp
ROLES = ("bos", "eos", "unknown", "padding")
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4


class BadGGUF(ValueError):
    """The file is not a whole GGUF file, or contains something that the engine does not support."""


def check_readable(path: Path) -> None:
    """Open a file and read a byte. Raises ValueError, with file and reason, if that fails."""
    try:
        with path.open("rb") as file:
            file.read(1)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None


def open_gguf(path: Path) -> "GGUFReader":
    """Memory-map a GGUF file. Raises ValueError, with file and reason, if it cannot be read, and
    BadGGUF if it is not a whole GGUF file."""
    check_readable(path)
    return _open(path, path.stat().st_mtime_ns)


def close_gguf() -> None:
    """Unmap the file opened last (Windows cannot move a mapped file)."""
    _open.cache_clear()


@lru_cache(maxsize=1)  # config, tokenizer and weights parse the same header, which takes seconds
def _open(path: Path, _modified: int) -> "GGUFReader":
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except Exception as error:  # the reader raises many kinds for a damaged file
        raise BadGGUF(f"{path} is not a whole GGUF file: {error}") from None


def gguf_config(path: Path) -> dict:
    """Return a GGUF file's metadata as the content of a config.json.

    Raises BadGGUF for an architecture not in ARCHITECTURES and for missing or wrong metadata.
    """
    reader = open_gguf(path)
    arch = _get(reader, "general.architecture")
    if arch not in ARCHITECTURES:
        raise BadGGUF(
            f"{path.name}: architecture {arch!r} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )

    def need(key: str) -> Any:
        value = _get(reader, f"{arch}.{key}")
        if value is None:
            raise BadGGUF(f"{path.name}: the metadata lacks {arch}.{key}")
        return value

    tensors = {t.name: t for t in reader.tensors}
    if "token_embd.weight" not in tensors:
        raise BadGGUF(f"{path.name}: tensor token_embd.weight is missing")

    def number(key: str, default: float | None = None) -> float:
        value = need(key) if default is None else _get(reader, f"{arch}.{key}") or default
        if not isinstance(value, int | float):
            raise BadGGUF(f"{path.name}: {arch}.{key} must be a number, got {value!r:.40}")
        return value

    n_q, hidden = number("attention.head_count"), number("embedding_length")
    head_dim = number("attention.key_length", hidden // max(n_q, 1))
    rotated = number("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise BadGGUF(f"{path.name}: RoPE on {rotated} of {head_dim} channels is not supported")
    # 0 means no window. A "llama" file may be a Mistral with a window (llama.cpp's converter).
    window = _get(reader, f"{arch}.attention.sliding_window") or None
    ends = (_get(reader, f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot", "eom"))
    config = {
        "model_type": arch,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden,
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": n_q,
        "num_key_value_heads": _get(reader, f"{arch}.attention.head_count_kv") or n_q,
        "head_dim": head_dim,
        "max_position_embeddings": need("context_length"),
        # The file stores a float32; this is the shortest decimal that rounds to it.
        "rms_norm_eps": float(f"{number('attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(number("rope.freq_base", 10_000.0)),
        "attention_bias": arch != "qwen2" and "blk.0.attn_q.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "sliding_window": window,
        "bos_token_id": _get(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos([i for i in ends if i is not None]),
    }
    if arch != "llama":  # a window, if any, applies to every layer from 0 on
        config |= {"use_sliding_window": window is not None, "max_window_layers": 0}
    kind = _get(reader, f"{arch}.rope.scaling.type")
    if kind not in (None, "none"):
        config["rope_scaling"] = {"rope_type": kind}
    if "rope_freqs.weight" in tensors:
        factors = tensors["rope_freqs.weight"].data
        config["rope_scaling"] = _llama3_scaling(factors, config["rope_theta"], path)
    return config


def gguf_tokenizer(path: Path) -> tuple[str, dict]:
    """Return a GGUF file's byte-level BPE as tokenizer.json and tokenizer_config.json.

    The first is text, the second a dictionary. Raises BadGGUF for any other tokenizer, and for
    missing or wrong metadata.
    """
    reader = open_gguf(path)
    model, pre = _get(reader, "tokenizer.ggml.model"), _get(reader, "tokenizer.ggml.pre")
    if model != "gpt2" or pre not in PRE_TOKENIZERS:
        raise BadGGUF(
            f"{path.name}: tokenizer {model!r} with pre-tokenizer {pre!r} is not supported; "
            f"supported: 'gpt2' with {', '.join(PRE_TOKENIZERS)}"
        )
    tokens, merges = (_get(reader, f"tokenizer.ggml.{key}") for key in ("tokens", "merges"))
    if not tokens or merges is None:
        raise BadGGUF(f"{path.name}: the metadata lacks tokenizer.ggml.tokens or .merges")
    types = _get(reader, "tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise BadGGUF(f"{path.name}: there are {len(tokens)} tokens and {len(types)} token types")
    special = {role: _token(reader, tokens, role, path) for role in ROLES}
    added = [
        {
            "id": i,
            "content": token,
            "special": kind == _CONTROL,
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        }
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    adds_bos = _get(reader, "tokenizer.ggml.add_bos_token")
    if adds_bos is None:
        adds_bos = pre in ADDS_BOS
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[pre]},
        "post_processor": _bos_first(special["bos"], tokens) if adds_bos else None,
        "decoder": _GPT2,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre == "llama-bpe",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in merges],
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(adds_bos),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": special["bos"],
        "eos_token": special["eos"],
        "unk_token": special["unknown"],
        "pad_token": special["padding"],
        "chat_template": _get(reader, "tokenizer.chat_template"),
        "model_max_length": _get(reader, f"{_get(reader, 'general.architecture')}.context_length"),
    }
    return (
        json.dumps(tokenizer, ensure_ascii=False),
        {key: value for key, value in config.items() if value is not None},
    )


def _eos(ids: list[int]) -> int | list[int] | None:
    """The ids of end tokens, as config.json writes them: None, one id, or a list."""
    several = list(dict.fromkeys(ids))
    return several if len(several) > 1 else several[0] if several else None


def _get(reader: "GGUFReader", key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _token(reader: "GGUFReader", tokens: list[str], role: str, path: Path) -> str | None:
    """The text of the special token with a role; None if the file has no such token."""
    token_id = _get(reader, f"tokenizer.ggml.{role}_token_id")
    if token_id is None:
        return None
    if not 0 <= token_id < len(tokens):
        raise BadGGUF(
            f"{path.name}: tokenizer.ggml.{role}_token_id {token_id} is outside the vocabulary "
            f"of {len(tokens)}"
        )
    return tokens[token_id]


def _bos_first(bos: str | None, tokens: list[str]) -> dict | None:
    """The post-processor of a tokenizer.json that puts the BOS token before a text."""
    if bos is None:
        return None
    first = {"SpecialToken": {"id": bos, "type_id": 0}}
    a, b = ({"Sequence": {"id": text, "type_id": i}} for i, text in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [first, a],
        "pair": [first, a, b],
        "special_tokens": {bos: {"id": bos, "ids": [tokens.index(bos)], "tokens": [bos]}},
    }


def _llama3_scaling(factors: Any, theta: float, path: Path) -> dict:
    """Return the llama3 parameters that give the divisors in rope_freqs.weight.

    rope_freqs.weight has one divisor per frequency. All published Llama 3 models use
    low_freq_factor 1, high_freq_factor 4 and an original context of 8,192; only the factor differs.
    Raises BadGGUF for divisors of other parameters.
    """
    factor, low, high, original = float(max(factors)), 1.0, 4.0, 8192
    for i, stored in enumerate(factors):
        wavelength = 2 * math.pi * theta ** (i / len(factors))
        smooth = (original / wavelength - low) / (high - low)
        smooth = min(max(smooth, 0.0), 1.0)
        if not math.isclose(stored, 1 / ((1 - smooth) / factor + smooth), rel_tol=1e-4):
            raise BadGGUF(
                f"{path.name}: rope_freqs.weight is not a llama3 scaling with low_freq_factor 1, "
                "high_freq_factor 4 and original context 8192"
            )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }

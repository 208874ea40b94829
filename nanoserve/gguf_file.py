"""Reads the header of a GGUF file as if it were a folder in the Hugging Face layout (plumbing)."""

import json
import math
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gguf import GGUFReader

ARCHITECTURES = ("llama", "qwen2", "qwen3")

# llama.cpp's names of pre-tokenisers, as the JSON that the tokenizers library reads.
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
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4


class BadGGUF(ValueError):
    """The file is no GGUF, is cut short, or holds something this engine does not read."""


def open_gguf(path: Path) -> "GGUFReader":
    """Memory-map a GGUF file. Raises BadGGUF, naming the file, when it is not whole."""
    if not path.is_file():
        raise BadGGUF(f"{path} is not a file")
    return _open(path, path.stat().st_mtime_ns)


def close_gguf() -> None:
    """Let go of the file opened last (Windows cannot move a file that is mapped)."""
    _open.cache_clear()


@lru_cache(maxsize=1)  # config, tokenizer and weights read one header, which takes seconds to parse
def _open(path: Path, _modified: int) -> "GGUFReader":
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except Exception as error:  # the reader raises whatever the damage makes it stumble on
        raise BadGGUF(f"{path} is not a whole GGUF file: {error}") from None


def gguf_config(path: Path) -> dict:
    """The config.json that a GGUF's metadata amounts to; BadGGUF for another architecture."""
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
    n_q = need("attention.head_count")
    head_dim = _get(reader, f"{arch}.attention.key_length") or need("embedding_length") // n_q
    rotated = _get(reader, f"{arch}.rope.dimension_count") or head_dim
    if rotated != head_dim:
        raise BadGGUF(f"{path.name}: RoPE of {rotated} of {head_dim} channels is not supported")
    # llama.cpp's converter stores "llama" for Mistral too, and only Llama's own biases and window
    config = {
        "model_type": arch,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": need("embedding_length"),
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": n_q,
        "num_key_value_heads": _get(reader, f"{arch}.attention.head_count_kv") or n_q,
        "head_dim": head_dim,
        "max_position_embeddings": need("context_length"),
        # a float32 in the file; the shortest decimal that means the same is the one that was meant
        "rms_norm_eps": float(f"{need('attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(_get(reader, f"{arch}.rope.freq_base") or 10_000.0),
        "attention_bias": arch != "qwen2" and "blk.0.attn_q.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "sliding_window": _get(reader, f"{arch}.attention.sliding_window"),
        "use_sliding_window": _get(reader, f"{arch}.attention.sliding_window") is not None,
        "bos_token_id": _get(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _get(reader, "tokenizer.ggml.eos_token_id"),
    }
    kind = _get(reader, f"{arch}.rope.scaling.type")
    if kind not in (None, "none"):
        config["rope_scaling"] = {"rope_type": kind}
    if "rope_freqs.weight" in tensors:
        factors = tensors["rope_freqs.weight"].data
        config["rope_scaling"] = _llama3_scaling(factors, config["rope_theta"], path)
    return config


def gguf_tokenizer(path: Path) -> tuple[str, dict]:
    """A GGUF's byte-level BPE as (the text of a tokenizer.json, a tokenizer_config.json).

    Raises BadGGUF for another tokenizer, by its name.
    """
    reader = open_gguf(path)
    model, pre = _get(reader, "tokenizer.ggml.model"), _get(reader, "tokenizer.ggml.pre")
    if model != "gpt2" or pre not in PRE_TOKENIZERS:
        raise BadGGUF(
            f"{path.name}: tokenizer {model!r} with splitter {pre!r} is not supported; supported: "
            f"'gpt2' with {', '.join(PRE_TOKENIZERS)}"
        )
    tokens = _get(reader, "tokenizer.ggml.tokens")
    types = _get(reader, "tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    merges = [merge.split(" ") for merge in _get(reader, "tokenizer.ggml.merges")]
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
    bos = _token(reader, tokens, "bos")
    puts_bos = bool(_get(reader, "tokenizer.ggml.add_bos_token") or False)
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[pre]},
        "post_processor": None,
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
            "merges": merges,
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": puts_bos,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": bos,
        "eos_token": _token(reader, tokens, "eos"),
        "unk_token": _token(reader, tokens, "unknown"),
        "pad_token": _token(reader, tokens, "padding"),
        "chat_template": _get(reader, "tokenizer.chat_template"),
        "model_max_length": _get(reader, f"{_get(reader, 'general.architecture')}.context_length"),
    }
    return (
        json.dumps(tokenizer, ensure_ascii=False),
        {key: value for key, value in config.items() if value is not None},
    )


def _get(reader: "GGUFReader", key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _token(reader: "GGUFReader", tokens: list[str], role: str) -> str | None:
    token_id = _get(reader, f"tokenizer.ggml.{role}_token_id")
    return None if token_id is None else tokens[token_id]


def _llama3_scaling(factors: Any, theta: float, path: Path) -> dict:
    """The llama3 parameters whose per-frequency divisors a GGUF stores as rope_freqs.weight.

    The published Llama 3 models all use low 1, high 4, original context 8,192; only the factor
    differs. Anything else is refused rather than guessed.
    """
    factor, low, high, original = float(max(factors)), 1.0, 4.0, 8192
    for i, stored in enumerate(factors):
        wavelength = 2 * math.pi * theta ** (i / len(factors))
        smooth = (original / wavelength - low) / (high - low)
        smooth = min(max(smooth, 0.0), 1.0)
        if not math.isclose(stored, 1 / ((1 - smooth) / factor + smooth), rel_tol=1e-4):
            raise BadGGUF(
                f"{path.name}: rope_freqs.weight is no llama3 RoPE scaling this engine knows"
            )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }

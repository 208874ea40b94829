"""Tiny checkpoints for tests: random weights, written by transformers, or by gguf's own writer."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers

from nanoserve.tokenizer import byte_alphabet

if TYPE_CHECKING:
    import gguf

SHAPES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
# Llama 3's original context. A GGUF stores only the divisors, which imply this context
LLAMA3_GGUF = LLAMA3 | {"original_max_position_embeddings": 8192}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa": ("llama", {}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-mha": ("llama", {"num_key_value_heads": 6}),
    "llama-llama3-rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-bias": ("llama", {"attention_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 14}),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
    "qwen3": ("qwen3", {"head_dim": 14}),
    "qwen3-bias": ("qwen3", {"head_dim": 10, "attention_bias": True}),
    "mistral": ("mistral", {"sliding_window": None}),
}


def random_model(kind: str = "llama-gqa", seed: int = 0, **changes: Any) -> Any:
    """A transformers model of a kind; every weight, bias and norm at random."""
    family, options = KINDS[kind]
    config = transformers.AutoConfig.for_model(family, **(SHAPES | options | changes))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.3 * noise if "norm" in name else 0.3 * noise)
    return model.eval()


def save(model: Any, folder: Path, **options: Any) -> Path:
    """Write a transformers model as a folder in the Hugging Face layout."""
    model.save_pretrained(folder, **options)
    return folder


def edit_json(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; a key set to ... is removed."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def reference_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def llama_cpp_permute(weight: np.ndarray, n_heads: int) -> np.ndarray:
    """The permutation of a Llama's q and k in llama.cpp's converter (convert_hf_to_gguf.py)."""
    return (
        weight.reshape(n_heads, 2, weight.shape[0] // n_heads // 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
}
GGUF_TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def gguf_tensors(model: Any) -> dict[str, np.ndarray]:
    """A model's tensors by llama.cpp's names, a Llama's q and k permuted, rope_freqs included."""
    config, tensors = model.config, {}
    for name, weight in model.state_dict().items():
        stem, kind = name.rsplit(".", 1)
        value = weight.numpy()
        if name.startswith("model.layers."):
            _, _, layer, part = stem.split(".", 3)
            if config.model_type == "llama" and part[-6:] in ("q_proj", "k_proj"):
                heads = config.num_attention_heads if "q_" in part else config.num_key_value_heads
                value = llama_cpp_permute(value, heads)
            tensors[f"blk.{layer}.{GGUF_LAYER[part]}.{kind}"] = value
        elif not (stem == "lm_head" and config.tie_word_embeddings):
            tensors[f"{GGUF_TOP[stem]}.{kind}"] = value
    if config.rope_parameters["rope_type"] == "llama3":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        slowed, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        plain = config.rope_parameters["rope_theta"] ** -(torch.arange(len(slowed)) / len(slowed))
        tensors["rope_freqs.weight"] = (plain / slowed).numpy()
    return tensors


CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
)


def small_vocabulary() -> tuple[list[str], list[str]]:
    """256 bytes, a few merges of them, two special tokens: (tokens in the order of ids, merges)."""
    merges = ["h e", "l l", "he ll", "Ġ w", "hell o"]
    tokens = ["<|im_start|>", "<|im_end|>", *byte_alphabet()]
    return tokens + [merge.replace(" ", "") for merge in merges], merges


def write_gguf(
    model: Any,
    path: Path,
    tensors: dict[str, np.ndarray] | None = None,
    arch: str | None = None,
    pre: str = "smollm",
    tokenizer: str = "gpt2",
    quantised: dict[str, tuple[np.ndarray, "gguf.GGMLQuantizationType"]] | None = None,
    uint32: dict[str, int] | None = None,
    replaced: dict[str, Any] | None = None,
    **metadata: Any,
) -> Path:
    """Write a transformers model as a GGUF file, with gguf's own writer."""
    config = model.config
    import gguf  # missing on some machines, where the tests that need it are not run

    writer = gguf.GGUFWriter(path, arch or config.model_type)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
    tokens, merges = small_vocabulary()
    writer.add_tokenizer_model(tokenizer)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    for key, value in metadata.items():  # None takes a key away
        if value is not None:
            getattr(writer, f"add_{key}")(value)
        else:
            writer.kv_data[0].pop(f"tokenizer.ggml.{key}")
    for key, value in (uint32 or {}).items():
        writer.add_uint32(key, value)
    for key, value in (replaced or {}).items():
        writer.kv_data[0].pop(key, None)
        kinds = {list: writer.add_array, str: writer.add_string, int: writer.add_int32}
        kinds[type(value)](key, value)
    for name, value in (gguf_tensors(model) if tensors is None else tensors).items():
        writer.add_tensor(name, np.ascontiguousarray(value))
    for name, (data, kind) in (quantised or {}).items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

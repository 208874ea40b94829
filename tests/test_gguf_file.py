"""The header of a GGUF file, read as a config.json and a tokenizer.json."""

import os

import gguf
import numpy as np
import pytest
import tokenizers
import torch
import transformers

from nanoserve.config import UnsupportedModel, load_config
from nanoserve.gguf_file import BadGGUF, gguf_tokenizer, open_gguf
from nanoserve.model import load_model
from nanoserve.tokenizer import load_tokenizer
from tests.bounds import apart
from tests.checkpoints import (
    LLAMA3_GGUF,
    gguf_tensors,
    random_model,
    reference_logits,
    save,
    small_vocabulary,
    write_gguf,
)

IDS = torch.tensor([[5, 1, 96, 33, 33, 0, 71]])
MODELS = {
    "llama-gqa": {},
    "llama-llama3-rope": {"rope_parameters": LLAMA3_GGUF},
    "llama-head-dim": {},
    "qwen2": {},
    "qwen2-tied": {},
    "qwen3": {},
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_gguf_means_the_same_model_as_the_folder_it_was_made_from(kind, tmp_path):
    theirs = random_model(kind, **MODELS[kind])
    path = write_gguf(theirs, tmp_path / "m.gguf", bos_token_id=1, eos_token_id=2)
    folder = save(theirs, tmp_path / "folder")
    assert load_config(path) == load_config(folder)
    with torch.no_grad():
        from_gguf, from_folder = load_model(path)(IDS), load_model(folder)(IDS)
    assert torch.equal(from_gguf, from_folder)
    assert apart(from_gguf, reference_logits(theirs, IDS)) < 1e-5


@pytest.mark.parametrize("arch", ["gemma2", "phi3", "mamba"])
def test_an_unsupported_architecture_is_refused_by_name(arch, tmp_path):
    path = write_gguf(random_model(), tmp_path / "m.gguf", arch=arch)
    with pytest.raises(BadGGUF, match=f"architecture '{arch}' is not supported"):
        load_model(path)


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"rope_scaling_type": gguf.RopeScalingType.YARN}, "rope_type 'yarn'"),
        ({"rope_scaling_type": gguf.RopeScalingType.LINEAR}, "rope_type 'linear'"),
        ({"sliding_window": 16}, "sliding_window 16"),
    ],
)
def test_an_unsupported_option_in_the_metadata_is_refused_by_name(metadata, said, tmp_path):
    path = write_gguf(random_model(), tmp_path / "m.gguf", **metadata)
    with pytest.raises(UnsupportedModel, match=said):
        load_config(path)


def test_rope_over_a_part_of_each_head_is_refused(tmp_path):
    model = random_model()
    assert load_config(write_gguf(model, tmp_path / "all.gguf", rope_dimension_count=8))
    path = write_gguf(model, tmp_path / "part.gguf", rope_dimension_count=4)
    with pytest.raises(BadGGUF, match="RoPE on 4 of 8 channels"):
        load_config(path)


def test_rope_divisors_that_are_no_llama3_scaling_are_refused(tmp_path):
    model = random_model()
    tensors = gguf_tensors(model) | {"rope_freqs.weight": np.array([1, 2, 3, 4], np.float32)}
    path = write_gguf(model, tmp_path / "m.gguf", tensors)
    with pytest.raises(BadGGUF, match=r"rope_freqs\.weight is not a llama3"):
        load_config(path)


def test_a_key_that_the_metadata_lacks_is_named(tmp_path):
    model = random_model()
    path = write_gguf(model, tmp_path / "m.gguf")
    # the same length, so that the file stays whole
    path.write_bytes(path.read_bytes().replace(b"llama.block_count", b"llama.block_kount"))
    with pytest.raises(BadGGUF, match=r"lacks llama\.block_count"):
        load_config(path)


@pytest.mark.parametrize("share", [0, 0.001, 0.05, 0.2, 0.6, 0.9, 0.999])
def test_a_truncated_file_is_named_wherever_it_is_cut(share, tmp_path):
    path = write_gguf(random_model(), tmp_path / "m.gguf")
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(BadGGUF, match=r"m\.gguf is not a whole GGUF file"):
        load_model(path)


def test_another_file_is_no_gguf(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(4096))
    with pytest.raises(BadGGUF, match=r"m\.gguf is not a whole GGUF file"):
        load_config(path)
    with pytest.raises(ValueError, match=r"no\.gguf is missing"):
        load_config(tmp_path / "no.gguf")


def test_a_file_that_was_replaced_is_read_anew(tmp_path):
    path = write_gguf(random_model(), tmp_path / "m.gguf")
    first = load_config(path)
    os.replace(write_gguf(random_model(num_key_value_heads=3), tmp_path / "new.gguf"), path)
    assert (first.n_kv, load_config(path).n_kv) == (2, 3)
    assert open_gguf(path) is open_gguf(path)  # and otherwise parsed once


def test_the_tokenizer_in_the_file_is_read(tmp_path):
    path = write_gguf(random_model(), tmp_path / "m.gguf")
    tokens, _ = small_vocabulary()
    tokenizer = load_tokenizer(path)
    assert tokenizer.vocab_size == len(tokens)
    assert [tokens[i] for i in tokenizer.encode("hello w0")] == ["hello", "Ġw", "0"]
    assert tokenizer.encode("<|im_end|>", parse_special=True) == [1]
    assert [i for i in range(len(tokens)) if tokenizer.is_special(i)] == [0, 1]
    assert len(tokenizer.encode("<|im_end|>")) == 10
    assert tokenizer.render_chat([{"role": "user", "content": "a"}]) == (
        "<|im_start|>user\na<|im_end|>"
    )
    assert tokenizer.prefix_ids == []


def test_a_gguf_that_asks_for_bos_gets_it_in_front_of_plain_text(tmp_path):
    path = write_gguf(random_model(), tmp_path / "m.gguf", add_bos_token=True)
    assert load_tokenizer(path).prefix_ids == [0]


@pytest.mark.parametrize(
    ("splitter", "metadata", "prefix"),
    [
        ("llama-bpe", None, [0]),  # llama.cpp's default for this splitter
        ("llama-bpe", False, []),
        ("smollm", None, []),
        ("gpt-2", None, []),
        ("qwen2", None, []),
        ("qwen2", True, [0]),
    ],
)
def test_a_gguf_that_does_not_say_whether_bos_is_put_has_its_splitters_default(
    splitter, metadata, prefix, tmp_path
):
    path = write_gguf(random_model(), tmp_path / "m.gguf", pre=splitter, add_bos_token=metadata)
    text, config = gguf_tokenizer(path)
    assert load_tokenizer(path).prefix_ids == prefix
    # the converted folder's own tokenizer puts it too
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(text), bos_token=config["bos_token"]
    )
    assert theirs("hello")["input_ids"] == prefix + load_tokenizer(path).encode("hello")


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ({"eot": 2}, (1, 2)),
        ({"eot": 1}, (1,)),
        ({"eot": 2, "eom": 3}, (1, 2, 3)),
        ({}, (1,)),
    ],
)
def test_end_of_turn_and_end_of_message_end_a_generation_too(ids, expected, tmp_path):
    metadata = {f"{role}_token_id": i for role, i in ids.items() if role == "eot"}
    keys = {f"tokenizer.ggml.{role}_token_id": i for role, i in ids.items() if role == "eom"}
    path = write_gguf(random_model(), tmp_path / "m.gguf", uint32=keys, **metadata)
    assert load_config(path).eos_ids == expected


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("llama.attention.head_count", [6, 6], "attention.head_count must be a number"),
        ("llama.attention.layer_norm_rms_epsilon", "x", "rms_epsilon must be a number, got 'x'"),
        ("llama.rope.freq_base", "x", "rope.freq_base must be a number, got 'x'"),
        ("llama.feed_forward_length", [80, 80], "intermediate_size must be a positive integer"),
        ("tokenizer.ggml.eos_token_id", 10**6, "eos_token_id must be token ids from 0 to 96"),
        ("tokenizer.ggml.eot_token_id", -1, "eos_token_id must be token ids from 0 to 96"),
    ],
)
def test_a_value_in_the_metadata_that_is_wrong_is_one_line(key, value, said, tmp_path):
    path = write_gguf(random_model(), tmp_path / "m.gguf", replaced={key: value})
    with pytest.raises(ValueError, match=rf"m\.gguf: .*{said}") as caught:
        load_config(path)
    assert "\n" not in str(caught.value)


def test_a_special_token_outside_the_vocabulary_is_named(tmp_path):
    path = write_gguf(random_model(), tmp_path / "m.gguf", bos_token_id=10**6)
    with pytest.raises(ValueError, match="bos_token_id 1000000 is outside the vocabulary of"):
        load_tokenizer(path)


@pytest.mark.parametrize(
    ("splitter", "text", "pieces"),
    [
        ("smollm", "a 123", ["a", "Ġ", "1", "2", "3"]),
        ("gpt-2", "a 123", ["a", "Ġ123"]),
        ("qwen2", "a 123", ["a", "Ġ", "1", "2", "3"]),
        ("llama-bpe", "a 12345", ["a", "Ġ", "123", "45"]),
    ],
)
def test_each_splitter_has_its_own_rule_for_digits(splitter, text, pieces, tmp_path):
    path = write_gguf(random_model(), tmp_path / "m.gguf", pre=splitter)
    full = tokenizers.Tokenizer.from_str(gguf_tokenizer(path)[0])
    assert [piece for piece, _ in full.pre_tokenizer.pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize(("model", "pre"), [("llama", "default"), ("gpt2", "tekken")])
def test_an_unsupported_tokenizer_is_refused_by_name(model, pre, tmp_path):
    path = write_gguf(random_model(), tmp_path / "m.gguf", tokenizer=model, pre=pre)
    with pytest.raises(ValueError, match=f"tokenizer '{model}' with pre-tokenizer '{pre}'"):
        load_tokenizer(path)

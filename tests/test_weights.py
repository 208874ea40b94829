"""A checkpoint becomes a dictionary of tensors by name, or one clear error."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from nanoserve.config import UnsupportedModel, load_config
from nanoserve.fetch import fetch, gguf_path
from nanoserve.weights import (
    dequantize_q4_1,
    expected_shapes,
    hf_name,
    load_weights,
    unpermute,
)
from tests.checkpoints import (
    KINDS,
    edit_json,
    gguf_tensors,
    llama_cpp_permute,
    random_model,
    save,
    write_gguf,
)
from tests.folders import denied

TYPES = gguf.GGMLQuantizationType


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(random_model(), tmp_path / "llama")


def load(path: Path, **options) -> dict[str, torch.Tensor]:
    return load_weights(path, load_config(path), **options)


def rewrite(folder: Path, change) -> None:
    """Let `change` edit the dictionary of tensors in a folder's model.safetensors."""
    tensors = {name: t.clone() for name, t in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


# folders of safetensors


@pytest.mark.parametrize("kind", KINDS)
def test_every_family_loads_under_its_own_names(kind, tmp_path):
    model = random_model(kind)
    assert_same(load(save(model, tmp_path)), model.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_the_expected_shapes_are_those_of_transformers(kind, tmp_path):
    model = random_model(kind)
    model.config.save_pretrained(tmp_path)
    theirs = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    del theirs["lm_head.weight"]
    assert expected_shapes(load_config(tmp_path)) == theirs


def test_shards_load_like_one_file(tmp_path):
    model = random_model("qwen2")
    save(model, tmp_path, max_shard_size="30KB")
    shards = list(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert_same(load(tmp_path), model.state_dict())


def test_a_missing_shard_is_named(tmp_path):
    save(random_model(), tmp_path, max_shard_size="30KB")
    lost = sorted(tmp_path.glob("model-*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ValueError, match=rf"{lost.name} is missing"):
        load(tmp_path)


@pytest.mark.parametrize(
    "content", ["{", "{}", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 3}}']
)
def test_a_broken_index_is_named(content, tmp_path):
    save(random_model(), tmp_path, max_shard_size="30KB")
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json is not valid"):
        load(tmp_path)


def test_a_folder_with_no_weights_is_named(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"llama has no weights: no model\.safetensors"):
        load(folder)


def test_a_file_that_may_not_be_read_is_named_with_the_reason(folder):
    file = folder / "model.safetensors"
    with denied(file), pytest.raises(ValueError, match=rf"{file} cannot be read: Permission den"):
        load(folder)


@pytest.mark.parametrize("kept", [0, 5, 200, -1, -1000])
def test_a_truncated_file_is_named(folder, kept):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a whole safetensors file"):
        load(folder)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
    ],
)
def test_a_missing_tensor_is_named(folder, name):
    rewrite(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=rf"tensor {name} is missing"):
        load(folder)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",  # a bias that the config does not announce
        "model.layers.2.mlp.up_proj.weight",  # a layer too many
        "model.layers.0.self_attn.q_norm.weight",
        "lm_head.bias",
        "score.weight",
    ],
)
def test_a_surplus_tensor_is_named(folder, name):
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(48)}))
    with pytest.raises(ValueError, match=rf"tensor {name} .* no place for it"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.self_attn.k_proj.weight", (48, 48)),  # as if it had no GQA
        ("model.layers.1.mlp.down_proj.weight", (80, 48)),  # transposed
        ("model.norm.weight", (1, 48)),
        ("lm_head.weight", (96, 48)),
    ],
)
def test_a_misshapen_tensor_is_named_with_both_shapes(folder, name, shape, monkeypatch):
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(shape)}))
    monkeypatch.setattr("torch.Tensor.to", None)  # no value is read before the shapes are known
    said = rf"tensor {name} has shape \[{', '.join(map(str, shape))}\], but the config requires \["
    with pytest.raises(ValueError, match=said):
        load(folder)


def test_the_constant_that_old_llama_files_carry_is_no_surplus(folder):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(4)}))
    assert name not in load(folder)


@pytest.mark.parametrize(
    ("dtype", "named"),
    [
        (torch.int8, "I8"),
        (torch.uint8, "U8"),
        (torch.float8_e4m3fn, "F8_E4M3"),
        (torch.float64, "F64"),
    ],
)
def test_a_tensor_of_an_unsupported_dtype_is_refused_by_name(folder, dtype, named):
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    with pytest.raises(UnsupportedModel, match=f"tensor {name} is stored as {named}"):
        load(folder)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("asked", [torch.float32, torch.float16, torch.bfloat16])
def test_whatever_the_file_holds_the_dtype_asked_for_comes_out(stored, asked, tmp_path):
    model = random_model().to(stored)
    weights = load(save(model, tmp_path), dtype=asked)
    assert_same(weights, {name: t.to(asked) for name, t in model.state_dict().items()})


# the head


def test_a_separate_head_that_the_file_holds_is_the_head(folder):
    weights = load(folder)
    assert not torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])


def test_a_separate_head_that_the_file_lacks_is_refused(folder):
    """transformers would initialise a random head."""
    rewrite(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ValueError, match=r"lm_head.weight is missing, and tie_word_embeddings"):
        load(folder)


def test_a_tied_head_that_the_file_holds_with_other_values_is_refused(folder):
    """transformers would not tie it, although the config says that it is tied."""
    edit_json(folder / "config.json", tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"lm_head.weight differs .* tie_word_embeddings is true"):
        load(folder)


@pytest.mark.parametrize("present", [True, False])
def test_a_tied_head_is_the_embedding_whether_or_not_the_file_holds_one(folder, present):
    edit_json(folder / "config.json", tie_word_embeddings=True)

    def tie(tensors: dict) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        if not present:
            del tensors["lm_head.weight"]

    rewrite(folder, tie)
    weights = load(folder)
    assert weights["lm_head.weight"] is weights["model.embed_tokens.weight"]


# GGUF: names, order of rows, quantisation


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.0.attn_norm.weight", "model.layers.0.input_layernorm.weight"),
        ("blk.13.attn_q.weight", "model.layers.13.self_attn.q_proj.weight"),
        ("blk.13.attn_q.bias", "model.layers.13.self_attn.q_proj.bias"),
        ("blk.2.attn_k_norm.weight", "model.layers.2.self_attn.k_norm.weight"),
        ("blk.2.attn_output.weight", "model.layers.2.self_attn.o_proj.weight"),
        ("blk.107.ffn_down.weight", "model.layers.107.mlp.down_proj.weight"),
        ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
        # unknown names come back as they are
        ("blk.0.ffn_gate_exps.weight", "blk.0.ffn_gate_exps.weight"),
        ("blk.0.attn_q.scale", "blk.0.attn_q.scale"),
        ("rope_freqs.weight", "rope_freqs.weight"),
        ("blk.0", "blk.0"),
        ("", ""),
    ],
)
def test_gguf_names_become_hugging_face_names(theirs, ours):
    assert hf_name(theirs) == ours


@pytest.mark.parametrize(("heads", "head_dim"), [(6, 8), (2, 8), (1, 14), (3, 2)])
@pytest.mark.parametrize("inner", [(5,), ()])
def test_unpermute_undoes_what_llama_cpp_does(heads, head_dim, inner):
    weight = torch.randn(heads * head_dim, *inner)
    permuted = torch.from_numpy(llama_cpp_permute(weight.numpy(), heads).copy())
    assert torch.equal(unpermute(permuted, heads), weight)
    if head_dim > 2:
        assert not torch.equal(permuted, weight)


def test_unpermute_of_one_head_by_hand():
    interleaved = torch.tensor([10.0, 20, 11, 21, 12, 22])  # pairs (10, 20), (11, 21), (12, 22)
    assert unpermute(interleaved, 1).tolist() == [10, 11, 12, 20, 21, 22]


def test_q4_1_of_one_block_by_hand():
    packed = bytes(low | (15 - low) << 4 for low in range(16))
    block = struct.pack("<ee", 0.5, -3.0) + packed
    values = dequantize_q4_1(torch.tensor([list(block)], dtype=torch.uint8))
    rising = [0.5 * i - 3 for i in range(16)]
    assert values.tolist() == [rising + rising[::-1]]
    assert values.dtype == torch.float32


def test_q4_1_equals_gguf_on_random_bytes_and_random_numbers():
    random = np.random.default_rng(0)
    kind = TYPES.Q4_1
    numbers = gguf.quants.quantize(random.normal(size=(7, 96)).astype(np.float32), kind)
    raw = random.integers(0, 256, size=(50, 20), dtype=np.uint8)
    raw[:, [1, 3]] &= 0x3F  # keep the two float16 finite
    for blocks in (numbers.reshape(-1, 20), raw):
        theirs = gguf.quants.dequantize(blocks, kind).reshape(-1, 32)
        assert torch.equal(dequantize_q4_1(torch.from_numpy(blocks)), torch.from_numpy(theirs))


@pytest.mark.parametrize("kind", ["llama-gqa", "llama-bias", "llama-tied", "qwen2", "qwen3"])
def test_a_gguf_holds_the_tensors_of_the_folder_it_was_made_from(kind, tmp_path):
    model = random_model(kind)
    assert_same(load(write_gguf(model, tmp_path / "m.gguf")), model.state_dict())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q5_1", "BF16", "F16"])
def test_quantised_tensors_are_those_of_ggufs_own_reader(kind, tmp_path):
    model, kind = random_model(hidden_size=64, num_attention_heads=4), getattr(TYPES, kind)
    tensors = gguf_tensors(model)
    names = [f"blk.0.{part}.weight" for part in ("ffn_gate", "attn_q", "attn_v")]
    blocks = {name: gguf.quants.quantize(tensors.pop(name), kind) for name in names}
    values = {name: gguf.quants.dequantize(data, kind) for name, data in blocks.items()}
    quantised = {name: (data, kind) for name, data in blocks.items()}
    loaded = load(write_gguf(model, tmp_path / "m.gguf", tensors, quantised=quantised))
    for name, value in values.items():
        ours = loaded[hf_name(name)].numpy()
        assert np.array_equal(llama_cpp_permute(ours, 4) if "attn_q" in name else ours, value)


def test_an_unsupported_quantisation_is_refused_by_name(tmp_path):
    model = random_model(hidden_size=64, num_attention_heads=4)
    tensors = gguf_tensors(model)
    rows = tensors.pop("blk.1.ffn_up.weight").shape[0]
    kind = TYPES.Q8_1  # llama.cpp uses it for activations only
    data = np.zeros((rows, 64 // 32 * 40), dtype=np.uint8)
    path = write_gguf(
        model, tmp_path / "m.gguf", tensors, quantised={"blk.1.ffn_up.weight": (data, kind)}
    )
    with pytest.raises(UnsupportedModel, match=r"blk\.1\.ffn_up\.weight: quantisation Q8_1"):
        load(path)


def test_a_gguf_with_a_tensor_missing_surplus_or_misshapen_names_it(tmp_path):
    model = random_model()
    changes = {
        "k_proj.weight is missing": lambda t: t.pop("blk.1.attn_k.weight"),
        r"blk\.0\.ffn_gate_exps\.weight .* no place": lambda t: t.update(
            {"blk.0.ffn_gate_exps.weight": np.zeros((2, 3), np.float32)}
        ),
        r"up_proj.weight has shape \[48, 80\]": lambda t: t.update(
            {"blk.0.ffn_up.weight": t["blk.0.ffn_up.weight"].T}
        ),
    }
    for i, (said, change) in enumerate(changes.items()):
        tensors = gguf_tensors(model)
        change(tensors)
        path = write_gguf(model, tmp_path / f"{i}.gguf", tensors)
        with pytest.raises(ValueError, match=said):
            load(path)


# the real model


@pytest.mark.slow
def test_the_converted_model_is_what_transformers_reads_from_the_gguf():
    folder = fetch()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder.parent, gguf_file=gguf_path().name, dtype=torch.float32
    )
    assert_same(load(folder), theirs.state_dict())

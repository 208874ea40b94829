"""Weights in four bits: the file's own numbers, rounding, the CPU's product, and the cache file."""

import json
import os
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import gguf
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanoserve import quant
from nanoserve.generate import LLM, SamplingParams
from nanoserve.layers import embedding, linear
from nanoserve.model import load_model
from nanoserve.q4_file import q4_path
from nanoserve.quant import (
    GROUP,
    Q4Weight,
    from_q4_blocks,
    from_q8_blocks,
    pack_nibbles,
    q4_linear,
    quantize,
    unpack_nibbles,
    why_not,
)
from nanoserve.weights import load_weights
from tests.checkpoints import KINDS, gguf_tensors, random_model, save, write_gguf

KIND = gguf.GGMLQuantizationType
# Shapes that can be multiplied in four bits; KINDS' own cannot: rows of 48 and 80 numbers.
SHAPES = {"vocab_size": 112, "hidden_size": 96, "intermediate_size": 160, "head_dim": 16}
PROMPT = [5, 80, 17, 17, 3]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch) -> Path:
    """An empty cache folder."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("NANOSERVE_CACHE", str(folder))
    return folder


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The root mean square difference, as a share of theirs."""
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def blocks(weight: torch.Tensor, kind: KIND) -> torch.Tensor:
    """A weight as gguf's own writer quantises it."""
    return torch.from_numpy(gguf.quants.quantize(weight.numpy(), kind))


def gguf_values(weight: torch.Tensor, kind: KIND) -> torch.Tensor:
    data = gguf.quants.quantize(weight.numpy(), kind)
    return torch.from_numpy(gguf.quants.dequantize(data, kind))


# Two numbers in a byte


@given(st.integers(1, 5), st.integers(1, 9))
def test_unpacking_undoes_packing(rows, pairs):
    numbers = torch.randint(0, 16, (rows, 2 * pairs), dtype=torch.uint8)
    packed = pack_nibbles(numbers)
    assert (packed.shape, packed.dtype) == ((rows, pairs), torch.uint8)
    assert torch.equal(unpack_nibbles(packed), numbers)


def test_the_first_number_of_a_pair_is_in_the_low_bits():
    assert pack_nibbles(torch.tensor([3, 10, 15, 0], dtype=torch.uint8)).tolist() == [0xA3, 0x0F]


# The file's own numbers


@pytest.mark.parametrize("kind", [KIND.Q4_1, KIND.Q4_0])
def test_q4_blocks_keep_their_numbers_and_round_only_scale_and_minimum(kind):
    weight = normal(6, 96)
    kept, data = from_q4_blocks(blocks(weight, kind), kind.name), blocks(weight, kind)
    header = 4 if kind == KIND.Q4_1 else 2
    one = data.view(6, 3, -1)
    floats = one[..., :header].contiguous().view(torch.float16)
    numbers = torch.cat([one[..., header:] & 15, one[..., header:] >> 4], -1).view(6, 96)
    assert torch.equal(unpack_nibbles(kept.numbers), numbers)
    assert torch.equal(kept.scales, floats[..., 0].bfloat16())
    minimum = floats[..., -1] if kind == KIND.Q4_1 else -8 * floats[..., 0]
    assert torch.equal(kept.minimums, minimum.bfloat16())
    # Rounding to bfloat16 changes a number by 2 ** -8 of it at most.
    theirs = gguf_values(weight, kind).view(6, 3, 32)
    bound = 2**-8 * (15 * floats[..., :1].float().abs() + minimum.float().abs()[..., None])
    assert ((kept.dequantize().view(6, 3, 32) - theirs).abs() <= 1.01 * bound).all()


def test_scales_and_minimums_that_bfloat16_holds_give_exactly_the_files_values():
    data = blocks(normal(4, 64), KIND.Q4_1).view(4, 2, 20)
    short = data[..., :4].contiguous().view(torch.float16).bfloat16().half()
    data = torch.cat([short.view(torch.uint8), data[..., 4:]], -1).view(4, 40)
    theirs = gguf.quants.dequantize(data.numpy(), KIND.Q4_1)
    assert torch.equal(from_q4_blocks(data, "Q4_1").dequantize(), torch.from_numpy(theirs))


def test_q8_blocks_are_two_parts_whose_sum_is_the_files_value():
    weight = normal(4, 64)
    kept = from_q8_blocks(blocks(weight, KIND.Q8_0))
    assert (kept.parts, kept.shape) == (2, (4, 64))
    assert error(kept.dequantize(), gguf_values(weight, KIND.Q8_0)) < 2**-8
    data = blocks(weight, KIND.Q8_0).view(4, 2, 34)
    integers = data[..., 2:].contiguous().view(torch.int8)
    scales = data[..., :2].contiguous().view(torch.float16).bfloat16().float()
    assert torch.equal(kept.dequantize().view(4, 2, 32), integers * scales)


# Rounding to the nearest


@given(st.integers(1, 7), st.integers(1, 4), st.floats(1e-3, 1e3), st.floats(-2, 2))
def test_rounding_is_off_by_half_a_step_at_most(rows, groups, size, centre):
    weight = size * (normal(rows, groups * GROUP) + centre)
    kept = quantize(weight)
    assert (kept.shape, kept.parts) == (weight.shape, 1)
    values, given_ = (t.view(rows, groups, GROUP) for t in (kept.dequantize(), weight))
    lowest, highest = given_.aminmax(dim=-1, keepdim=True)
    rounding = 2**-8 * (highest - lowest) + 2**-8 * lowest.abs()  # of scale and minimum
    assert ((values - given_).abs() <= (highest - lowest) / 30 + rounding).all()


def test_eight_bits_are_sixteen_times_as_fine():
    weight = normal(32, 128)
    four, eight = (error(quantize(weight, bits).dequantize(), weight) for bits in (4, 8))
    assert eight < four / 10


def test_a_group_of_equal_numbers_keeps_its_number():
    weight = torch.full((2, 64), 0.375)
    weight[1] = 0
    for bits in (4, 8):
        assert torch.allclose(quantize(weight, bits).dequantize(), weight, rtol=2**-8, atol=0)


def test_a_weight_in_pieces_is_quantised_as_a_whole():
    weight = normal(5000, 256)  # more than the elements that are rounded at a time
    halves = quant.concatenate([quantize(weight[:2345]), quantize(weight[2345:])])
    assert quantize(weight).equal(halves)


def test_what_cannot_be_quantised_is_an_error():
    with pytest.raises(ValueError, match=r"multiple of 32\], got \[4, 48\]"):
        quantize(normal(4, 48))
    with pytest.raises(ValueError, match="bits must be 4 or 8, got 5"):
        quantize(normal(4, 64), 5)


# Rows, parts and products


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_are_rows_of_the_dequantised_weight(bits):
    kept = quantize(normal(7, 64), bits)
    ids = torch.tensor([[3, 0, 3], [6, 1, 2]])
    assert torch.equal(kept.rows(ids), kept.dequantize()[ids])
    assert embedding(ids, kept, torch.bfloat16).dtype == torch.bfloat16
    assert torch.equal(embedding(ids, kept.dequantize(), torch.float32), kept.rows(ids))


def test_split_gives_views_of_consecutive_rows():
    kept = quantize(normal(12, 64))
    first, second = kept.split([5, 7])
    assert torch.equal(torch.cat([first.dequantize(), second.dequantize()]), kept.dequantize())
    assert second.numbers.data_ptr() == kept.numbers[5:].data_ptr()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 3, 16, 63, 64, 200])
@pytest.mark.parametrize(("out", "width"), [(16, 32), (80, 96), (1168, 64)])
def test_the_product_equals_the_dequantised_product(out, width, rows, bits):
    kept, x = quantize(normal(out, width), bits), normal(rows, width, seed=1).bfloat16()
    kept.pack()
    product = q4_linear(x, kept)
    assert (product.shape, product.dtype) == ((rows, out), torch.bfloat16)
    # bfloat16 rounds zero, the weights of many rows, and the product: 2 ** -8 of each at most.
    assert error(product, x.double() @ kept.dequantize().double().T) < 2**-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(64,), (5, 64), (2, 3, 64), (2, 50, 64)])
def test_linear_keeps_shape_and_dtype_and_adds_the_bias(shape, dtype):
    kept, x, bias = quantize(normal(48, 64)), normal(*shape).to(dtype), normal(48).to(dtype)
    kept.pack()
    product = linear(x, kept, bias)
    assert (product.shape, product.dtype) == ((*shape[:-1], 48), dtype)
    assert error(product, x.double() @ kept.dequantize().double().T + bias.double()) < 2**-6


def test_packing_some_rows_at_a_time_equals_packing_all(monkeypatch):
    kept = quantize(normal(2224, 64))
    pieces = quant.pack_for_cpu(kept.numbers, kept.scales, kept.minimums)
    monkeypatch.setattr(quant, "PACK_ROWS", 4096)
    whole = quant.pack_for_cpu(kept.numbers, kept.scales, kept.minimums)
    assert all(torch.equal(a, b) for a, b in zip(pieces, whole, strict=True))


def test_a_weight_that_is_not_packed_is_dequantised():
    kept, x = quantize(normal(48, 64)), normal(3, 64)
    assert torch.equal(q4_linear(x, kept), x @ kept.dequantize().T)


def test_why_not_names_the_reason(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert why_not((48, 64), cpu) is None
    assert why_not((48, 80), cuda) == "a row of 80 is no multiple of 32"
    assert why_not((40, 64), cpu) == "40 rows are no multiple of 16"
    assert why_not((40, 64), cuda) is None
    monkeypatch.setattr(quant, "has_cpu_product", lambda: False)
    assert why_not((48, 64), cpu) == "this torch has no four-bit product for this processor"


def test_a_torch_without_the_operation_is_recognised(monkeypatch):
    quant.has_cpu_product.cache_clear()
    monkeypatch.delattr(torch, "_weight_int4pack_mm_for_cpu")
    assert quant.has_cpu_product() is False
    monkeypatch.undo()
    quant.has_cpu_product.cache_clear()
    assert quant.has_cpu_product() is True


# Whole models


@pytest.mark.parametrize("kind", KINDS)
def test_every_family_generates_in_four_bits(kind, tmp_path):
    family = random_model(kind, **{**SHAPES, "vocab_size": 112})
    folder = save(family, tmp_path / "model")
    llm = load_model(folder, quantization="q4")
    matrices = [w for w in llm.weights.values() if len(w.shape) == 2]
    assert all(isinstance(w, Q4Weight) for w in matrices)
    assert (llm.dtype, llm.device.type) == (torch.float32, "cpu")
    # The reference: the same values as ordinary tensors.
    plain = load_model(folder)
    for name, weight in llm.weights.items():
        if isinstance(weight, Q4Weight):
            plain.weights[name].copy_(weight.dequantize())
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        assert error(llm(ids), plain(ids)) < 0.03  # rows are rounded to bfloat16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_llm_generates_from_a_gguf_in_four_bits(dtype, tmp_path):
    model = random_model("llama-tied", **{**SHAPES, "vocab_size": 272})
    path = write_gguf(model, tmp_path / "tiny.gguf", **quantised(model, KIND.Q4_1))
    llm = LLM(path, dtype, quantization="q4")
    out = llm.generate([PROMPT], GREEDY)[0]
    assert len(out.token_ids) >= 1
    assert llm.model.dtype == getattr(torch, dtype)


def quantised(model, kind: KIND, head: KIND = KIND.Q8_0) -> dict:
    """Arguments of write_gguf: matrices in `kind`, the embedding in `head`, and the vectors."""
    tensors = gguf_tensors(model)
    kinds = {n: head if n == "token_embd.weight" else kind for n in tensors}
    packed = {
        n: (gguf.quants.quantize(t, kinds[n]), kinds[n]) for n, t in tensors.items() if t.ndim == 2
    }
    return {"tensors": {n: t for n, t in tensors.items() if t.ndim == 1}, "quantised": packed}


@pytest.mark.parametrize("kind", ["llama-gqa", "qwen2-tied", "qwen3"])
@pytest.mark.parametrize("stored", [KIND.Q4_1, KIND.Q4_0])
def test_a_gguf_gives_its_own_numbers(kind, stored, tmp_path):
    """Also for a Llama's q and k, whose rows a GGUF permutes."""
    model = random_model(kind, **{**SHAPES, "vocab_size": 272})
    path = write_gguf(model, tmp_path / "tiny.gguf", **quantised(model, stored))
    kept, floats = load_model(path, quantization="q4"), load_model(path)
    for name, weight in floats.weights.items():
        if weight.dim() == 2:
            eight = name in ("model.embed_tokens.weight",) or (
                name == "lm_head.weight" and model.config.tie_word_embeddings
            )
            if name != "lm_head.weight" or eight:
                assert error(kept.weights[name].dequantize(), weight) < 2**-7, name
                assert kept.weights[name].parts == (2 if eight else 1)


def test_other_kinds_in_a_gguf_are_rounded(tmp_path):
    model = random_model("llama-gqa", **{**SHAPES, "vocab_size": 272})
    for stored in (KIND.F16, KIND.Q8_0, KIND.Q5_1):
        path = write_gguf(model, tmp_path / "tiny.gguf", **quantised(model, stored, KIND.F16))
        kept, floats = load_model(path, quantization="q4"), load_model(path)
        name = "model.layers.1.mlp.down_proj.weight"
        assert kept.weights[name].equal(quantize(floats.weights[name]))
        name = "model.embed_tokens.weight"
        assert kept.weights[name].equal(quantize(floats.weights[name], 8))


def test_a_tied_head_is_the_embedding_and_q_k_v_are_views(tmp_path):
    folder = save(random_model("llama-tied", **SHAPES), tmp_path / "model")
    for _ in range(2):  # without and with the cache's file
        model = load_model(folder, quantization="q4")
        assert model.weights["lm_head.weight"] is model.weights["model.embed_tokens.weight"]
        joined = model.layers[1]["self_attn.qkv_proj.weight"]
        assert joined.packed is not None
        q = model.weights["model.layers.1.self_attn.q_proj.weight"]
        assert q.numbers.data_ptr() == joined.numbers.data_ptr()
        assert q.packed is None


def test_what_cannot_be_packed_is_dequantised_and_one_line_says_so(tmp_path):
    folder = save(random_model("llama-gqa", hidden_size=96, vocab_size=97), tmp_path / "model")
    with pytest.warns(UserWarning) as told:
        model = load_model(folder, quantization="q4")
    # down_proj has rows of 80; embedding and head have 97 rows
    message = "q4: 4 of 16 matrices are dequantised to torch.float32; lm_head.weight: "
    assert [str(w.message) for w in told] == [message + "97 rows are no multiple of 16"]
    assert isinstance(model.weights["model.layers.0.mlp.up_proj.weight"], Q4Weight)
    with torch.no_grad():
        assert model(torch.tensor([PROMPT])).isfinite().all()


def test_without_the_operation_every_matrix_is_dequantised(tmp_path, monkeypatch):
    folder = save(random_model("qwen3", **SHAPES), tmp_path / "model")
    kept = load_model(folder, quantization="q4")
    monkeypatch.setattr(quant, "has_cpu_product", lambda: False)
    with pytest.warns(UserWarning, match="q4: 16 of 16 matrices are dequantised"):
        model = load_model(folder, quantization="q4")
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(model.weights[name], kept.weights[name].dequantize())


def test_a_wrong_quantisation_is_one_clear_error(tmp_path):
    message = "quantization 'q5' is not supported; supported: 'q4', None"
    for use in (LLM, load_model):
        with pytest.raises(ValueError, match=message):
            use(tmp_path, quantization="q5")
    with pytest.raises(ValueError, match=message):
        load_weights(tmp_path, None, quantization="q5")


def test_a_model_without_quantisation_writes_and_warns_nothing(tmp_path, cache):
    folder = save(random_model("llama-gqa"), tmp_path / "model")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_model(folder)
    assert list(cache.iterdir()) == []


# The file in the cache folder


@pytest.fixture
def folder(tmp_path) -> Path:
    return save(random_model("qwen2-tied", **SHAPES), tmp_path / "model")


def same(a, b) -> bool:
    return list(a.weights) == list(b.weights) and all(
        w.equal(b.weights[name]) for name, w in a.weights.items()
    )


def test_the_second_load_reads_the_file_and_gives_the_same_weights(folder, monkeypatch):
    first = load_model(folder, "bfloat16", quantization="q4")
    monkeypatch.setattr("nanoserve.q4_file._write", lambda *_: pytest.fail("written again"))
    monkeypatch.setattr("nanoserve.q4_file.load_weights", lambda *_: pytest.fail("read again"))
    assert same(first, load_model(folder, "bfloat16", quantization="q4"))


def test_the_file_is_written_again_when_the_checkpoint_changes(folder):
    first = load_model(folder, quantization="q4")
    save(random_model("qwen2-tied", seed=1, **SHAPES), folder)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    second = load_model(folder, quantization="q4")
    assert not same(first, second)
    assert same(second, load_model(folder, quantization="q4"))
    assert len(list(q4_path(folder).parent.iterdir())) == 1  # no temporary file, no old file


@pytest.mark.parametrize("damage", ["cut", "empty", "another version", "a folder"])
def test_a_damaged_file_is_written_again(folder, damage, monkeypatch):
    first = load_model(folder, quantization="q4")
    file = q4_path(folder)
    content = file.read_bytes()
    file.unlink()  # `first` still maps the old file
    if damage == "a folder":
        file.mkdir()
    elif damage == "another version":
        assert content.count(b"[1, [[") == 1
        file.write_bytes(content.replace(b"[1, [[", b"[0, [["))
    else:
        file.write_bytes(content[: -100 if damage == "cut" else 0])
    assert same(first, load_model(folder, quantization="q4"))
    if damage != "a folder":
        monkeypatch.setattr("nanoserve.q4_file._write", lambda *_: pytest.fail("written again"))
        assert same(first, load_model(folder, quantization="q4"))


def test_a_cache_that_cannot_be_written_is_no_error(folder, tmp_path, monkeypatch):
    first = load_model(folder, quantization="q4")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NANOSERVE_CACHE", str(tmp_path / "file"))
    assert same(first, load_model(folder, quantization="q4"))


def test_the_temporary_file_of_a_killed_process_is_removed_later(folder):
    file = q4_path(folder)
    file.parent.mkdir(parents=True)
    old, new = (file.with_name(f".{file.name}.{name}") for name in ("old", "new"))
    old.touch(), new.touch()
    os.utime(old, (time.time() - 7200,) * 2)
    load_model(folder, quantization="q4")
    assert (old.exists(), new.exists(), file.exists()) == (False, True, True)


def test_the_file_is_in_the_neutral_order(folder):
    """So another processor, whose packed order differs, can read it."""
    from safetensors.torch import load_file

    model = load_model(folder, quantization="q4")
    stored = load_file(q4_path(folder))
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(stored[f"{name}.numbers"], model.weights[name].numbers)
    assert not [key for key in stored if "packed" in key]
    assert torch.equal(stored[f"{name}.scales"], quantize(load_weights_of(folder)[name]).scales)


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_a_file_of_one_processor_is_right_on_another(folder, capability):
    """PyTorch packs in another order for each kind of processor; the file has none of them."""
    model = load_model(folder, quantization="q4")
    with torch.no_grad():
        ours = model(torch.tensor([PROMPT]))
    code = """
        import json, sys, torch
        from nanoserve.model import load_model
        sys.modules["nanoserve.q4_file"]._write = None  # the file is there
        model = load_model(sys.argv[1], quantization="q4")
        with torch.no_grad():
            logits = model(torch.tensor([json.loads(sys.argv[2])]))
        head = model.weights["lm_head.weight"].packed[0].flatten()[:4096].tolist()
        print(json.dumps([torch.backends.cpu.get_cpu_capability(), logits.tolist(), head]))
    """
    environment = {"ATEN_CPU_CAPABILITY": capability}
    text = run(code, str(folder), json.dumps(PROMPT), **environment).communicate()[0]
    found, theirs, packed = json.loads(text)
    assert error(ours, torch.tensor(theirs)) < 0.02
    if found != torch.backends.cpu.get_cpu_capability():  # then the packed order differs too
        assert packed != model.weights["lm_head.weight"].packed[0].flatten()[:4096].tolist()


def load_weights_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def run(code: str, *arguments: str, **environment: str) -> subprocess.Popen:
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )


def test_two_processes_may_load_at_once(folder, cache):
    code = """
        import sys
        from nanoserve.model import load_model
        model = load_model(sys.argv[1], quantization="q4")
        print(int(model.weights["lm_head.weight"].numbers.long().sum()))
    """
    processes = [run(code, str(folder)) for _ in range(2)]
    printed = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert printed[0] == printed[1] != ""
    assert [file.name for file in (cache / "q4").iterdir()] == [q4_path(folder).name]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's own count")
def test_peak_memory_while_loading_is_at_most_1_3_times_what_is_kept(tmp_path):
    """For a GGUF of 17 million weights, whose float32 values would be 70 MB."""
    shapes = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8}
    model = random_model(
        "llama-gqa", **shapes, head_dim=64, num_hidden_layers=6, vocab_size=272, seed=3
    )
    path = write_gguf(model, tmp_path / "big.gguf", **quantised(model, KIND.Q4_1))
    code = """
        import json, sys, gguf, safetensors.torch
        import numpy as np
        from pathlib import Path
        from nanoserve.model import load_model
        from nanoserve.quant import has_cpu_product
        def memory():
            lines = Path("/proc/self/status").read_text().splitlines()
            values = {line.split(":")[0]: line.split()[1] for line in lines if "kB" in line}
            return int(values["VmHWM"]), int(values["VmRSS"])
        has_cpu_product()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
        before = memory()[1]
        model = load_model(sys.argv[1], quantization="q4")
        peak, kept = memory()
        print(json.dumps([peak - before, kept - before]))
    """
    first, second = (json.loads(run(code, str(path)).communicate()[0]) for _ in range(2))
    for peak, kept in (first, second):
        assert kept < 45_000  # kB: numbers in both orders; float32 alone would be 70,000
        assert peak <= 1.3 * kept + 8_000  # the reader of the file, and the tensor at work


def test_smollm2_takes_the_numbers_of_its_gguf(monkeypatch):
    monkeypatch.delenv("NANOSERVE_CACHE")
    kept, floats = load_model(quantization="q4"), load_model()
    for name, weight in floats.weights.items():
        if weight.dim() == 2:
            assert error(kept.weights[name].dequantize(), weight) < 2**-7, name
    assert kept.weights["lm_head.weight"].parts == 2
    started = time.process_time()
    load_model(quantization="q4")
    assert time.process_time() - started < 2  # seconds; a quiet machine takes less than one

"""Tests that need a GPU: pools past 32 bits, no wait for the device, the engine on CUDA."""

import pytest
import torch

from nanoserve import LLM, SamplingParams, load_model
from nanoserve.generate import new_cache, next_logits
from nanoserve.kernels import dequant_matvec, dispatch
from nanoserve.kernels.dispatch import (
    BACKENDS,
    paged_attention_batch_dispatch,
    paged_attention_dispatch,
    use_backend,
)
from nanoserve.kernels.reference import PagedTables, paged_attention_batch_reference
from nanoserve.quant import Q4Weight
from tests.attention_cases import HALVES, LAYOUTS, AttentionCase, assert_expected, tensors
from tests.checkpoints import KINDS, random_model, save
from tests.folders import VOCABULARY, write_checkpoint

GIB = 1 << 30
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@pytest.fixture
def memory():
    """These tests allocate many GiB; each test frees its memory."""
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


def fits(dtype: torch.dtype, bits: int) -> bool:
    """Whether two pools of 2 ** bits elements fit on the GPU, with 2 GiB beside them."""
    return 2 * (dtype.itemsize << bits) + 2 * GIB < torch.cuda.mem_get_info()[1]


@pytest.mark.parametrize(("query_len", "integer"), [(1, torch.int32), (3, torch.int64)])
@pytest.mark.parametrize(
    ("dtype", "bits"),
    [(dtype, bits) for dtype in DTYPES for bits in (31, 32) if fits(dtype, bits)],
)
def test_a_pool_of_more_elements_than_an_integer_counts(dtype, bits, query_len, integer, memory):
    case = AttentionCase(32, 8, 128, query_len, 700, dtype=dtype, integer=integer)
    edge = (1 << bits) // (8 * 128)  # the slot whose first element is number 2 ** bits
    pools = tuple(
        torch.full((edge + 500, 8, 128), torch.nan, dtype=dtype, device="cuda") for _ in range(2)
    )
    slots = edge - 500 + torch.randperm(1000, generator=torch.Generator().manual_seed(0))[:700]
    assert (slots < edge).any()
    assert (slots >= edge).any()
    assert_expected(
        paged_attention_dispatch(*tensors(case, "cuda", pools=pools, slots=slots)), case
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_can_run_on_the_gpu(backend):
    for reads in (LAYOUTS, HALVES):
        for case in (case for name, case in reads.items() if "all at once" in name):
            with use_backend(backend):
                assert_expected(paged_attention_dispatch(*tensors(case, "cuda")), case)


def test_on_the_gpu_triton_is_chosen(monkeypatch):
    case, inputs = AttentionCase(), tensors(AttentionCase(), "cuda")
    monkeypatch.setattr(dispatch, "paged_attention_triton", lambda *args: ("triton", args))
    backend, args = paged_attention_dispatch(*inputs)
    assert backend == "triton"
    assert all(a is b for a, b in zip(args, inputs, strict=True))
    assert dispatch.select_backend("cuda") == dispatch.select_backend("cuda:0") == "triton"
    assert_expected(dispatch.paged_attention_tlsim(*inputs), case)


def test_attention_does_not_wait_for_the_gpu():
    case = AttentionCase(9, 3, 64, 1, 300)
    inputs = tensors(case, "cuda")
    paged_attention_dispatch(*inputs)  # compiled, loaded
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = paged_attention_dispatch(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_expected(out, case)


def test_attention_can_be_captured_in_a_cuda_graph():
    case = AttentionCase(9, 3, 64, 1, 300)
    inputs = tensors(case, "cuda")
    paged_attention_dispatch(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention_dispatch(*inputs)
    out.zero_()
    graph.replay()
    assert_expected(out, case)


def test_slots_are_checked_on_the_gpu_on_request(monkeypatch):
    q, k_pool, v_pool, slots, *rest = tensors(AttentionCase(), "cuda")
    slots[3] = len(k_pool)
    monkeypatch.setenv("NANOSERVE_CHECK_SLOTS", "1")
    with pytest.raises(ValueError, match="has slot 79, but the pools have 79"):
        paged_attention_dispatch(q, k_pool, v_pool, slots, *rest)


@pytest.mark.parametrize("argument", ["k_pool", "v_pool", "slot_mapping"])
def test_tensors_on_two_devices_are_refused(argument):
    inputs = list(tensors(AttentionCase(), "cuda"))
    place = ("q", "k_pool", "v_pool", "slot_mapping").index(argument)
    inputs[place] = inputs[place].cpu()
    with pytest.raises(ValueError, match=f"{argument} is on cpu, but q is on cuda:0"):
        paged_attention_dispatch(*inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_on_the_gpu_generates_the_cpus_tokens(kind, tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path, kind, eos=None)
    random = torch.Generator().manual_seed(0)
    prompts = [torch.randint(VOCABULARY, (n,), generator=random).tolist() for n in (1, 5, 17)]
    seen, triton = [], dispatch.paged_attention_triton

    def spied(*args):
        seen.append(args[0].device.type)
        return triton(*args)

    monkeypatch.setattr(dispatch, "paged_attention_triton", spied)
    params = SamplingParams(max_tokens=20)
    ours, theirs = (LLM(folder, device=d).generate(prompts, params) for d in ("cuda", "cpu"))
    assert [x.token_ids for x in ours] == [x.token_ids for x in theirs]
    assert seen == ["cuda"] * (2 * 20 * len(prompts))  # layers, steps


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_half_precision_the_logits_are_the_oracles_within_rounding(dtype, tmp_path):
    model = load_model(write_checkpoint(tmp_path), dtype, "cuda")
    logits = {}
    for backend in ("triton", "reference"):
        cache = new_cache("paged", model, 30)
        with use_backend(backend):
            steps = [next_logits(model, ids, cache) for ids in ([5, 7, 11, 13, 17], [19], [23])]
        logits[backend] = torch.stack(steps).float()
    apart = (logits["triton"] - logits["reference"]).abs().max() / logits["reference"].abs().max()
    assert apart < 4 * torch.finfo(dtype).eps


def test_a_captured_launch_follows_the_content_of_its_tables():
    random = torch.Generator("cuda").manual_seed(31)
    where = {"device": "cuda", "generator": random}
    pools = torch.randn(2, 64 * 16, 2, 64, **where)
    q = torch.randn(3, 6, 64, **where)

    def draw(longest):
        blocks = torch.randperm(64, **where)[:60].view(3, 20).int()
        return blocks, torch.randint(1, longest + 1, (3,), **where).int()

    blocks, kv_lens = draw(320)
    starts = torch.arange(4, device="cuda", dtype=torch.int32)
    tables = PagedTables(blocks, kv_lens, starts, 16, 1, 320)

    def launch():
        return paged_attention_batch_dispatch(q, *pools, tables, 3)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch()  # compiles: a capture must not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch()
    for longest in (320, 1, 17, 300):
        for old, new in zip((blocks, kv_lens), draw(longest), strict=True):
            old.copy_(new)
        graph.replay()
        expected = paged_attention_batch_reference(q, *pools, tables, 3)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)


def test_four_bit_weights_on_the_gpu_go_through_the_kernel(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOSERVE_CACHE", str(tmp_path / "cache"))
    sizes = {"vocab_size": 112, "hidden_size": 96, "intermediate_size": 160, "head_dim": 16}
    folder = save(random_model("llama-tied", **sizes), tmp_path / "model")
    calls, kernel = [], dequant_matvec.dequant_matvec_triton

    def spied(*args):
        calls.append(len(args[0]))
        return kernel(*args)

    monkeypatch.setattr(dequant_matvec, "dequant_matvec_triton", spied)
    for dtype in (torch.float32, torch.bfloat16):
        ours = load_model(folder, dtype, "cuda", quantization="q4")
        plain = load_model(folder, dtype, "cuda")
        for name, weight in ours.weights.items():
            if isinstance(weight, Q4Weight):
                plain.weights[name].copy_(weight.dequantize(dtype))
        ids = torch.tensor([[5, 80, 17, 17, 3]], device="cuda")
        with torch.no_grad():
            ours, theirs = ours(ids).float(), plain(ids).float()
        bound = 1e-4 if dtype == torch.float32 else 0.03
        assert (ours - theirs).norm() < bound * theirs.norm()
    assert calls
    assert set(calls) == {5}

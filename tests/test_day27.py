"""Day 27: what Day 22's kernel loads, the intensity of a decode, and a learner's own counts."""

import json
from pathlib import Path

import pytest
import torch

from nanoserve.bench import roofline
from nanoserve.bench.attention import BatchShape, draw_inputs
from nanoserve.bench.roofline import attention_flops, roofline_seconds
from nanoserve.course import day
from nanoserve.kernels import tlsim
from nanoserve.kernels.dispatch import paged_attention_dispatch, use_backend, use_kernel

RECORDED = Path(__file__).parents[1] / "notebooks/data/roofline_h200.json"


@pytest.mark.parametrize(("n_q", "n_kv"), [(9, 3), (4, 4), (8, 1)])
@pytest.mark.parametrize("kv_len", [1, 17, 40])
def test_the_kernel_of_day_22_loads_each_key_once_for_every_query_head(n_q, n_kv, kv_len):
    x = draw_inputs(BatchShape(1, kv_len, n_q, n_kv, 16), torch.float32)
    with tlsim.trace() as seen, use_backend("tlsim"), use_kernel("day22"):
        paged_attention_dispatch(x.queries(), x.k_pool, x.v_pool, x.sequences()[0], x.n_rep)
    must = roofline.attention_bytes([kv_len], n_kv, 16, torch.float32)
    loads = [a for a in seen.accesses if a.kind == "load" and a.name in ("k_ptr", "v_ptr")]
    assert sum(access.bytes for access in loads) == n_q // n_kv * must
    assert sum(seen.distinct_bytes("load", name) for name in ("k_ptr", "v_ptr")) == must


@pytest.mark.parametrize("kv_lens", [[1_000], [40, 7, 8_192]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_decodes_intensity_depends_on_the_group_and_the_dtype_alone(kv_lens, dtype):
    flops = attention_flops(kv_lens, 12, 64, [1] * len(kv_lens))
    assert flops / roofline.attention_bytes(kv_lens, 3, 64, dtype) == 2 * 4 / dtype.itemsize


def attention_bytes(kv_lens, n_kv, head_dim, dtype):
    tokens = 0
    for kv_len in kv_lens:
        tokens += kv_len
    return 2 * tokens * n_kv * head_dim * dtype.itemsize


def test_a_learners_count_replaces_the_benchmarks(capsys):
    today = day(27)
    today.check(attention_bytes)
    asked = BatchShape(3, 37, 6, 2, 16, ragged=True)
    with today.mine() as calls:
        (row,) = roofline.time_shape(asked, {"sdpa": roofline.batch_paths()["sdpa"]}, rounds=1)
    assert calls["attention_bytes"] == 1
    assert row.bytes == roofline.attention_bytes(asked.kv_lens, 2, 16, torch.float32)
    assert "Running with your attention_bytes" in capsys.readouterr().out


@pytest.mark.skipif(not RECORDED.exists(), reason="the run of an H200 is not in this copy")
def test_the_recorded_run_shows_what_the_day_says():
    run = json.loads(RECORDED.read_text(encoding="utf-8"))
    share = {
        (row["shape"], row["path"]): roofline_seconds(
            row["flops"], row["bytes"], run["flops"], run["read"]
        )
        / row["seconds"]
        for row in run["rows"]
        if row["seconds"]
    }
    for shape in roofline.DECODE:
        ours = max(share[shape.name, path] for path in ("day22", "gather"))
        assert ours < share[shape.name, "sdpa"] < 1.03
    batch, alone = (share[roofline.DECODE[i].name, "day22"] for i in (0, 2))
    assert batch > 4 * alone

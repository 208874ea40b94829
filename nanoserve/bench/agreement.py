"""One kernel source, several runtimes: how far each result differs from the oracle's.

python -m nanoserve.bench.agreement                     # tlsim, and compiled on a GPU
TRITON_INTERPRET=1 python -m nanoserve.bench.agreement  # tlsim and Triton's interpreter
python -m nanoserve.bench.agreement --record [FOLDER]   # also writes agreement_<device>.json
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from nanoserve.bench.machine import DATA, machine, save_run
from nanoserve.kernels.dispatch import (
    DTYPES,
    paged_attention_tlsim,
    paged_attention_triton,
    why_not_triton,
)
from nanoserve.kernels.reference import paged_attention_reference, tolerance

Runtime = Callable[..., torch.Tensor]  # arguments and result of paged_attention_reference
BLOCK = 16  # tokens in a block of draw's pools


@dataclass(frozen=True)
class AttentionShape:
    """The shape of one attention call: heads, head_dim, queries, and keys (kv_len)."""

    name: str
    n_q: int
    n_kv: int
    head_dim: int
    query_len: int
    kv_len: int


SHAPES = (
    AttentionShape("the very first token", 9, 3, 64, 1, 1),
    AttentionShape("decode", 9, 3, 64, 1, 200),
    AttentionShape("prefill", 9, 3, 64, 7, 7),
    AttentionShape("continuation", 9, 3, 64, 3, 90),
    AttentionShape("one KV head", 4, 1, 32, 3, 70),
    AttentionShape("a KV head each", 3, 3, 16, 2, 50),
    AttentionShape("head_dim 80", 6, 2, 80, 1, 150),
    AttentionShape("head_dim 128, 700 tokens", 8, 2, 128, 1, 700),
)


@dataclass(frozen=True)
class AgreementRow:
    """One runtime on one shape in one dtype.

    `largest` is the largest absolute difference from the oracle. `used` is the largest ratio of a
    difference to tolerance(dtype): a runtime agrees if `used` is at most 1.
    """

    shape: str
    dtype: str
    runtime: str
    largest: float
    used: float

    @property
    def agrees(self) -> bool:
        """Whether every element is within the tolerance."""
        return self.used <= 1  # False for NaN


def agreement(
    runtimes: Mapping[str, Runtime],
    shapes: Sequence[AttentionShape] = SHAPES,
    dtypes: Sequence[torch.dtype] = DTYPES,
    device: torch.device | str = "cpu",
) -> list[AgreementRow]:
    """Run every runtime on every shape and dtype, on `device`; compare with the oracle on the CPU.

    The inputs are those of `draw`: scattered blocks, NaN in all slots outside the mapping, and q in
    the memory layout of gqa_attention (positions before heads).
    """
    rows = []
    for dtype in dtypes:
        atol, rtol = tolerance(dtype)
        for shape in shapes:
            tensors, n_rep = draw(shape, dtype), shape.n_q // shape.n_kv
            oracle = paged_attention_reference(*tensors, n_rep).float()
            on_device = [x.to(device) for x in tensors]
            for name, runtime in runtimes.items():
                error = (runtime(*on_device, n_rep).cpu().float() - oracle).abs()
                used = float((error / (atol + rtol * oracle.abs())).max())
                kind = str(dtype).removeprefix("torch.")
                rows.append(AgreementRow(shape.name, kind, name, float(error.max()), used))
    return rows


def draw(shape: AttentionShape, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Random (q, k_pool, v_pool, slot_mapping), as paged_attention_reference takes them.

    Every call returns the same numbers for a shape.
    """
    random = torch.Generator().manual_seed(shape.kv_len)
    q = torch.randn(1, shape.query_len, shape.n_q, shape.head_dim, generator=random)
    blocks = -(-shape.kv_len // BLOCK)
    pools = torch.full((2, 2 * blocks * BLOCK, shape.n_kv, shape.head_dim), torch.nan)
    starts = torch.randperm(2 * blocks, generator=random)[:blocks] * BLOCK
    slots = (starts[:, None] + torch.arange(BLOCK)).flatten()[: shape.kv_len]
    pools[:, slots] = torch.randn(pools[:, slots].shape, generator=random)
    k_pool, v_pool = pools.to(dtype)
    return q.transpose(1, 2).to(dtype), k_pool, v_pool, slots


def runtimes_of(device: torch.device) -> dict[str, Runtime]:
    """The runtimes that can run the kernel on a device in this process: {name: function}."""
    runtimes = {"tlsim": paged_attention_tlsim}
    if why_not_triton(device) is None:
        if os.environ.get("TRITON_INTERPRET") == "1":
            runtimes["interpreter"] = _interpreted
        else:
            runtimes["compiled"] = paged_attention_triton
    return runtimes


def _interpreted(
    q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, *rest: object
) -> torch.Tensor:
    """paged_attention_triton under Triton's interpreter, which multiplies blocks of bfloat16
    wrongly: they are made float32 first, and the result is rounded."""
    wide = [x.float() if x.dtype == torch.bfloat16 else x for x in (q, k_pool, v_pool)]
    return paged_attention_triton(*wide, *rest).to(q.dtype)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the machine and all rows as JSON; with --record, also write them to a file.

    If a row does not agree, print the row to stderr, record nothing and exit with code 1.
    """
    parser = argparse.ArgumentParser(prog="python -m nanoserve.bench.agreement")
    parser.add_argument("--record", nargs="?", const=DATA, type=Path, metavar="FOLDER")
    folder = parser.parse_args(arguments).record
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    command = "python -m nanoserve.bench.agreement" + (" --record" if folder else "")
    if os.environ.get("TRITON_INTERPRET") == "1":
        command = f"TRITON_INTERPRET=1 {command}"
    rows = agreement(runtimes_of(device), device=device)
    run = machine(device) | {"command": command, "rows": [asdict(row) for row in rows]}
    print(json.dumps(run))
    wrong = [row for row in rows if not row.agrees]
    for row in wrong:
        where = f"{row.shape}, {row.dtype}"
        print(f"{row.runtime} differs by {row.largest:.1e}: {where}", file=sys.stderr)
    if wrong:
        sys.exit(1)
    if folder:
        try:
            save_run(run, "agreement", folder)
        except ValueError as error:
            parser.error(str(error))


if __name__ == "__main__":
    main()

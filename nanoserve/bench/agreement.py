"""One kernel, several engines: how far each lies from the oracle, on the same reads.

python -m nanoserve.bench.agreement                     # tlsim, and on a card Triton compiled
TRITON_INTERPRET=1 python -m nanoserve.bench.agreement  # Triton's interpreter, on any machine
python -m nanoserve.bench.agreement --record [FOLDER]   # keeps the run as agreement_<device>.json
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import torch

from nanoserve.kernels.dispatch import (
    DTYPES,
    paged_attention_tlsim,
    paged_attention_triton,
    why_not_triton,
)
from nanoserve.kernels.reference import paged_attention_reference, tolerance

Engine = Callable[..., torch.Tensor]  # called as paged_attention_reference is
BLOCK = 16


@dataclass(frozen=True)
class Read:
    """One layer's read: its heads, and how many of its kv_len positions ask."""

    name: str
    n_q: int
    n_kv: int
    head_dim: int
    query_len: int
    kv_len: int


READS = (
    Read("the very first token", 9, 3, 64, 1, 1),
    Read("decode", 9, 3, 64, 1, 200),
    Read("prefill", 9, 3, 64, 7, 7),
    Read("continuation", 9, 3, 64, 3, 90),
    Read("one KV head", 4, 1, 32, 3, 70),
    Read("a KV head each", 3, 3, 16, 2, 50),
    Read("head_dim 80", 6, 2, 80, 1, 150),
    Read("head_dim 128, 700 tokens", 8, 2, 128, 1, 700),
)


@dataclass(frozen=True)
class AgreementRow:
    """An engine on one read: the largest difference from the oracle, and the largest part of what
    tolerance(dtype) allows that any element uses. An engine agrees if that is at most 1."""

    read: str
    dtype: str
    engine: str
    largest: float
    used: float

    @property
    def agrees(self) -> bool:
        return self.used <= 1  # NaN does not


def agreement(
    engines: Mapping[str, Engine],
    reads: Sequence[Read] = READS,
    dtypes: Sequence[torch.dtype] = DTYPES,
    device: torch.device | str = "cpu",
) -> list[AgreementRow]:
    """Run every engine on every read, on the device, against one oracle, on the CPU.

    The keys lie in scattered blocks, every slot that is not the read's holds NaN, and q is the
    view that attention makes, its positions before its heads in memory.
    """
    rows = []
    for dtype in dtypes:
        atol, rtol = tolerance(dtype)
        for read in reads:
            tensors, n_rep = draw(read, dtype), read.n_q // read.n_kv
            oracle = paged_attention_reference(*tensors, n_rep).float()
            there = [x.to(device) for x in tensors]
            for name, engine in engines.items():
                off = (engine(*there, n_rep).cpu().float() - oracle).abs()
                used = float((off / (atol + rtol * oracle.abs())).max())
                kind = str(dtype).removeprefix("torch.")
                rows.append(AgreementRow(read.name, kind, name, float(off.max()), used))
    return rows


def draw(read: Read, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """(q, k_pool, v_pool, slot_mapping) of a read, at random and the same each time."""
    random = torch.Generator().manual_seed(read.kv_len)
    q = torch.randn(1, read.query_len, read.n_q, read.head_dim, generator=random).transpose(1, 2)
    blocks = -(-read.kv_len // BLOCK)
    pools = torch.full((2, 2 * blocks * BLOCK, read.n_kv, read.head_dim), torch.nan)
    starts = torch.randperm(2 * blocks, generator=random)[:blocks] * BLOCK
    slots = (starts[:, None] + torch.arange(BLOCK)).flatten()[: read.kv_len]
    pools[:, slots] = torch.randn(pools[:, slots].shape, generator=random)
    k_pool, v_pool = pools.to(dtype)
    return q.to(dtype), k_pool, v_pool, slots


def engines_of(device: torch.device) -> dict[str, Engine]:
    """The engines that can run the kernel on a device, in this process."""
    engines = {"tlsim": paged_attention_tlsim}
    if why_not_triton(device) is None:
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        engines["interpreter" if interpreted else "compiled"] = paged_attention_triton
    return engines


def machine(device: torch.device) -> dict[str, str | None]:
    """What a recorded run says about where it was made."""
    card = device.type == "cuda"
    driver, smi = None, shutil.which("nvidia-smi") if card else None
    if smi:
        ask = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(ask, capture_output=True, text=True).stdout.split("\n")[0].strip()
    return {
        "device": torch.cuda.get_device_name(device) if card else "CPU",
        "driver": driver or None,
        "cuda": torch.version.cuda if card else None,
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": getattr(sys.modules.get("triton"), "__version__", None),
        "date": date.today().isoformat(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the machine and the rows as JSON. If an engine does not agree, say which, record
    nothing and leave with 1."""
    parser = argparse.ArgumentParser(prog="python -m nanoserve.bench.agreement")
    data = Path(__file__).resolve().parents[2] / "notebooks/data"
    parser.add_argument("--record", nargs="?", const=data, type=Path, metavar="FOLDER")
    record = parser.parse_args(arguments).record
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    command = "python -m nanoserve.bench.agreement" + (" --record" if record else "")
    if os.environ.get("TRITON_INTERPRET") == "1":
        command = f"TRITON_INTERPRET=1 {command}"
    rows = agreement(engines_of(device), device=device)
    run = machine(device) | {"command": command, "rows": [asdict(row) for row in rows]}
    print(json.dumps(run))
    for row in rows:
        if not row.agrees:
            print(
                f"{row.engine} is {row.largest:.1e} off: {row.read}, {row.dtype}", file=sys.stderr
            )
    if not all(row.agrees for row in rows):
        sys.exit(1)
    if record:
        name = re.sub(r"\W+", "_", run["device"].lower().removeprefix("nvidia ")).strip("_")
        path = record / f"agreement_{name}.json"
        path.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

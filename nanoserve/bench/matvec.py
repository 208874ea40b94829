"""Products of one row with a weight in four bits, step by step, beside bfloat16's F.linear.

`nanoserve bench matvec`, or `python -m nanoserve.bench.matvec` where typer is missing.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanoserve.bench.correctness import WrongAnswer
from nanoserve.bench.machine import DATA, machine, save_run
from nanoserve.bench.roofline import _burst, _time_bursts, read_bandwidth
from nanoserve.bench.runner import ROTATED, device_clock
from nanoserve.bench.timing import Clock
from nanoserve.kernels import dequant_matvec as q4
from nanoserve.kernels.dispatch import select_backend
from nanoserve.kernels.paged_attention import tl, triton  # tlsim's, where Triton is missing

# [out, in] of the products of Llama-3.2-1B: q, k and v; o; gate and up; down; the head
SHAPES = ((3_072, 2_048), (2_048, 2_048), (16_384, 2_048), (2_048, 8_192), (128_256, 2_048))


def q4_bytes(num_out: int, width: int) -> int:
    """The bytes of a weight [num_out, width] in four bits, with its scales and minimums."""
    return num_out * width // 2 + 2 * 2 * num_out * (width // 32)


@triton.jit
def by_bytes_kernel(
    x_ptr,
    byte_ptr,
    scale_ptr,
    minimum_ptr,
    y_ptr,
    num_out,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BYTES: tl.constexpr,
):
    """The first step: a byte a lane; scale and minimum for each number. Programs: [out / OUT]."""
    out = (tl.program_id(0) * OUT + tl.arange(0, OUT)).to(tl.int64)
    acc = tl.zeros((OUT, BYTES), tl.float32)
    for start in range(0, IN // 2, BYTES):
        byte = start + tl.arange(0, BYTES)
        used = byte < IN // 2
        mask = (out < num_out)[:, None] & used[None, :]
        two = tl.load(byte_ptr + (out * (IN // 2))[:, None] + byte[None, :], mask, 0)
        at = (out * (IN // 32))[:, None] + (byte // 16)[None, :]
        scale = tl.load(scale_ptr + at, mask, 0.0).to(tl.float32)
        minimum = tl.load(minimum_ptr + at, mask, 0.0).to(tl.float32)
        x_even = tl.load(x_ptr + 2 * byte, used, 0.0).to(tl.float32)
        x_odd = tl.load(x_ptr + 2 * byte + 1, used, 0.0).to(tl.float32)
        acc += ((two & 15).to(tl.float32) * scale + minimum) * x_even[None, :]
        acc += ((two >> 4).to(tl.float32) * scale + minimum) * x_odd[None, :]
    tl.store(y_ptr + out, tl.sum(acc, axis=1), mask=out < num_out)


@triton.jit
def by_groups_kernel(
    x_ptr,
    word_ptr,
    scale_ptr,
    minimum_ptr,
    y_ptr,
    num_out,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """The second step: 16 bytes a thread; scale and minimum once for each group."""
    out = (tl.program_id(0) * OUT + tl.arange(0, OUT)).to(tl.int64)
    group = tl.arange(0, GROUPS)
    used = group < IN // 32
    mask = (out < num_out)[:, None] & used[None, :]
    word = group[:, None] * 4 + tl.arange(0, 4)[None, :]
    words_at = word_ptr + (out * (IN // 8))[:, None, None] + word[None]
    words = tl.load(words_at, mask[:, :, None], 0)  # [OUT, GROUPS, 4]
    at = (out * (IN // 32))[:, None] + group[None, :]
    scale = tl.load(scale_ptr + at, mask, 0.0).to(tl.float32)
    minimum = tl.load(minimum_ptr + at, mask, 0.0).to(tl.float32)
    dot = tl.zeros((OUT, GROUPS, 4), tl.float32)
    total = tl.zeros((GROUPS, 4), tl.float32)
    for k in tl.static_range(8):
        x_k = tl.load(x_ptr + word * 8 + k, used[:, None], 0.0).to(tl.float32)
        dot += ((words >> (4 * k)) & 15).to(tl.float32) * x_k[None]
        total += x_k
    sums = scale * tl.sum(dot, axis=2) + minimum * tl.sum(total, axis=1)[None, :]
    tl.store(y_ptr + out, tl.sum(sums, axis=1), mask=out < num_out)


class Product(NamedTuple):
    """The inputs of a product: a row, a weight in four bits, and the same weight dequantised."""

    x: torch.Tensor  # [1, in]
    numbers: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor
    weight: torch.Tensor  # [out, in]

    @property
    def q4(self) -> tuple[torch.Tensor, ...]:
        """The arguments of dequant_matvec."""
        return self[:4]


def draw_product(
    num_out: int, width: int, dtype: torch.dtype, device: torch.device, seed: int
) -> Product:
    """Random numbers, scales and minimums, for values near 0.1 on both sides of 0."""
    drawn = torch.Generator(device).manual_seed(seed)
    options = {"device": device, "generator": drawn}
    numbers = torch.randint(0, 256, (num_out, width // 2), dtype=torch.uint8, **options)
    scales = (0.01 + 0.01 * torch.rand(num_out, width // 32, **options)).bfloat16()
    minimums = -7.5 * scales
    x = torch.randn(1, width, **options).to(dtype)
    weight = q4.dequantize(numbers, scales, minimums).to(dtype)
    return Product(x, numbers, scales, minimums, weight)


def by_bytes(product: Product) -> torch.Tensor:
    """The product by the first step's kernel."""
    x, numbers, scales, minimums = product.q4
    y = torch.empty(1, len(numbers), dtype=x.dtype, device=x.device)
    sizes = {"IN": x.shape[1], "OUT": 1, "BYTES": 1_024, "num_warps": 4}
    by_bytes_kernel[(len(numbers),)](x, numbers, scales, minimums, y, len(numbers), **sizes)
    return y


def by_groups(product: Product) -> torch.Tensor:
    """The product by the second step's kernel."""
    x, numbers, scales, minimums = product.q4
    y = torch.empty(1, len(numbers), dtype=x.dtype, device=x.device)
    groups, words = triton.next_power_of_2(x.shape[1] // 32), numbers.view(torch.int32)
    sizes = {"IN": x.shape[1], "OUT": 4, "GROUPS": groups, "num_warps": max(1, groups // 32)}
    programs = triton.cdiv(len(numbers), 4)
    by_groups_kernel[(programs,)](x, words, scales, minimums, y, len(numbers), **sizes)
    return y


def by_bits(product: Product) -> torch.Tensor:
    """The product by the engine's kernel with a plain launch: a program for every four results."""
    groups = triton.next_power_of_2(product.x.shape[1] // 32)
    launch = q4.MatvecLaunch(4, max(1, groups // 32))
    return q4.launch_matvec(q4._compiled_kernels(), *product.q4, launch)


Path4 = Callable[[Product], torch.Tensor]


def matvec_paths(device: torch.device) -> dict[str, Path4]:
    """The variants: F.linear, the three steps where Triton compiles, and the engine's product."""
    compiled = device.type == "cuda" and select_backend(device) == "triton"
    steps = {"bytes": by_bytes, "groups": by_groups, "bits": by_bits} if compiled else {}
    linear = {"linear": lambda product: F.linear(product.x, product.weight)}
    return linear | steps | {"q4": lambda product: q4.dequant_matvec(*product.q4)}


def check_product(name: str, path: Path4, product: Product) -> None:
    """Raise WrongAnswer if a variant is not as near the float32 product as its dtype allows."""
    expected = product.x.float() @ product.weight.float().T
    apart = (path(product).float() - expected).norm() / expected.norm()
    if not apart < 1e-5 + torch.finfo(product.x.dtype).eps:
        raise WrongAnswer(f"{name} is {float(apart):.1e} from the dequantised product")


@dataclass(frozen=True)
class MatvecRow:
    """One variant on one shape: the median seconds of a product, and the bytes of its weight."""

    out: int
    width: int
    path: str
    bytes: int
    seconds: float


def time_product(
    num_out: int,
    width: int,
    paths: Mapping[str, Path4],
    dtype: torch.dtype,
    device: torch.device,
    rounds: int = 9,
    clock: Clock | None = None,
) -> list[MatvecRow]:
    """Check every variant; then time them in turns, by a CUDA graph on a GPU.

    The variants go through several weights, so that ROTATED bytes in four bits are read before a
    weight is read again: then it has left the cache.
    """
    small = q4_bytes(num_out, width)
    copies = max(2, -(-ROTATED // small)) if device.type == "cuda" else 2
    products = [draw_product(num_out, width, dtype, device, seed) for seed in range(copies)]
    for name, path in paths.items():
        check_product(name, path, products[0])
    bursts = {
        name: _burst([partial(path, product) for product in products], device, clock)
        for name, path in paths.items()
    }
    moved = dict.fromkeys(paths, small) | {"linear": num_out * width * dtype.itemsize}
    times = _time_bursts(bursts, rounds, clock)
    return [MatvecRow(num_out, width, name, moved[name], times[name]) for name in paths]


@dataclass(frozen=True)
class MatvecRun:
    """A whole run: the machine, its peak bandwidth, and the rows of all shapes and variants."""

    machine: dict[str, object]  # as bench.machine describes it
    command: str
    dtype: str
    read: float  # bytes per second, read_bandwidth
    rows: list[MatvecRow] = field(default_factory=list)

    def save(self, folder: Path = DATA) -> Path:
        """Write the run as matvec_<device>.json. Raises ValueError for a missing folder."""
        own = asdict(self)
        return save_run(own.pop("machine") | own, "matvec", folder)

    def line(self, row: MatvecRow) -> str:
        """A row as text: its time, its share of the peak bandwidth, its speed beside F.linear."""
        linear = next(r for r in self.rows if (r.out, r.width) == (row.out, row.width))
        return (
            f"{row.out:>7,} x {row.width:<5,} {row.path:<7} {row.seconds * 1e6:9.2f} µs, "
            f"{row.bytes / row.seconds / self.read:6.1%} of the bandwidth, "
            f"{linear.seconds / row.seconds:5.2f} of F.linear's speed"
        )


def measure(
    device: str | None = None,
    rounds: int = 9,
    command: str = "",
    show: Callable[[str], object] = lambda line: None,
) -> MatvecRun:
    """Time every variant on the products of Llama-3.2-1B; on a CPU, on smaller ones in float32.

    device: a GPU if there is one, else the CPU. `show` is called with each line of text. Raises
    ValueError for another device and for rounds below 1.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r} cannot be timed; supported: cpu, cuda")
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    gpu, dtype = where.type == "cuda", torch.float32
    if gpu:
        old = torch.cuda.get_device_capability(where) < (8, 0)
        dtype = torch.float16 if old else torch.bfloat16
    clock, paths = device_clock(where), matvec_paths(where)
    run = MatvecRun(
        machine(where), command, str(dtype).removeprefix("torch."), read_bandwidth(where)
    )
    show(f"{run.machine['device']} reads {run.read / 1e9:.1f} GB/s; {run.dtype}")
    for num_out, width in SHAPES:
        shape = (num_out, width) if gpu else (num_out // 8, width // 8)
        run.rows.extend(time_product(*shape, paths, dtype, where, rounds, clock))
        for row in run.rows[-len(paths) :]:
            show(run.line(row))
        if gpu:
            torch.cuda.empty_cache()  # the weights of the next shape need the memory
    return replace(run, read=max(run.read, read_bandwidth(where)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line of this file. It needs no third-party package but torch."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="nanoserve.bench.matvec",
        description="Time products with weights in four bits, beside F.linear.",
    )
    parser.add_argument("--device", help="cpu, cuda or cuda:1; default: a GPU if there is one")
    parser.add_argument("--rounds", type=int, default=9, help="runs of each variant")
    parser.add_argument("--record", action="store_true", help=f"write {DATA}/matvec_DEVICE.json")
    options = parser.parse_args(arguments)
    command = " ".join(["python -m nanoserve.bench.matvec", *arguments])
    try:
        run = measure(options.device, options.rounds, command, print)
        if options.record:
            print(f"recorded in {run.save(DATA).as_posix()}")
    except (ValueError, RuntimeError, AssertionError) as error:  # from torch, without a GPU
        parser.exit(2, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()

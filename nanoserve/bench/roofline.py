"""The roofline: the peak rates of a device, and how near each attention path comes to them.

`nanoserve bench roofline`, or `python -m nanoserve.bench.roofline` where typer is missing.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import cycle
from pathlib import Path

import torch

from nanoserve.bench.attention import (
    DECODE,
    PREFILL,
    RAGGED,
    BatchPath,
    BatchShape,
    batch_paths,
    check_path,
    draw_inputs,
)
from nanoserve.bench.correctness import WrongAnswer
from nanoserve.bench.machine import DATA, machine, save_run
from nanoserve.bench.runner import ROTATED, device_clock
from nanoserve.bench.timing import Clock, median_times
from nanoserve.kernels.paged_attention import tl, triton  # tlsim's, where Triton is missing

Run = Callable[[], object]


def attention_bytes(kv_lens: Sequence[int], n_kv: int, head_dim: int, dtype: torch.dtype) -> int:
    """The bytes of keys and values that attention over these sequences must read, in one layer.

    kv_lens: the tokens of each sequence. Each key and each value counts once, although n_rep query
    heads use it. Queries and outputs are small and do not count.
    """
    return 2 * sum(kv_lens) * n_kv * head_dim * dtype.itemsize


def attention_flops(
    kv_lens: Sequence[int], n_q: int, head_dim: int, query_lens: Sequence[int]
) -> int:
    """The additions and multiplications of causal attention over these sequences, in one layer.

    A query head and a visible token take 2 * head_dim operations for the score and 2 * head_dim for
    the weighted sum. Query i of a sequence sees its first kv_len - query_len + i + 1 tokens.
    """
    pairs = 0
    for kv_len, query_len in zip(kv_lens, query_lens, strict=True):
        pairs += query_len * (kv_len - query_len) + query_len * (query_len + 1) // 2
    return 4 * n_q * head_dim * pairs


def roofline_seconds(flops: float, bytes_read: float, peak_flops: float, bandwidth: float) -> float:
    """The shortest possible time of a computation on a device (Williams et al. 2009).

    flops and bytes_read: what the computation must do; peak_flops and bandwidth: what the device
    does per second at most. Arithmetic and reading run at the same time, so the longer time counts.
    """
    return max(flops / peak_flops, bytes_read / bandwidth)


@triton.jit
def read_kernel(x_ptr, sum_ptr, PIECE: tl.constexpr, BLOCK: tl.constexpr):
    """Read x [programs * PIECE] and store the sum of each program's piece: almost only reads."""
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, PIECE, BLOCK):
        total += tl.load(x_ptr + program * PIECE + start + tl.arange(0, BLOCK))
    tl.store(sum_ptr + program, tl.sum(total, axis=0))


def read_bandwidth(
    device: str | torch.device = "cpu",
    size: int | None = None,
    rounds: int = 5,
    clock: Clock | None = None,
) -> float:
    """The peak rate at which a device reads its memory, in bytes per second.

    Reads `size` bytes, by default 4 GiB on a GPU and 512 MiB elsewhere: far more than a cache
    holds. On a GPU read_kernel reads, elsewhere the fastest of three sums of PyTorch. The time is
    the median of `rounds`.
    """
    device, size, clock = _defaults(device, size, clock)
    if device.type == "cuda" and type(read_kernel).__name__ == "JITFunction":
        return _kernel_bandwidth(device, size, rounds, clock)
    x = torch.ones(size // 4, dtype=torch.float32, device=device)
    runs: dict[str, Run] = {"sum": x.sum, "amax": x.amax, "dot": lambda: torch.dot(x, x)}
    times = _times({name: [run] for name, run in runs.items()}, device, rounds, clock)
    return 4 * len(x) / min(times.values())


def _kernel_bandwidth(device: torch.device, size: int, rounds: int, clock: Clock) -> float:
    programs, block = 65_536, 2_048
    piece = -(-size // 4 // programs // block) * block  # floats that one program reads
    x = torch.ones(programs * piece, dtype=torch.float32, device=device)
    sums = torch.empty(programs, dtype=torch.float32, device=device)

    def read() -> None:
        read_kernel[(programs,)](x, sums, PIECE=piece, BLOCK=block, num_warps=8)

    seconds = _times({"kernel": [read]}, device, rounds, clock)["kernel"]
    if not bool((sums == piece).all()):
        raise WrongAnswer("read_kernel returns wrong sums")
    return 4 * len(x) / seconds


def copy_bandwidth(
    device: str | torch.device = "cpu",
    size: int | None = None,
    rounds: int = 5,
    clock: Clock | None = None,
) -> float:
    """The rate of a large copy, in bytes per second: a byte that is copied is read and written.

    Arguments as for read_bandwidth: `size` bytes are read, and as many are written.
    """
    device, size, clock = _defaults(device, size, clock)
    x = torch.ones(size // 4, dtype=torch.float32, device=device)
    y = torch.empty_like(x)
    times = _times({"copy": [lambda: y.copy_(x)]}, device, rounds, clock)
    return 8 * len(x) / times["copy"]


def peak_flops(
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    size: int | None = None,
    rounds: int = 5,
    clock: Clock | None = None,
) -> float:
    """The rate of arithmetic in a product of two size x size matrices, in operations per second."""
    device, _, clock = _defaults(device, None, clock)
    size = size or (8_192 if device.type == "cuda" else 1_024)
    a, b = torch.ones(2, size, size, dtype=dtype, device=device)
    times = _times({"product": [lambda: a @ b]}, device, rounds, clock)
    return 2 * size**3 / times["product"]


def _defaults(
    device: str | torch.device, size: int | None, clock: Clock | None
) -> tuple[torch.device, int, Clock]:
    device = torch.device(device)
    size = size or (1 << 32 if device.type == "cuda" else 1 << 29)
    return device, size, clock or device_clock(device)


BURST = 0.02  # seconds of a timed burst on a GPU: the start of a burst takes a thousandth of it
GRAPH = 0.004  # seconds of the calls in one CUDA graph


def _times(
    calls: Mapping[str, Sequence[Run]], device: torch.device, rounds: int, clock: Clock
) -> dict[str, float]:
    """Median seconds of one call of each variant. The variants take turns, and each variant goes
    through its calls in turn."""
    bursts = {name: _burst(own, device, clock) for name, own in calls.items()}
    return _time_bursts(bursts, rounds, clock)


def _time_bursts(
    bursts: Mapping[str, tuple[Run, int]], rounds: int, clock: Clock
) -> dict[str, float]:
    runs = {name: run for name, (run, _) in bursts.items()}
    times = median_times(runs, rounds, warmup=1, clock=clock)
    return {name: took / bursts[name][1] for name, took in times.items()}


def _burst(calls: Sequence[Run], device: torch.device, clock: Clock) -> tuple[Run, int]:
    """A function that runs some of the calls, and how many it runs.

    On a GPU, the calls are captured in a CUDA graph, and a burst replays the graph: the host's work
    is not timed. Slow calls are captured two at a time: what such a call finds in the L2 cache is a
    small part of its bytes or of its time. On a CPU, a burst is the next call.
    """
    if device.type != "cuda":
        turn = cycle(calls)
        return lambda: next(turn)(), 1

    def seconds(replay: Run) -> float:
        replay()
        begin = clock()
        replay()
        return max(clock() - begin, 1e-6)

    calls = calls[:2] if seconds(calls[0]) > BURST else calls
    replay = _captured(calls, device)
    passes = -(-GRAPH // seconds(replay))
    if passes > 1:
        calls = list(calls) * int(min(passes, 1 + 2_000 // len(calls)))
        replay = _captured(calls, device)
    replays = int(-(-BURST // seconds(replay)))

    def run() -> None:
        for _ in range(replays):
            replay()

    return run, replays * len(calls)


def _captured(calls: Sequence[Run], device: torch.device) -> Run:
    """The replay of a CUDA graph of the calls, one after another."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        calls[0]()  # compiles: a capture must not
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


@dataclass(frozen=True)
class RooflineRow:
    """One code path on one shape: the median seconds of one layer's attention.

    `bytes` and `flops` are what any code path must read and compute. A path that is not right, or
    cannot run, has no time, and `note` says why.
    """

    shape: str  # BatchShape.name
    kind: str  # BatchShape.kind
    path: str
    bytes: int
    flops: int
    seconds: float | None
    note: str = ""


def time_shape(
    shape: BatchShape,
    paths: Mapping[str, BatchPath],
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    rounds: int = 9,
    clock: Clock | None = None,
) -> list[RooflineRow]:
    """Check every code path on a shape; then time those that are right, in turns.

    The paths go through several copies of the inputs, so that ROTATED bytes of other keys and
    values are read before a copy is read again: then it has left the cache. A prefill has two
    copies, because its time is not that of reading.
    """
    device, _, clock = _defaults(device, None, clock)
    lens, queries = shape.kv_lens, [shape.query_len] * shape.num_seqs
    moved = attention_bytes(lens, shape.n_kv, shape.head_dim, dtype)
    flops = attention_flops(lens, shape.n_q, shape.head_dim, queries)
    copies = 2 if shape.kind == "prefill" else max(2, -(-ROTATED // moved))
    inputs = [draw_inputs(shape, dtype, device, seed) for seed in range(copies)]
    bursts, notes = {}, {}
    for name, path in paths.items():
        try:
            check_path(name, path, inputs[0])
            bursts[name] = _burst([partial(path, x) for x in inputs], device, clock)
        except WrongAnswer as error:
            notes[name] = str(error)
        except Exception as error:  # of any library: the other paths are timed all the same
            notes[name] = f"cannot run: {type(error).__name__}: {error}".splitlines()[0]
    times = _time_bursts(bursts, rounds, clock)
    return [
        RooflineRow(
            shape.name, shape.kind, name, moved, flops, times.get(name), notes.get(name, "")
        )
        for name in paths
    ]


@dataclass(frozen=True)
class RooflineRun:
    """A whole run: the machine, its peak rates, and the rows of all shapes and code paths."""

    machine: dict[str, object]  # as bench.machine describes it
    command: str
    dtype: str
    read: float  # bytes per second, read_bandwidth
    copy: float  # bytes per second, copy_bandwidth
    flops: float  # operations per second, peak_flops in the dtype
    rows: list[RooflineRow] = field(default_factory=list)

    def save(self, folder: Path = DATA) -> Path:
        """Write the run as roofline_<device>.json. Raises ValueError for a missing folder."""
        own = asdict(self)
        return save_run(own.pop("machine") | own, "roofline", folder)

    @property
    def whole(self) -> bool:
        """Whether every code path of this repository has a time on every shape."""
        return all(row.seconds or row.path.startswith("flash") for row in self.rows)

    def head(self) -> Iterator[str]:
        """The machine and its peak rates as text."""
        about = self.machine
        versions = ", ".join(f"{name} {found}" for name, found in about["versions"].items())
        driver = f"driver {about['driver']}" if about["cuda"] else f"{about['threads']} threads"
        yield f"{about['device']}, {about['platform']}, {driver}, {versions}, {about['date']}"
        yield (
            f"reads {self.read / 1e9:.1f} GB/s, copies {self.copy / 1e9:.1f} GB/s, multiplies "
            f"{self.flops / 1e12:.2f} TFLOP/s in {self.dtype}"
        )

    def line(self, row: RooflineRow) -> str:
        """A row as text: its time, its rate, and the share of the peak rate that limits it.

        A row of a prefill also has its speed as a share of SDPA's.
        """
        start = f"{row.shape:<30} {row.path:<9}"
        if row.seconds is None:
            return f"{start} {row.note}"
        least = roofline_seconds(row.flops, row.bytes, self.flops, self.read)
        rate = f"{row.bytes / row.seconds / 1e9:8.1f} GB/s"
        if row.kind == "prefill":
            rate = f"{row.flops / row.seconds / 1e12:8.2f} TFLOP/s"
        text = f"{start} {row.seconds * 1e6:11.1f} µs {rate}, {least / row.seconds:6.1%} of peak"
        key = (row.shape, "sdpa")
        sdpa = {(other.shape, other.path): other.seconds for other in self.rows}.get(key)
        if row.kind == "prefill" and sdpa:
            text += f", {sdpa / row.seconds:.2f} of sdpa's speed"
        return text


def measure(
    device: str | None = None,
    dtype: torch.dtype | None = None,
    rounds: int = 9,
    paths: Sequence[str] = (),
    command: str = "",
    show: Callable[[str], object] = lambda line: None,
) -> RooflineRun:
    """Measure a device's peak rates and time every installed code path on all shapes.

    device: a GPU if there is one, else the CPU. dtype: on a CPU float32, on a GPU bfloat16, or
    float16 if its capability is below 8. A CPU gets smaller shapes of the same form. paths: names
    of batch_paths, by default all. `show` is called with each line of text. Raises ValueError for
    another device or path, and for rounds below 1.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r} cannot be timed; supported: cpu, cuda")
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    installed = batch_paths()
    if unknown := sorted(set(paths) - set(installed)):
        raise ValueError(f"there is no path {unknown[0]!r} here: only {', '.join(installed)}")
    chosen = {name: path for name, path in installed.items() if not paths or name in paths}
    gpu = where.type == "cuda"
    if dtype is None and gpu:
        old = torch.cuda.get_device_capability(where) < (8, 0)
        dtype = torch.float16 if old else torch.bfloat16
    dtype = dtype or torch.float32
    shapes = [shape if gpu else shape.smaller() for shape in (*DECODE, *RAGGED, *PREFILL)]
    run = RooflineRun(
        machine=machine(where),
        command=command,
        dtype=str(dtype).removeprefix("torch."),
        read=read_bandwidth(where),
        copy=copy_bandwidth(where),
        flops=peak_flops(where, dtype),
    )
    for line in run.head():
        show(line)
    for shape in shapes:
        try:
            rows = time_shape(shape, chosen, dtype, where, rounds)
        except torch.OutOfMemoryError:
            show(f"{shape.name:<30} does not fit in the memory of this GPU")
            rows = []
        run.rows.extend(rows)
        for row in rows:
            show(run.line(row))
        if gpu:
            torch.cuda.empty_cache()  # the inputs of the next shape need the memory
    return replace(run, read=max(run.read, read_bandwidth(where)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line of this file. It needs no third-party package but torch.

    If a code path has no time, exit with code 1 after all lines are printed.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="nanoserve.bench.roofline",
        description="Time attention on all shapes, as a share of the peak bandwidth.",
    )
    parser.add_argument("--device", help="cpu, cuda or cuda:1; default: a GPU if there is one")
    parser.add_argument("--rounds", type=int, default=9, help="runs of each code path")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--path", action="append", help="only this code path; repeatable")
    parser.add_argument("--record", action="store_true", help=f"write {DATA}/roofline_DEVICE.json")
    options = parser.parse_args(arguments)
    command = " ".join(["python -m nanoserve.bench.roofline", *arguments])
    dtype = getattr(torch, options.dtype) if options.dtype else None
    try:
        run = measure(options.device, dtype, options.rounds, options.path or (), command, print)
        if options.record:
            print(f"recorded in {run.save(DATA).as_posix()}")
    except (ValueError, RuntimeError, AssertionError) as error:  # from torch, without a GPU
        parser.exit(2, f"{parser.prog}: {error}\n")
    if not run.whole:
        sys.exit(1)


if __name__ == "__main__":
    main()

"""The command line: `nanoserve fetch | generate | chat | bench | course | doctor`."""

import os
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="nanoserve: an LLM inference engine that a course builds day by day.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer(help="Measure the engine; correctness is checked before any time is shown.")
course_app = typer.Typer(help="Your own copies of the notebooks, in work/.", no_args_is_help=True)
app.add_typer(bench_app, name="bench", no_args_is_help=True)
app.add_typer(course_app, name="course")


class DType(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


Model = Annotated[
    str, typer.Option(help="'smollm2', a Hugging Face folder, a .gguf file, or a hub id.")
]
DTypeOption = Annotated[DType, typer.Option(help="What the weights are held in.")]
Device = Annotated[str, typer.Option(help="Where it runs: cpu, cuda, cuda:1, mps.")]
MaxTokens = Annotated[int, typer.Option(help="Stop after so many tokens.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy; 1 draws from the model's own odds.")]
TopP = Annotated[float, typer.Option(help="Draw from the likeliest tokens that hold this share.")]
Seed = Annotated[int | None, typer.Option(help="Makes a draw repeatable.")]


@app.command()
def fetch() -> None:
    """Bring the model SmolLM2-135M-Instruct (93 MB) and convert it, unless it is there."""
    from nanoserve.fetch import fetch as bring

    typer.echo(bring())


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    model: Model = "smollm2",
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    dtype: DTypeOption = DType.float32,
    device: Device = "cpu",
) -> None:
    """Continue a text, as it is (no chat template)."""
    llm, params = _start(model, dtype, device, max_tokens, temperature, top_p, seed)
    stream = llm.stream(prompt, params)  # refuses a bad prompt before anything is printed
    typer.echo(prompt, nl=False)
    _show(stream)


@app.command()
def chat(
    message: Annotated[str | None, typer.Argument(help="One question; without it, a talk.")] = None,
    model: Model = "smollm2",
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    dtype: DTypeOption = DType.float32,
    device: Device = "cpu",
) -> None:
    """Talk to the model; an empty line or Ctrl-D ends it, Ctrl-C stops an answer."""
    llm, params = _start(model, dtype, device, max_tokens, temperature, top_p, seed)
    if message is not None:
        if not message.strip():
            raise ValueError("the prompt is empty")
        stream = llm.stream(llm.chat_ids([{"role": "user", "content": message}]), params)
        typer.secho(f"> {message}", fg=typer.colors.BRIGHT_BLACK, err=True)
        _show(stream)
        return
    messages: list[dict[str, str]] = []
    while question := _ask():
        messages.append({"role": "user", "content": question})
        stream = llm.stream(llm.chat_ids(messages), params)
        try:
            _show(stream)
        except KeyboardInterrupt:  # stops the answer, not the talk
            typer.echo("\n[stopped]")
        messages.append({"role": "assistant", "content": stream.text})


def _ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        typer.echo()
        return ""


def _start(
    model: str,
    dtype: DType,
    device: str,
    max_tokens: int,
    temperature: float,
    top_p: float,
    seed: int | None,
):
    import torch

    from nanoserve import LLM, SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    return LLM(model, getattr(torch, dtype.value), _device(device)), params


def _device(name: str):
    """The torch device of a name; ValueError where there is none such on this machine."""
    import torch

    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None
    return device


def _show(stream) -> None:
    """Print pieces as they come, then how fast they came (on stderr, so that pipes stay clean)."""
    begin, first = time.perf_counter(), None
    for piece in stream:
        if first is None:
            first = time.perf_counter()
        typer.echo(piece, nl=False)
        sys.stdout.flush()
    typer.echo()
    end = time.perf_counter()
    n = len(stream.token_ids)
    line = f"[{n} tokens in {end - begin:.1f} s, {n / (end - begin):.1f} tokens/s"
    if first is not None:
        line += f", the first after {first - begin:.2f} s"
    typer.secho(f"{line}]", fg=typer.colors.BRIGHT_BLACK, err=True)


@app.command()
def doctor() -> None:
    """Say what this machine has and what would run; quote it in a bug report."""
    for key, value in report():
        typer.echo(f"{key:<16} {value}")


def report() -> list[tuple[str, str]]:
    """What `nanoserve doctor` prints, line by line; paths are shortened to the home folder."""
    from nanoserve import fetch
    from nanoserve.bench.machine import machine
    from nanoserve.threads import threads_here

    packages = ("nanoserve", "torch", "triton", "transformers", "tokenizers", "gguf", "numpy")
    about = machine(_best_device().split(":")[0], packages)
    folder = str(fetch.model_folder()).replace(str(Path.home()), "~")
    whole = "whole" if fetch.is_whole() else "not there or not whole: run `nanoserve fetch`"
    return [
        ("platform", about["platform"]),
        *((name, found or "not installed") for name, found in about["versions"].items()),
        ("device", _best_device()),
        ("driver", about["driver"] or "none"),
        ("threads", threads_here()),
        ("attention runs", _attention()),
        ("model", f"{folder} ({whole})"),
    ]


def _best_device() -> str:
    import torch

    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        return f"cuda: {torch.cuda.get_device_name()}, capability {major}.{minor}"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _attention() -> str:
    """Which backend would run on the best device, and what keeps Triton from it."""
    import warnings

    import torch

    from nanoserve.kernels.dispatch import select_backend, why_not_triton

    device = torch.device(_best_device().split(":")[0])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it would say stands in the line below
            backend = select_backend(device)
    except ValueError as error:
        return f"not at all: {error}"
    if name := os.environ.get("NANOSERVE_BACKEND"):
        return f"under {backend} on {device}: NANOSERVE_BACKEND={name}"
    reason = None if backend == "triton" else why_not_triton(device)
    return f"under {backend} on {device}" + (f", not triton: {reason}" if reason else "")


@bench_app.command("decode")
def bench_decode(
    model: Model = "smollm2",
    context: Annotated[
        list[int] | None, typer.Option(help="Tokens of prompt; repeatable.", min=1)
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens generated in each run.", min=2)] = 8,
    rounds: Annotated[int, typer.Option(help="Runs of each path; they take turns.", min=1)] = 3,
    cache: Annotated[
        bool, typer.Option(help="With the KV cache, or recomputing everything.")
    ] = True,
    dtype: DTypeOption = DType.float32,
) -> None:
    """Time our loop beside transformers' generate: same weights, same tokens, one run."""
    import torch

    from nanoserve import load_model, load_tokenizer
    from nanoserve.bench import decode, timing
    from nanoserve.oracle import load_oracle

    kind = getattr(torch, dtype.value)
    engine, oracle = load_model(model, kind), load_oracle(model, kind)
    sentence = load_tokenizer(model).encode("One day at the harbour, the gulls and the boats. ")
    lengths = context or (64, 256, 1024)
    if max(lengths) + tokens > (room := engine.config.context):
        raise ValueError(f"{max(lengths)} + {tokens} tokens: the model's context holds {room}")
    prompts = [(sentence * (1 + n // len(sentence)))[:n] for n in lengths]
    paths = {
        "nanoserve": decode.engine_path(engine, cache),
        "transformers": decode.oracle_path(oracle, cache),
    }
    if cache and dtype is DType.float32:  # in 16 bits a kernel's tokens may be others
        paths["paged"] = decode.paged_path(engine)
    rows = decode.decode_benchmark(paths, "transformers", prompts, tokens, rounds)
    bandwidth = timing.read_bandwidth()
    typer.echo(
        f"cache {'on' if cache else 'off'}, {dtype.value}, {torch.get_num_threads()} threads, "
        f"peak bandwidth {bandwidth / 1e9:.1f} GB/s"
    )
    for first in range(0, len(rows), len(paths)):
        group = {row.path: row for row in rows[first : first + len(paths)]}
        theirs = group["transformers"]
        moved = decode.bytes_per_token(engine.config, theirs.context, kind)
        for row in group.values():
            line = (
                f"{row.context:>6} tokens  {row.path:<12}  first {row.ttft * 1e3:8.1f} ms  "
                f"then {row.tpot * 1e3:8.2f} ms a token"
            )
            rate = moved / row.tpot
            typer.echo(
                line
                + (f"  {rate / 1e9:5.1f} GB/s, {rate / bandwidth:4.0%} of peak" if cache else "")
            )
        for name, ours in group.items():
            if ours is not theirs:
                typer.echo(
                    f"{'':>14}{name}, speed over transformers: first token "
                    f"{theirs.ttft / ours.ttft:.2f}, decode {theirs.tpot / ours.tpot:.2f}"
                )


@bench_app.command("attention")
def bench_attention(
    kv_len: Annotated[
        list[int] | None, typer.Option(help="Tokens in the cache; repeatable.", min=1)
    ] = None,
    rounds: Annotated[
        int, typer.Option(help="Runs of each code path; they take turns.", min=1)
    ] = 20,
    dtype: Annotated[
        DType | None, typer.Option(help="float32; with --cache on a GPU, float32 and float16.")
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the rows to this file too.")] = None,
    cache: Annotated[
        bool, typer.Option("--cache", help="Time paged attention as the engine calls it.")
    ] = False,
    device: Device = "cpu",
    record: Annotated[
        bool,
        typer.Option("--record", help="With --cache: write notebooks/data/attention_DEVICE.json."),
    ] = False,
) -> None:
    """Time one layer's attention over a paged cache: gather K and V first, or attend in place.

    With --cache: the engine's own code path beside gather and reference, on a CPU or a GPU.
    """
    if cache:
        if csv is not None:
            raise ValueError("--cache writes no --csv: take --record")
        _bench_cache(device, kv_len, dtype, rounds, record)
        return
    if record or device != "cpu":
        raise ValueError("--device and --record go with --cache")
    import torch

    from nanoserve.bench import attention, timing
    from nanoserve.config import load_config
    from nanoserve.fetch import resolve

    kind = dtype or DType.float32
    bandwidth = timing.read_bandwidth()
    lines = ["model,path,kv_len,seconds,bytes"]
    typer.echo(
        f"{kind.value}, {torch.get_num_threads()} threads, "
        f"peak bandwidth {bandwidth / 1e9:.1f} GB/s"
    )
    shapes = {"SmolLM2-135M": load_config(resolve("smollm2")), "Llama-3.2-1B": attention.LLAMA_1B}
    for name, config in shapes.items():
        rows = attention.attention_benchmark(
            config, kv_len or (16, 64, 256, 1024, 4096), getattr(torch, kind.value), rounds
        )
        for row in rows:
            rate = row.bytes_per_second
            typer.echo(
                f"{name:<13} {row.kv_len:>6} tokens  {row.path:<7} {row.seconds * 1e6:9.1f} µs  "
                f"{rate / 1e9:6.2f} GB/s, {rate / bandwidth:4.0%} of peak"
            )
            lines.append(f"{name},{row.path},{row.kv_len},{row.seconds:.9f},{row.bytes}")
    if csv is not None:
        csv.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _bench_cache(
    device: str, kv_len: list[int] | None, dtype: DType | None, rounds: int, record: bool
) -> None:
    import torch

    from nanoserve.bench import runner

    _device(device)
    dtypes = [getattr(torch, dtype.value)] if dtype else ()
    command = " ".join(["nanoserve", *sys.argv[1:]])
    run = runner.measure(device, kv_len or runner.KV_LENS, dtypes, rounds, command)
    for line in run.lines():
        typer.echo(line)
    if record:
        typer.echo(f"recorded in {run.save(runner.DATA).as_posix()}")


@course_app.command()
def start(
    day: Annotated[
        int | None, typer.Argument(help="Only this day; else all that are missing.")
    ] = None,
) -> None:
    """Copy the days that are not in work/ yet; a file that is there is never touched."""
    from nanoserve.course import store

    for path in store.start(day):
        typer.echo(f"copied {path.name}")
    typer.echo(f"your notebooks are in {store.work_dir()}")


@course_app.command()
def reset(day: Annotated[int, typer.Argument(help="The day to begin afresh.")]) -> None:
    """Take a fresh copy of a day; your old one stays beside it."""
    from nanoserve.course import store

    fresh, kept = store.reset(day)
    typer.echo(
        f"{fresh.name} is fresh; yours is now {kept.name}" if kept else f"copied {fresh.name}"
    )


@course_app.command()
def status() -> None:
    """Show which exercises you have passed, day by day."""
    from nanoserve.course import store

    for row in store.status():
        typer.echo(row)


def main() -> None:
    """Run the command line: a bad value is one line and exit code 2, Ctrl-C leaves with 130."""
    try:
        code = app(standalone_mode=False)
    except typer.Abort:  # Ctrl-C in older typers; newer ones return 130
        code = 130
    except Exception as error:
        usage = getattr(error, "format_message", None)  # click's, which newer typers carry inside
        told = (ValueError, RuntimeError, OSError, ModuleNotFoundError)
        if usage is None and not isinstance(error, told):
            raise
        if message := usage() if usage else str(error):  # none where the help was shown
            typer.echo(f"nanoserve: {message}", err=True)
        code = 2
    if code == 130:
        typer.echo()
    sys.exit(code)


if __name__ == "__main__":
    main()

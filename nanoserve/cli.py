"""The command line: `nanoserve fetch | generate | chat | bench | course | doctor`."""

import os
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from nanoserve import LLM, SamplingParams
    from nanoserve.generate import Stream

app = typer.Typer(
    help="nanoserve: an LLM inference engine that a course builds day by day.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer(help="Measure the engine, after a correctness check.")
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
DTypeOption = Annotated[DType, typer.Option(help="The dtype of weights and activations.")]
Device = Annotated[str, typer.Option(help="The device: cpu, cuda, cuda:1, mps.")]
BenchDevice = Annotated[
    str | None, typer.Option(help="The device: cpu, cuda, cuda:1; default: a GPU if there is one.")
]
PathOption = Annotated[
    list[str] | None, typer.Option(help="Only this code path, such as split_kv; repeatable.")
]
MaxTokens = Annotated[int, typer.Option(help="The maximum number of generated tokens.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy; 1 samples as the model predicts.")]
TopP = Annotated[float, typer.Option(help="Keep the fewest tokens whose probabilities reach this.")]
Seed = Annotated[int | None, typer.Option(help="The same seed repeats the same random numbers.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from nanoserve import __version__

        typer.echo(f"nanoserve {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """The options of `nanoserve` itself."""


@app.command()
def fetch() -> None:
    """Download SmolLM2-135M-Instruct (93 MB) and convert it, unless this is done already."""
    from nanoserve.fetch import fetch as download

    typer.echo(download())


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
    """Continue a text, without a chat template."""
    llm, params = _start(model, dtype, device, max_tokens, temperature, top_p, seed)
    stream = llm.stream(prompt, params)  # raises for a wrong prompt before anything is printed
    typer.echo(prompt, nl=False)
    _show(stream)


@app.command()
def chat(
    message: Annotated[
        str | None, typer.Argument(help="One question. Without it, type questions.")
    ] = None,
    model: Model = "smollm2",
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    dtype: DTypeOption = DType.float32,
    device: Device = "cpu",
    system: Annotated[str | None, typer.Option(help="The system prompt.")] = None,
) -> None:
    """Chat with the model. An empty line or Ctrl-D ends the chat, Ctrl-C stops an answer."""
    llm, params = _start(model, dtype, device, max_tokens, temperature, top_p, seed)
    first = [] if system is None else [{"role": "system", "content": system}]
    if message is not None:
        if not message.strip():
            raise ValueError("the prompt is empty")
        stream = llm.stream(llm.chat_ids([*first, {"role": "user", "content": message}]), params)
        _aside(f"> {message}")
        _show(stream)
        return
    turns: list[dict[str, str]] = []  # user and assistant by turns
    while question := _ask():
        asked = [*turns, {"role": "user", "content": question}]
        try:
            ids, dropped = _fit(llm, first, asked, max_tokens)
            stream = llm.stream(ids, params)
        except ValueError as error:  # this question is refused; the conversation goes on
            _aside(f"nanoserve: {error}")
            continue
        if dropped:
            _aside(
                f"[the conversation exceeds the context of {llm.model.config.context} tokens: "
                f"dropped the oldest {dropped} messages]"
            )
        try:
            _show(stream)
        except KeyboardInterrupt:  # stops the answer, not the chat
            typer.echo("\n[stopped]")
        stream.close()
        turns = [*asked[dropped:], {"role": "assistant", "content": stream.text}]


def _ask() -> str:
    """The next question; "" at the end of the input."""
    try:
        return input("> ").strip()
    except EOFError:
        typer.echo()
        return ""


def _fit(
    llm: "LLM", first: list[dict[str, str]], turns: list[dict[str, str]], max_tokens: int
) -> tuple[list[int], int]:
    """The token ids of a conversation without its oldest turns, and the number of messages dropped.

    Drops turns until a quarter of the context (or max_tokens, if fewer) is free for the answer. The
    messages in `first` and the last question always stay.
    """
    context = llm.model.config.context
    dropped, ids = 0, llm.chat_ids([*first, *turns])
    while len(ids) + min(max_tokens, context // 4) > context and dropped + 1 < len(turns):
        dropped += 2  # a question and its answer
        ids = llm.chat_ids([*first, *turns[dropped:]])
    return ids, dropped


def _start(
    model: str,
    dtype: DType,
    device: str,
    max_tokens: int,
    temperature: float,
    top_p: float,
    seed: int | None,
) -> "tuple[LLM, SamplingParams]":
    from nanoserve import LLM, SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    return LLM(model, dtype.value, device), params


def _show(stream: "Stream") -> None:
    """Print the pieces of a stream, then its speed (on stderr, so that a pipe gets only text)."""
    begin, first = time.perf_counter(), None
    for piece in stream:
        if first is None:
            first = time.perf_counter()
        typer.echo(piece, nl=False)
    typer.echo()
    end = time.perf_counter()
    n = len(stream.token_ids)
    line = f"[{n} tokens in {end - begin:.1f} s, {n / (end - begin):.1f} tokens/s"
    if first is not None:
        line += f", the first after {first - begin:.2f} s"
    _aside(f"{line}]")


def _aside(line: str) -> None:
    """Print a line about the run on stderr: grey on a terminal, unless NO_COLOR or TERM=dumb."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        typer.echo(line, err=True)
    else:
        typer.secho(line, fg=typer.colors.BRIGHT_BLACK, err=True)


@app.command()
def doctor() -> None:
    """Print this machine's software, device, backend and model, for a bug report."""
    for key, value in report():
        typer.echo(f"{key:<16} {value}")


def report() -> list[tuple[str, str]]:
    """The lines of `nanoserve doctor`; "~" replaces the home folder."""
    from nanoserve import fetch
    from nanoserve.bench.machine import machine
    from nanoserve.threads import threads_here

    packages = ("nanoserve", "torch", "triton", "transformers", "tokenizers", "gguf", "numpy")
    about = machine(_best_device().split(":")[0], packages)
    try:
        fault = fetch.fault()
        model = (
            f"{fetch.model_folder()} (whole)"
            if fault is None
            else f"{fault}: run `nanoserve fetch`"
        )
    except fetch.FetchError as error:
        model = str(error)
    return [
        ("platform", about["platform"]),
        *((name, found or "not installed") for name, found in about["versions"].items()),
        ("device", _best_device()),
        ("driver", about["driver"] or "none"),
        ("threads", threads_here()),
        ("attention runs", _attention()),
        ("model", model.replace(str(Path.home()), "~")),
    ]


def _best_device() -> str:
    import torch

    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        return f"cuda: {torch.cuda.get_device_name()}, capability {major}.{minor}"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _attention() -> str:
    """The backend that select_backend chooses on the best device, and why it is not Triton."""
    import warnings

    import torch

    from nanoserve.kernels.dispatch import select_backend, why_not_triton

    device = torch.device(_best_device().split(":")[0])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the returned line has the reason
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
    rounds: Annotated[int, typer.Option(help="Runs of each code path, interleaved.", min=1)] = 3,
    cache: Annotated[
        bool, typer.Option(help="With a KV cache, or recompute all tokens in every step.")
    ] = True,
    dtype: DTypeOption = DType.float32,
) -> None:
    """Time our loop and transformers' generate on the same weights and tokens, interleaved."""
    import torch

    from nanoserve import load_model, load_tokenizer
    from nanoserve.bench import decode, timing
    from nanoserve.oracle import load_oracle

    kind = getattr(torch, dtype.value)
    engine, oracle = load_model(model, kind), load_oracle(model, kind)
    sentence = load_tokenizer(model).encode("One day at the harbour, the gulls and the boats. ")
    lengths = context or (64, 256, 1024)
    if max(lengths) + tokens > (limit := engine.config.context):
        raise ValueError(f"{max(lengths)} + {tokens} tokens: the model's context holds {limit}")
    prompts = [(sentence * (1 + n // len(sentence)))[:n] for n in lengths]
    paths = {
        "nanoserve": decode.engine_path(engine, cache),
        "transformers": decode.oracle_path(oracle, cache),
    }
    if cache and dtype is DType.float32:  # in 16 bits, a kernel may choose other tokens
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
                f"{row.context:>6} tokens  {row.path:<12}  TTFT {row.ttft * 1e3:8.1f} ms  "
                f"TPOT {row.tpot * 1e3:8.2f} ms"
            )
            rate = moved / row.tpot
            typer.echo(
                line
                + (f"  {rate / 1e9:5.1f} GB/s, {rate / bandwidth:4.0%} of peak" if cache else "")
            )
        for name, ours in group.items():
            if ours is not theirs:
                typer.echo(
                    f"{'':>14}{name} is {theirs.ttft / ours.ttft:.2f} times as fast as "
                    f"transformers in TTFT, {theirs.tpot / ours.tpot:.2f} times in TPOT"
                )


@bench_app.command("attention")
def bench_attention(
    kv_len: Annotated[
        list[int] | None,
        typer.Option(help="One sequence with so many tokens in the cache; repeatable.", min=1),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(help="Runs of each code path, interleaved: 9; for one sequence, 20.", min=1),
    ] = None,
    dtype: Annotated[
        DType | None,
        typer.Option(
            help="On a CPU float32, on a GPU bfloat16; with --cache on a GPU, float32 and float16."
        ),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(help="For one sequence: write the rows to this file too.")
    ] = None,
    gather: Annotated[
        bool, typer.Option("--gather", help="One sequence on a CPU: the benchmark of Day 20.")
    ] = False,
    cache: Annotated[
        bool,
        typer.Option("--cache", help="One sequence, as the engine calls attention."),
    ] = False,
    device: BenchDevice = None,
    path: PathOption = None,
    record: Annotated[
        bool,
        typer.Option("--record", help="With --cache: write notebooks/data/attention_DEVICE.json."),
    ] = False,
) -> None:
    """Time every installed attention path on batches, as a share of the peak bandwidth.

    With --gather, --kv-len or --csv: one sequence on a CPU, gather K and V first, or attend in
    place. With --cache: one sequence through the engine's own code path, beside gather and
    reference.
    """
    one = gather or cache or kv_len is not None or csv is not None
    if one and path is not None:
        raise ValueError("--path is for batches: without --cache, --gather, --kv-len and --csv")
    if cache:
        if csv is not None:
            raise ValueError("--csv cannot be used with --cache: use --record")
        _bench_cache(device or "cpu", kv_len, dtype, rounds or 20, record)
        return
    if record:
        raise ValueError("--record needs --cache; `nanoserve bench roofline` records batches")
    if not one:
        _bench_batches(device, dtype, rounds, path, record=False)
        return
    if device not in (None, "cpu"):
        raise ValueError("one sequence on another --device than cpu needs --cache")
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
            config, kv_len or (16, 64, 256, 1024, 4096), getattr(torch, kind.value), rounds or 20
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
    from nanoserve.model import as_device

    as_device(device)
    dtypes = [getattr(torch, dtype.value)] if dtype else ()
    command = " ".join(["nanoserve", *sys.argv[1:]])
    run = runner.measure(device, kv_len or runner.KV_LENS, dtypes, rounds, command)
    for line in run.lines():
        typer.echo(line)
    if record:
        typer.echo(f"recorded in {run.save(runner.DATA).as_posix()}")


@bench_app.command("roofline")
def bench_roofline(
    device: BenchDevice = None,
    dtype: Annotated[
        DType | None, typer.Option(help="By default bfloat16 on a GPU, float32 on a CPU.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Runs of each code path, interleaved: 9.", min=1)
    ] = None,
    path: PathOption = None,
    record: Annotated[
        bool, typer.Option("--record", help="Write notebooks/data/roofline_DEVICE.json.")
    ] = False,
) -> None:
    """Measure this machine's peak rates, and each attention path's share of them."""
    _bench_batches(device, dtype, rounds, path, record)


@bench_app.command("matvec")
def bench_matvec(
    device: BenchDevice = None,
    rounds: Annotated[int, typer.Option(help="Runs of each variant, interleaved.", min=1)] = 9,
    record: Annotated[
        bool, typer.Option("--record", help="Write notebooks/data/matvec_DEVICE.json.")
    ] = False,
) -> None:
    """Measure products with weights in four bits, step by step, beside F.linear."""
    from nanoserve.bench import matvec
    from nanoserve.model import as_device

    if device is not None:
        as_device(device)
    run = matvec.measure(device, rounds, " ".join(["nanoserve", *sys.argv[1:]]), typer.echo)
    if record:
        typer.echo(f"recorded in {run.save(matvec.DATA).as_posix()}")


def _bench_batches(
    device: str | None,
    dtype: DType | None,
    rounds: int | None,
    path: list[str] | None,
    record: bool,
) -> None:
    import torch

    from nanoserve.bench import roofline
    from nanoserve.model import as_device

    if device is not None:
        as_device(device)
    kind = getattr(torch, dtype.value) if dtype else None
    command = " ".join(["nanoserve", *sys.argv[1:]])
    run = roofline.measure(device, kind, rounds or 9, path or (), command, typer.echo)
    if record:
        typer.echo(f"recorded in {run.save(roofline.DATA).as_posix()}")
    if not run.whole:
        raise typer.Exit(1)


@course_app.command()
def start(
    day: Annotated[
        str | None,
        typer.Argument(help="Only this day, as in 3 or appendix_a; without it, all missing days."),
    ] = None,
) -> None:
    """Copy the days that are not in work/ yet. Existing files are never changed."""
    from nanoserve.course import store

    for path in store.start(day):
        typer.echo(f"copied {path.name}")
    typer.echo(f"your notebooks are in {store.work_dir()}")


@course_app.command()
def reset(
    day: Annotated[str, typer.Argument(help="The number of the day, or appendix_a.")],
) -> None:
    """Make a fresh copy of a day; your old copy stays beside it."""
    from nanoserve.course import store

    fresh, kept = store.reset(day)
    typer.echo(
        f"{fresh.name} is fresh; yours is now {kept.name}" if kept else f"copied {fresh.name}"
    )


@course_app.command()
def status() -> None:
    """Show the exercises that you have passed, by day."""
    from nanoserve.course import store

    for row in store.status():
        typer.echo(row)


def main() -> None:
    """Run the command line. An error is one line on stderr and exit code 2; Ctrl-C is code 130."""
    _open_streams()
    try:
        code = app(standalone_mode=False)
    except typer.Abort:  # Ctrl-C in older typers; newer ones return 130
        code = 130
    except Exception as error:
        usage = getattr(error, "format_message", None)  # of click's errors
        expected = (ValueError, RuntimeError, OSError, ModuleNotFoundError)
        if usage is None and not isinstance(error, expected):
            raise
        if message := usage() if usage else str(error):  # empty if the help was shown
            typer.echo(f"nanoserve: {message}", err=True)
        code = 2
    try:
        if code == 130:
            typer.echo()
        sys.stdout.flush()
    except OSError:  # the reader is gone or the disk is full; Python would flush again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = code or 1
    sys.exit(code)


def _open_streams() -> None:
    """Replace closed standard streams by the null device. Print "?" for a character that the
    terminal's encoding lacks; read U+FFFD for input bytes that it cannot decode."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            null = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115 (until the end)
            setattr(sys, name, null)
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


if __name__ == "__main__":
    main()

"""The command line: `nanoserve fetch | generate | chat | bench | course | doctor`."""

import os
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from nanoserve import LLM, SamplingParams
    from nanoserve.bench.decode import DecodePath, TokenCheck
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


class Quantization(StrEnum):
    auto = "auto"
    none = "none"
    q4 = "q4"


Model = Annotated[
    str, typer.Option(help="'smollm2', a Hugging Face folder, a .gguf file, or a hub id.")
]
OptionalDType = Annotated[
    DType | None, typer.Option(help="The dtype of weights and activations; by default float32.")
]
QuantizationOption = Annotated[
    Quantization,
    typer.Option(
        help="Weights in four bits (q4), or none. auto: q4 on a CPU where it is the fastest, none "
        "with an explicit --dtype."
    ),
]
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
    dtype: OptionalDType = None,
    device: Device = "cpu",
    quantization: QuantizationOption = Quantization.auto,
) -> None:
    """Continue a text, without a chat template."""
    params = _params(max_tokens, temperature, top_p, seed)
    llm, runs = _load(model, dtype, device, quantization)
    stream = llm.stream(prompt, params)  # raises for a wrong prompt before anything is printed
    typer.echo(prompt, nl=False)
    _show(stream, runs)


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
    dtype: OptionalDType = None,
    device: Device = "cpu",
    quantization: QuantizationOption = Quantization.auto,
    system: Annotated[str | None, typer.Option(help="The system prompt.")] = None,
) -> None:
    """Chat with the model. An empty line or Ctrl-D ends the chat, Ctrl-C stops an answer."""
    params = _params(max_tokens, temperature, top_p, seed)
    llm, runs = _load(model, dtype, device, quantization)
    first = [] if system is None else [{"role": "system", "content": system}]
    if message is not None:
        if not message.strip():
            raise ValueError("the prompt is empty")
        stream = llm.stream(llm.chat_ids([*first, {"role": "user", "content": message}]), params)
        _aside(f"> {message}")
        _show(stream, runs)
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
            _show(stream, runs)
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


def _params(
    max_tokens: int, temperature: float, top_p: float, seed: int | None
) -> "SamplingParams":
    from nanoserve import SamplingParams

    return SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)


def _load(
    source: str, dtype: DType | None, device: str, quantization: Quantization
) -> "tuple[LLM, str]":
    """The model, and the format of its weights in words; one line on stderr for each warning."""
    import warnings

    from nanoserve import LLM

    if quantization is Quantization.auto:
        q4 = dtype is None and _why_not_q4(device, source) is None
    else:
        q4 = quantization is Quantization.q4
    kind = dtype or (_activations(device) if q4 else DType.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # for one sequence on a CPU, the contiguous cache is the faster one; with q4, it shows most
        cache = "naive" if q4 and device.startswith("cpu") else "paged"
        llm = LLM(source, kind.value, device, cache, "q4" if q4 else None)
    for warning in caught:
        _aside(f"nanoserve: {warning.message}")
    return llm, f"q4 weights, {kind.value}" if q4 else kind.value


def _why_not_q4(device: str = "cpu", source: str | None = None) -> str | None:
    """The reason why --quantization auto does not choose q4; None if it does.

    Without a source, the reason is that of the device. With one, all matrices must fit in q4.

    PyTorch's four-bit product is written for AVX2 and AVX512. On one core with AVX512, a product
    of SmolLM2 took 80 µs, and 1,741 µs with ATEN_CPU_CAPABILITY=default (float32: 83 and 406).
    """
    import torch

    from nanoserve.config import load_config
    from nanoserve.fetch import resolve
    from nanoserve.quant import has_cpu_product, why_not
    from nanoserve.weights import expected_shapes

    if not device.startswith("cpu"):
        return "auto is for CPUs"
    if not has_cpu_product():
        return "this torch has no four-bit product for this processor"
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in ("AVX2", "AVX512"):
        return f"PyTorch's four-bit product is fast with AVX2 or AVX512, and this is {capability}"
    shapes = {} if source is None else expected_shapes(load_config(resolve(source)))
    reasons = [why_not(s, torch.device(device)) for s in shapes.values() if len(s) == 2]
    return next(filter(None, reasons), None)


def _activations(device: str = "cpu") -> DType:
    """The dtype of activations beside q4: bfloat16 if the device multiplies it, else float32."""
    from nanoserve.layers import _bfloat16_products

    return DType.bfloat16 if device != "cpu" or _bfloat16_products() else DType.float32


def _show(stream: "Stream", runs: str) -> None:
    """Print the pieces of a stream, then its speed and the format of the weights.

    The last line goes to stderr, so that a pipe gets only text.
    """
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
    _aside(f"{line}; {runs}]")


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
        ("weights run", _weights()),
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


def _weights() -> str:
    """The format of the weights that `chat` and `generate` choose on the CPU, and why."""
    import torch

    if reason := _why_not_q4():
        return f"in float32, not in four bits: {reason}"
    capability = torch.backends.cpu.get_cpu_capability()
    return f"in four bits (q4), activations in {_activations().value}: this CPU has {capability}"


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
    dtype: OptionalDType = None,
    quantization: Annotated[
        Quantization | None, typer.Option(help="Only four-bit weights (q4), or none of them.")
    ] = None,
) -> None:
    """Time our loop in each format of the weights, transformers and llama.cpp, interleaved.

    Without --dtype and --quantization, all formats run. A code path is checked before it is timed.
    transformers and llama.cpp (the package llama-cpp-python) run where they are installed.
    """
    import torch

    from nanoserve import load_tokenizer
    from nanoserve.bench import decode, timing
    from nanoserve.config import load_config
    from nanoserve.fetch import resolve

    lengths, limit = context or (128, 1024), load_config(resolve(model)).context
    if max(lengths) + tokens > limit:
        raise ValueError(f"{max(lengths)} + {tokens} tokens: the model's context holds {limit}")
    sentence = load_tokenizer(model).encode("One day at the harbour, the gulls and the boats. ")
    prompts = [(sentence * (1 + n // len(sentence)))[:n] for n in lengths]
    paths, sizes, checks = _decode_paths(model, cache, dtype, quantization, max(lengths) + tokens)
    base_path = "transformers" if "transformers" in paths else next(iter(paths))
    reference = next(iter(paths)) if base_path in checks else base_path
    rows = decode.decode_benchmark(paths, reference, prompts, tokens, rounds, checks=checks)
    bandwidth = timing.read_bandwidth()
    typer.echo(
        f"cache {'on' if cache else 'off'}, {torch.get_num_threads()} threads, "
        f"peak bandwidth {bandwidth / 1e9:.1f} GB/s"
    )
    for first in range(0, len(rows), len(paths)):
        group = rows[first : first + len(paths)]
        base = next(row for row in group if row.path == base_path)
        for row in group:
            line = (
                f"{row.context:>6} tokens  {row.path:<14}  TTFT {row.ttft * 1e3:8.1f} ms  "
                f"TPOT {row.tpot * 1e3:8.2f} ms  {1 / row.tpot:6.1f} tokens/s"
            )
            if cache:
                moved = sizes[row.path](row.context)
                line += (
                    f"  {moved / 1e6:6.1f} MB/token, {moved / row.tpot / bandwidth:4.0%} of peak"
                )
            typer.echo(line)
        for row in group:
            if row is not base:
                typer.echo(
                    f"{'':>14}{row.path} is {base.ttft / row.ttft:.2f} times as fast as "
                    f"{base_path} in TTFT, {base.tpot / row.tpot:.2f} times in TPOT"
                )


def _decode_paths(
    source: str,
    cache: bool,
    dtype: DType | None,
    quantization: Quantization | None,
    tokens: int,
) -> "tuple[dict[str, DecodePath], dict[str, Callable[[int], int]], dict[str, TokenCheck]]":
    """The code paths of `bench decode`: each by its name, with its bytes per token and its check.

    The first path is ours in float32, or the only one that was asked for. The bytes are a function
    of the tokens in the cache. A path without a check must generate the reference's tokens.
    """
    from functools import partial
    from importlib.util import find_spec

    import torch

    from nanoserve import load_model
    from nanoserve.bench import decode
    from nanoserve.fetch import gguf_path, resolve
    from nanoserve.oracle import load_oracle

    every = dtype is None and quantization is None
    kind = (dtype or (_activations() if quantization is Quantization.q4 else DType.float32)).value
    kept = "q4" if quantization is Quantization.q4 else None
    first = load_model(source, kind, quantization=kept)
    name = kept or kind
    models = {name: first}
    if every and cache:
        models["bfloat16"] = load_model(source, torch.bfloat16)
        models["q4"] = load_model(source, _activations().value, quantization="q4")
    paths = {name: decode.engine_path(one, cache) for name, one in models.items()}
    sizes = {name: partial(decode.step_bytes, one) for name, one in models.items()}
    if cache:
        for name in [name for name in models if every or name == "float32"]:
            if name != "bfloat16":
                paths[f"{name} paged"] = decode.paged_path(models[name])
                sizes[f"{name} paged"] = sizes[name]
    near = decode.near_greedy(first)
    checks = {name: near for name in paths if not name.startswith(kept or kind)}
    if kept is None and find_spec("transformers"):
        paths["transformers"] = decode.oracle_path(load_oracle(source, getattr(torch, kind)), cache)
        if kind != "float32":  # in 16 bits, rounding may choose other tokens
            checks["transformers"] = near
        sizes["transformers"] = lambda n: decode.bytes_per_token(
            first.config, n, getattr(torch, kind)
        )
    gguf = gguf_path() if source == "smollm2" else resolve(source)
    if cache and dtype is None and gguf.suffix == ".gguf" and find_spec("llama_cpp"):
        paths["llama.cpp"] = decode.llama_path(gguf, tokens)
        sizes["llama.cpp"] = partial(decode.gguf_bytes, gguf, first.config)
        checks["llama.cpp"] = near
    return paths, sizes, checks


@bench_app.command("perplexity")
def bench_perplexity(
    model: Model = "smollm2",
    tokens: Annotated[int, typer.Option(help="Tokens of the text.", min=2)] = 2048,
    dtype: OptionalDType = None,
) -> None:
    """The perplexity of a text (Alice in Wonderland, chapter I) with and without four bits.

    The dtype, float32 by default, is that of the exact model; q4 keeps activations in bfloat16
    where the processor has products of bfloat16.
    """
    from nanoserve import load_model, load_tokenizer
    from nanoserve.bench.perplexity import passage, perplexity

    ids = load_tokenizer(model).encode(passage())[:tokens]
    kind = dtype or DType.float32
    exact = None
    for name, kept, in_dtype in ((kind.value, None, kind), ("q4", "q4", dtype or _activations())):
        one = load_model(model, in_dtype.value, quantization=kept)
        found = perplexity(one, ids, min(512, one.config.context))
        line = f"{name:<9} perplexity {found:8.3f}, {len(ids)} tokens"
        typer.echo(line if exact is None else f"{line}, {found / exact - 1:+.2%}")
        exact = found if exact is None else exact


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

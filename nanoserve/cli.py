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
    """Bring the model SmolLM2-135M-Instruct (93 MB) and convert it; does nothing when it is there."""
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
    typer.echo(prompt, nl=False)
    _show(llm.stream(prompt, params))


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
        _show(llm.stream(llm.chat_ids([{"role": "user", "content": message}]), params))
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

    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed
    )
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
    from nanoserve.doctor import report

    for key, value in report():
        typer.echo(f"{key:<14} {value}")


@course_app.command()
def start(
    day: Annotated[int | None, typer.Argument(help="Only this day; else all that are missing.")] = None,
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
    typer.echo(f"{fresh.name} is fresh; yours is now {kept.name}" if kept else f"copied {fresh.name}")


@course_app.command()
def status() -> None:
    """Show which exercises you have passed, day by day."""
    from nanoserve.course import store

    for row in store.status():
        typer.echo(row)


def main() -> None:
    """Run the command line: a bad value is one clear line and exit code 2, Ctrl-C leaves quietly."""
    try:
        app(standalone_mode=False)
    except typer.Exit as done:
        sys.exit(done.exit_code)
    except typer.Abort:
        sys.exit(130)
    except KeyboardInterrupt:
        typer.echo()
        sys.exit(130)
    except BrokenPipeError:  # `nanoserve generate … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except (ValueError, RuntimeError) as error:
        typer.echo(f"nanoserve: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()

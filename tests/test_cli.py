"""The command line: what it prints, one line for each mistake, and a quiet way out."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nanoserve import LLM, SamplingParams, cli
from nanoserve.bench import timing
from nanoserve.cli import main
from nanoserve.fetch import fetch
from nanoserve.kernels import dispatch
from nanoserve.kernels.dispatch import select_backend
from tests.checkpoints import edit_json
from tests.folders import write_checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    """A checkpoint with a context of 64 tokens, as the value of --model."""
    return str(write_checkpoint(tmp_path_factory.mktemp("tiny"), eos=None))


@pytest.fixture(scope="module")
def endless(tmp_path_factory) -> str:
    """One that talks for minutes."""
    folder = tmp_path_factory.mktemp("endless")
    return str(write_checkpoint(folder, eos=None, max_position_embeddings=100_000))


@pytest.fixture
def run(monkeypatch, capfd) -> Callable[..., tuple[int, str, str]]:
    """Run a command in this process: exit code, stdout, stderr."""

    def command(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["nanoserve", *args])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code or 0  # None is how a process says that all went well
        return (code, *capfd.readouterr())

    return command


# one line for each mistake


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generate", "", "--model", "TINY"], "the prompt is empty"),
        (["chat", "  ", "--model", "TINY"], "the prompt is empty"),
        (
            ["generate", "x" * 65, "--model", "TINY"],
            "the prompt has 65 tokens, the model's context holds 64",
        ),
        (["chat", "x" * 65, "--model", "TINY"], "tokens, the model's context holds 64"),
        (["generate", "hi", "--max-tokens", "0"], "max_tokens must be an integer of at least 1"),
        (["chat", "hi", "--max-tokens", "-3"], "max_tokens must be .*, got -3"),
        (["generate", "hi", "--max-tokens", "ten"], "'--max-tokens'"),
        (["generate", "hi", "--model", "llama9"], "unknown model 'llama9': give 'smollm2'"),
        (["chat", "hi", "--model", ""], "unknown model ''"),
        (["generate", "hi", "--model", "./nowhere"], r"unknown model '\./nowhere'"),
        (["generate", "hi", "--model", "no.gguf"], "model 'no.gguf': there is no such file"),
        (["generate", "hi", "--dtype", "int8"], "'--dtype': .*'int8' is not one of 'float32'"),
        (["generate", "hi", "--device", "tpu"], "device 'tpu' cannot be used"),
        (["generate", "hi", "--device", "cuda:77"], "device 'cuda:77' cannot be used"),
        (["generate", "hi", "--temperature", "-1"], "temperature must be .*, got -1.0"),
        (["generate", "hi", "--top-p", "1.5"], "top_p must be a number from 0 to 1"),
        (["generate", "hi", "--seed", "-1"], "seed must be .*, got -1"),
        (["generate", "hi", "--beam", "4"], "No such option: --beam"),
        (["generate"], "Missing argument"),
        (["generat", "hi"], "No such command 'generat'"),
        (["course", "start", "99"], "there is no day 99"),
        (["course", "reset", "99"], "there is no day 99"),
        (["bench", "decode", "--model", "nope"], "unknown model 'nope'"),
        (["bench", "decode", "--tokens", "1"], "'--tokens'"),
        (["bench", "decode", "--rounds", "0"], "'--rounds'"),
        (["bench", "decode", "--context", "0"], "'--context'"),
        (
            ["bench", "decode", "--model", "TINY", "--context", "60"],
            r"60 \+ 8 tokens: the model's context holds 64",
        ),
    ],
    ids=lambda value: " ".join(value)[:32] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_that_names_it_and_exit_code_2(args, message, run, tiny):
    code, out, err = run(*(tiny if arg == "TINY" else arg for arg in args))
    assert (code, out) == (2, "")
    assert re.fullmatch(rf"nanoserve: [^\n]*{message}[^\n]*\n", err), err


def test_a_broken_checkpoint_is_one_line(run, tmp_path):
    write_checkpoint(tmp_path)
    edit_json(tmp_path / "config.json", model_type="mamba")
    code, out, err = run("generate", "hi", "--model", str(tmp_path))
    assert (code, out) == (2, "")
    assert err.startswith("nanoserve: model_type 'mamba' is not supported")
    assert err.count("\n") == 1


def test_a_package_that_is_missing_is_one_line(run, tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, out, err = run("bench", "decode", "--model", tiny, "--context", "5")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "transformers" in err


def test_a_fault_of_our_own_keeps_its_traceback(run, monkeypatch):
    def broken() -> None:
        raise KeyError("a bug")

    monkeypatch.setattr("nanoserve.cli.report", broken)
    with pytest.raises(KeyError):
        run("doctor")


# help


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], ["fetch", "generate", "chat", "bench", "course", "doctor"]),
        (["generate"], ["--model", "--dtype", "--device", "--max-tokens", "--temperature"]),
        (["chat"], ["--model", "--dtype", "--device", "--max-tokens", "Ctrl-C"]),
        (["fetch"], ["SmolLM2", "93 MB"]),
        (["doctor"], ["bug report"]),
        (["bench"], ["decode", "attention"]),
        (["bench", "decode"], ["--context", "--rounds", "--no-cache"]),
        (["bench", "attention"], ["--kv-len", "--rounds", "--csv"]),
        (["course"], ["start", "reset", "status"]),
        (["course", "reset"], ["day"]),
    ],
)
def test_help_says_what_there_is(args, words, run):
    code, out, err = run(*args, "--help")
    assert (code, err) == (0, "")
    assert not [word for word in words if word not in out]


@pytest.mark.parametrize("args", [[], ["bench"], ["course"]])
def test_without_a_command_the_help_is_shown(args, run):
    code, out, err = run(*args)
    assert code == 2
    assert "Usage: " in out
    assert err == ""


# answers


@pytest.mark.parametrize(
    ("options", "params"),
    [
        ([], SamplingParams(max_tokens=5)),
        (
            ["--temperature", "1", "--top-p", "0.9", "--seed", "7"],
            SamplingParams(max_tokens=5, temperature=1.0, top_p=0.9, seed=7),
        ),
        (["--dtype", "bfloat16"], SamplingParams(max_tokens=5)),
    ],
)
def test_generate_continues_the_prompt_as_llm_does(options, params, run, tiny):
    dtype = torch.bfloat16 if "--dtype" in options else torch.float32
    expected = LLM(tiny, dtype).generate("he", params)[0].text
    code, out, err = run("generate", "he", "--model", tiny, "--max-tokens", "5", *options)
    assert (code, out) == (0, f"he{expected}\n")
    assert re.fullmatch(
        r"\[5 tokens in [\d.]+ s, [\d.]+ tokens/s(, the first after [\d.]+ s)?\]\n", err
    )


def test_chat_answers_as_llm_does(run, tiny):
    message = {"role": "user", "content": "hello"}
    expected = LLM(tiny).chat([message], SamplingParams(max_tokens=6)).text
    code, out, _ = run("chat", "hello", "--model", tiny, "--max-tokens", "6")
    assert (code, out) == (0, f"{expected}\n")


def test_a_talk_remembers_what_was_said_and_ends_at_an_empty_line(run, tiny, monkeypatch):
    llm, messages, answers = LLM(tiny), [], []
    for question in ("a", "b"):
        messages.append({"role": "user", "content": question})
        answers.append(llm.chat(messages, SamplingParams(max_tokens=4)).text)
        messages.append({"role": "assistant", "content": answers[-1]})
    lines = iter(["a", " b ", "", "c"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    code, out, err = run("chat", "--model", tiny, "--max-tokens", "4")
    assert (code, out) == (0, "".join(f"{answer}\n" for answer in answers))
    assert err.count("tokens/s") == 2
    assert next(lines) == "c"


def test_end_of_input_ends_a_talk(run, tiny, monkeypatch):
    def at_end(prompt: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", at_end)
    assert run("chat", "--model", tiny) == (0, "\n", "")


def test_fetch_says_where_the_model_lies(run):
    assert run("fetch") == (0, f"{fetch()}\n", "")


# a process of its own: streams, signals and pipes


class Process:
    """`nanoserve …` with pipes; killed if it has not ended after a minute."""

    def __init__(self, *args: str, stdin: int | None = subprocess.DEVNULL) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-X", "utf8", "-m", "nanoserve", *args],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # as in a terminal, whatever this process was started by
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self._watchdog = threading.Timer(60, self.process.kill)
        self._watchdog.start()
        self.seen = b""

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_) -> None:
        self._watchdog.cancel()
        self.process.kill()
        self.process.communicate()

    def read_until(self, pattern: bytes) -> None:
        """Read until `pattern` has come after what was waited for before."""
        new = b""
        while not re.search(pattern, new, re.DOTALL):
            piece = os.read(self.process.stdout.fileno(), 1 << 16)
            assert piece, (self.seen, self.process.communicate())
            new += piece
        self.seen += new

    def say(self, line: str) -> None:
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate()
        return self.process.returncode, (self.seen + out).decode(), err.decode()


FOREVER = ("--max-tokens", "100000")


def test_text_streams_and_ctrl_c_leaves_with_130_and_no_traceback(endless):
    with Process("generate", "he", "--model", endless, *FOREVER) as process:
        process.read_until(b"he.+")
        assert len(process.seen) < 2000  # and not a buffer of 8 KiB at a time
        process.interrupt()
        code, out, err = process.end()
    assert (code, err.strip()) == (130, "")
    assert out.startswith("he")
    assert out.endswith("\n")


def test_ctrl_c_stops_an_answer_but_not_the_talk(endless):
    with Process("chat", "--model", endless, *FOREVER, stdin=subprocess.PIPE) as process:
        process.read_until(rb"> $")
        for _ in range(2):
            process.say("he")
            process.read_until(b".")
            process.interrupt()
            process.read_until(rb"\n\[stopped\]\n> $")
        process.say("")
        code, out, err = process.end()
    assert (code, err) == (0, "")
    assert out.count("[stopped]") == 2


def test_ctrl_c_at_the_question_leaves_with_130(tiny):
    with Process("chat", "--model", tiny, stdin=subprocess.PIPE) as process:
        process.read_until(rb"> $")
        process.interrupt()
        code, _, err = process.end()
    assert (code, err.strip()) == (130, "")


def test_a_reader_that_leaves_ends_it_without_a_word(endless):
    with Process("generate", "he", "--model", endless, *FOREVER) as process:
        process.read_until(b"he.")
        process.process.stdout.close()
        assert process.process.wait() == 1
        assert process.process.stderr.read() == b""


# doctor


def test_doctor_prints_what_a_bug_report_needs(run):
    code, out, err = run("doctor")
    assert (code, err) == (0, "")
    rows = {line[:16].strip(): line[17:] for line in out.splitlines()}
    assert rows["python"] == ".".join(map(str, sys.version_info[:3]))
    assert torch.__version__.startswith(rows["torch"])  # pip leaves "+cu130" out of its own
    for package in ("nanoserve", "triton", "transformers", "tokenizers", "gguf", "numpy"):
        assert re.match(r"\d+\.\d+|not installed$", rows[package]), package
    assert re.match("Linux|Darwin|Windows", rows["platform"])
    assert re.match("cpu|cuda: .+, capability|mps", rows["device"])
    assert rows["threads"] == str(torch.get_num_threads())
    assert rows["attention runs"].startswith(f"under {select_backend(best_device())} on ")
    assert rows["model"].endswith("(whole)")
    assert str(Path.home()) not in out


def test_doctor_works_where_there_is_nothing(run, monkeypatch, tmp_path):
    monkeypatch.setenv("NANOSERVE_CACHE", str(tmp_path / "none"))
    monkeypatch.setattr("nanoserve.bench.machine.metadata.version", _missing)
    code, out, err = run("doctor")
    assert (code, err) == (0, "")
    assert "not there or not whole: run `nanoserve fetch`" in out
    assert out.count("not installed") == 7
    assert not (tmp_path / "none").exists()


def best_device() -> str:
    mps = torch.backends.mps.is_available()
    return "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"


@pytest.mark.parametrize(
    ("device", "reason", "line"),
    [
        ("cpu", "it is not a CUDA GPU", "under tlsim on cpu, not triton: it is not a CUDA GPU"),
        ("cuda: V100, capability 7.0", "too old", "under tlsim on cuda, not triton: too old"),
        ("cuda: H200, capability 9.0", None, "under triton on cuda"),
    ],
)
def test_doctor_says_what_runs_attention_and_why(device, reason, line, monkeypatch, recwarn):
    monkeypatch.delenv("NANOSERVE_BACKEND", raising=False)
    monkeypatch.setattr(cli, "_best_device", lambda: device)
    monkeypatch.setattr(dispatch, "why_not_triton", lambda _: reason)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card")
    dispatch._warn_fallback.cache_clear()
    assert dict(cli.report())["attention runs"] == line
    assert len(recwarn) == 0


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("reference", "under reference on cpu: NANOSERVE_BACKEND=reference"),
        ("cuda", "not at all: there is no backend 'cuda': the backends are triton, tlsim, "),
        ("triton", 'not at all: the backend "triton" cannot run on cpu: '),
    ],
)
def test_doctor_says_what_an_override_does(override, line, monkeypatch):
    monkeypatch.setenv("NANOSERVE_BACKEND", override)
    monkeypatch.setattr(cli, "_best_device", lambda: "cpu")
    assert dict(cli.report())["attention runs"].startswith(line)


def _missing(package: str) -> str:
    from importlib.metadata import PackageNotFoundError

    raise PackageNotFoundError(package)


# bench


@pytest.mark.parametrize("cached", [True, False])
def test_bench_decode_prints_times_and_ratios(cached, run, tiny, monkeypatch):
    monkeypatch.setattr(timing, "read_bandwidth", lambda: 1e10)
    args = ["--context", "5", "--context", "20", "--rounds", "1", "--tokens", "3"]
    switch = [] if cached else ["--no-cache"]
    code, out, _ = run("bench", "decode", "--model", tiny, *args, *switch)
    lines = out.splitlines()
    names = ["nanoserve", "transformers", *["paged"] * cached]
    each = 2 * len(names) - 1  # a line for each path, and a ratio for each of ours
    assert (code, len(lines)) == (0, 1 + 2 * each)
    assert lines[0].startswith(f"cache {'on' if cached else 'off'}, float32, ")
    assert lines[0].endswith("peak bandwidth 10.0 GB/s")
    for context, group in {"5": lines[1 : 1 + each], "20": lines[1 + each :]}.items():
        timed, ratios = group[: len(names)], group[len(names) :]
        for line, name in zip(timed, names, strict=True):
            assert re.match(rf" +{context} tokens  {name} +first +[\d.]+ ms  then +[\d.]+ ms", line)
            assert ("of peak" in line) == cached
        theirs = timed.pop(1)
        for ours, ratio in zip(timed, ratios, strict=True):
            shown = re.fullmatch(
                r" +(\w+), speed over transformers: first token ([\d.]+), decode ([\d.]+)", ratio
            )
            assert shown[1] in ours
            for number, word in ((shown[2], "first"), (shown[3], "then")):
                expected = _number(word, theirs) / _number(word, ours)
                assert float(number) == pytest.approx(expected, rel=0.2)


def _number(word: str, line: str) -> float:
    return float(re.search(rf"{word} +([\d.]+) ms", line)[1])


def test_bench_decode_shows_no_time_for_a_wrong_answer(run, tiny, monkeypatch):
    monkeypatch.setattr("nanoserve.model.rms_norm", lambda x, weight, eps: x)
    code, out, err = run("bench", "decode", "--model", tiny, "--context", "5", "--tokens", "3")
    assert (code, out) == (2, "")
    assert err.endswith("nanoserve: nanoserve and transformers differ after 5 tokens\n")


# course


def test_the_course_commands_copy_keep_and_report(run, tmp_path, monkeypatch):
    monkeypatch.setenv("NANOSERVE_WORK", str(tmp_path / "work"))
    code, out, _ = run("course", "start", "1")
    assert code == 0
    assert out == f"copied day01_oracle.ipynb\nyour notebooks are in {tmp_path / 'work'}\n"
    notebook = tmp_path / "work/day01_oracle.ipynb"
    notebook.write_text("mine")
    assert run("course", "start", "1")[1] == f"your notebooks are in {tmp_path / 'work'}\n"
    assert notebook.read_text() == "mine"
    assert run("course", "reset", "1")[1] == (
        "day01_oracle.ipynb is fresh; yours is now day01_oracle.1.ipynb\n"
    )
    assert notebook.read_text() != "mine"
    code, out, _ = run("course", "status")
    assert code == 0
    assert re.search(r"^day  1  The oracle comes first .*started$", out, re.MULTILINE)

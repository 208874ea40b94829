"""The command line: its output, one line for each mistake, and a quiet exit."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import torch

import nanoserve
from nanoserve import LLM, SamplingParams, cli
from nanoserve import fetch as fetch_module
from nanoserve.bench import timing
from nanoserve.cli import main
from nanoserve.fetch import fetch
from nanoserve.kernels import dispatch
from nanoserve.kernels.dispatch import select_backend
from tests.checkpoints import edit_json
from tests.folders import denied, write_checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    """A checkpoint with a context of 64 tokens, as the value of --model."""
    return str(write_checkpoint(tmp_path_factory.mktemp("tiny"), eos=None))


@pytest.fixture(scope="module")
def fits_q4(tmp_path_factory) -> str:
    """A checkpoint whose matrices can be kept in four bits."""
    sizes = {"hidden_size": 192, "intermediate_size": 96, "head_dim": 32}
    folder = tmp_path_factory.mktemp("fits_q4")
    return str(write_checkpoint(folder, eos=None, vocab_size=272, **sizes))


@pytest.fixture(scope="module")
def endless(tmp_path_factory) -> str:
    """A model that generates text for minutes."""
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
            code = end.code or 0  # None means success
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
        (["generate", "hi", "--beam", "4"], "No such option:? .?--beam"),
        (["generate"], "Missing argument"),
        (["generat", "hi"], "No such command 'generat'"),
        (["course", "start", "99"], "there is no day 99"),
        (["course", "reset", "99"], "there is no day 99: the days are 0 to 44, the appendix is A"),
        (["course", "reset", "appendix_b"], "there is no day 'appendix_b'"),
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
    assert err.startswith(f"nanoserve: {tmp_path / 'config.json'}: model_type 'mamba' is not sup")
    assert err.count("\n") == 1


def test_a_missing_package_is_one_line(run, tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    code, out, err = run("chat", "hi", "--model", tiny)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "jinja2" in err


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
        (["bench"], ["decode", "attention", "roofline"]),
        (["bench", "decode"], ["--context", "--rounds", "--no-cache"]),
        (["bench", "attention"], ["--kv-len", "--rounds", "--csv", "--path", "--gather"]),
        (["bench", "roofline"], ["--record", "--device", "--path"]),
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
        r"\[5 tokens in [\d.]+ s, [\d.]+ tokens/s(, the first after [\d.]+ s)?; (\w+)\]\n", err
    )[2] == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize(
    ("capability", "options", "runs"),
    [
        ("AVX512", [], "q4 weights, float32"),
        ("AVX2", [], "q4 weights, float32"),
        ("DEFAULT", [], "float32"),
        ("AVX512", ["--quantization", "none"], "float32"),
        ("AVX512", ["--dtype", "float32"], "float32"),  # the exact code path
        ("AVX512", ["--dtype", "bfloat16"], "bfloat16"),
        ("DEFAULT", ["--quantization", "q4"], "q4 weights, float32"),
        ("AVX512", ["--dtype", "float16", "--quantization", "q4"], "q4 weights, float16"),
    ],
)
@pytest.mark.parametrize("command", ["chat", "generate"])
def test_q4_runs_where_it_is_fast_and_the_last_line_says_so(
    command, capability, options, runs, run, fits_q4, monkeypatch
):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr("nanoserve.quant.has_cpu_product", lambda: True)
    monkeypatch.setattr("nanoserve.layers._bfloat16_products", lambda: False)
    code, _, err = run(command, "he", "--model", fits_q4, "--max-tokens", "2", *options)
    assert (code, err.endswith(f"; {runs}]\n")) == (0, True)


def test_auto_needs_a_model_whose_matrices_all_fit_and_explicit_q4_says_what_does_not(run, tiny):
    assert run("generate", "he", "--model", tiny, "--max-tokens", "2")[2].endswith("; float32]\n")
    code, _, err = run(
        "generate", "he", "--model", tiny, "--max-tokens", "2", "--quantization", "q4"
    )
    assert code == 0
    assert err.count("\n") == 2
    assert re.match(r"nanoserve: q4: \d+ of \d+ matrices are dequantised to .*multiple of 32", err)


def test_chat_answers_as_llm_does(run, tiny):
    message = {"role": "user", "content": "hello"}
    expected = LLM(tiny).chat([message], SamplingParams(max_tokens=6)).text
    code, out, _ = run("chat", "hello", "--model", tiny, "--max-tokens", "6")
    assert (code, out) == (0, f"{expected}\n")


def test_a_conversation_remembers_its_turns_and_ends_at_an_empty_line(run, tiny, monkeypatch):
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


def test_past_the_context_the_oldest_turns_are_dropped_and_the_system_prompt_stays(
    run, tiny, monkeypatch
):
    asked = []
    monkeypatch.setattr(LLM, "chat_ids", spy(LLM.chat_ids, asked))
    lines = iter(["aaaa", "bbbb", "cccc", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    code, out, err = run("chat", "--model", tiny, "--max-tokens", "4", "--system", "S")
    assert (code, out.count("\n")) == (0, 3)
    notes = [line for line in err.splitlines() if "tokens/s" not in line]
    assert notes and set(notes) == {
        "[the conversation exceeds the context of 64 tokens: dropped the oldest 2 messages]"
    }
    assert all(messages[0] == {"role": "system", "content": "S"} for messages in asked)
    assert asked[-1][-1] == {"role": "user", "content": "cccc"}
    assert "aaaa" not in str(asked[-1])
    llm = LLM(tiny)
    assert len(llm.tokenizer.encode(llm.tokenizer.render_chat(asked[-1]), True)) + 4 <= 64
    # no more was dropped than needed
    assert len(llm.tokenizer.encode(llm.tokenizer.render_chat(asked[-2]), True)) + 4 > 64


def spy(real: Callable, calls: list) -> Callable:
    def called(self: LLM, messages: list[dict]) -> list[int]:
        calls.append([dict(message) for message in messages])
        return real(self, messages)

    return called


def test_a_turn_longer_than_the_context_is_refused_and_nothing_is_lost(run, tiny, monkeypatch):
    asked = []
    monkeypatch.setattr(LLM, "chat_ids", spy(LLM.chat_ids, asked))
    lines = iter(["a", "x" * 65, "b\ud800", "b", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    code, _, err = run("chat", "--model", tiny, "--max-tokens", "4")
    notes = [line for line in err.splitlines() if "tokens/s" not in line]
    assert code == 0
    assert len(notes) == 2
    assert re.fullmatch(
        r"nanoserve: the prompt has \d+ tokens, the model's context holds 64", notes[0]
    )
    assert notes[1].startswith("nanoserve: text is not valid Unicode")
    assert [message["content"] for message in asked[-1]][::2] == ["a", "b"]


def test_end_of_input_ends_a_conversation(run, tiny, monkeypatch):
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
            # as in a terminal, whatever process started this one
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
        """Read until `pattern` appears after the last match."""
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
        assert len(process.seen) < 2000  # not in buffers of 8 KiB
        process.interrupt()
        code, out, err = process.end()
    assert (code, err.strip()) == (130, "")
    assert out.startswith("he")
    assert out.endswith("\n")


def test_ctrl_c_stops_an_answer_but_not_the_conversation(endless):
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


# a process of its own: streams that are closed, terminals of every kind


def shell(line: str, tiny: str, **env: str) -> subprocess.CompletedProcess:
    """Run a line of sh in which NANOSERVE is the command and TINY a model."""
    command = f"{sys.executable} -m nanoserve"
    line = line.replace("NANOSERVE", command).replace("TINY", f"--model {tiny} --max-tokens 4")
    return subprocess.run(
        ["sh", "-c", line], capture_output=True, timeout=300, env=os.environ | env
    )


@pytest.mark.parametrize(
    "line",
    [
        "NANOSERVE chat TINY <&-",
        "NANOSERVE generate he TINY >&-",
        "NANOSERVE chat hello TINY >&- 2>&-",
        "NANOSERVE doctor <&- >&- 2>&-",
        "NANOSERVE --help >&-",
    ],
)
def test_a_closed_stream_is_no_error(line, tiny):
    done = shell(line, tiny)
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr
    assert b"Error" not in done.stderr


def test_a_mistake_keeps_its_exit_code_where_nobody_can_read_of_it(tiny):
    assert shell("NANOSERVE chat hi --model nope >&- 2>&-", tiny).returncode == 2


@pytest.mark.parametrize("command", ["doctor", "generate he TINY", "--help"])
def test_a_pipe_that_nobody_reads_ends_it_without_a_word(command, tiny):
    done = shell(f"{{ sleep 0.1; NANOSERVE {command} < /dev/null; echo $? >&2; }} | true", tiny)
    said = [line for line in done.stderr.decode().splitlines() if "tokens/s" not in line]
    assert said == ["1"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_line(tiny):
    done = shell("NANOSERVE generate he TINY > /dev/full", tiny)
    assert done.returncode == 2
    assert done.stderr == b"nanoserve: [Errno 28] No space left on device\n"


UTF8 = "h\u00e9\u4eac".encode()


@pytest.mark.parametrize(
    ("encoding", "shown"),
    # click takes ASCII for a misconfigured stream, as in the C locale, and writes UTF-8
    [("ascii", UTF8), ("latin-1", b"h\xe9?"), ("utf-8", UTF8)],
)
def test_a_terminal_of_any_encoding_is_written_to(encoding, shown, tiny):
    done = shell("NANOSERVE generate 'h\u00e9\u4eac' TINY", tiny, PYTHONIOENCODING=encoding)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(shown)


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_input_of_any_encoding_is_read(encoding, tiny):
    line = r"printf 'h\303\251\377\n\n' | NANOSERVE chat TINY"
    done = shell(line, tiny, PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stdout.count(b"> ")) == (0, 2)
    assert b"tokens/s" in done.stderr
    assert b"nanoserve:" not in done.stderr


@pytest.mark.parametrize(
    ("env", "coloured"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)],
)
def test_colour_is_for_terminals_that_want_it(env, coloured, tiny):
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"TERM": "xterm"} | env
    command = [sys.executable, "-m", "nanoserve", "generate", "he", "--model", tiny]
    process = subprocess.Popen(
        [*command, "--max-tokens", "2"], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    seen = b""
    try:
        while piece := os.read(ours, 4096):
            seen += piece
    except OSError:  # the end of a Linux pty
        pass
    assert process.wait(60) == 0
    os.close(ours)
    assert b"tokens/s" in seen
    assert (b"\x1b[" in seen) == coloured


def test_the_version_is_the_packages(run):
    assert run("--version") == (0, f"nanoserve {nanoserve.__version__}\n", "")
    assert metadata.version("nanoserve") == nanoserve.__version__


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
    assert re.match("in four bits \\(q4\\), activations in |in float32, ", rows["weights run"])
    assert rows["model"].endswith("(whole)")
    assert str(Path.home()) not in out


@pytest.mark.parametrize(
    ("capability", "product", "line"),
    [
        ("AVX2", True, "in four bits (q4), activations in float32: this CPU has AVX2"),
        ("DEFAULT", True, "in float32, not in four bits: PyTorch's four-bit product is fast with "),
        ("AVX512", False, "in float32, not in four bits: this torch has no four-bit product for "),
    ],
)
def test_doctor_says_in_which_format_the_weights_would_run(capability, product, line, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr("nanoserve.quant.has_cpu_product", lambda: product)
    monkeypatch.setattr("nanoserve.layers._bfloat16_products", lambda: False)
    assert dict(cli.report())["weights run"].startswith(line)


def test_doctor_works_where_there_is_nothing(run, monkeypatch, tmp_path):
    monkeypatch.setenv("NANOSERVE_CACHE", str(tmp_path / "none"))
    monkeypatch.setattr("nanoserve.bench.machine.metadata.version", _missing)
    code, out, err = run("doctor")
    assert (code, err) == (0, "")
    assert "SmolLM2-135M-Instruct does not exist: run `nanoserve fetch`" in out
    assert out.count("not installed") == 7
    assert not (tmp_path / "none").exists()


def test_doctor_names_the_fault_of_a_model_that_is_not_whole(run, monkeypatch, tmp_path):
    monkeypatch.setenv("NANOSERVE_CACHE", str(tmp_path))
    folder = fetch_module.model_folder()
    folder.mkdir()
    (folder / fetch_module.MANIFEST).write_text('{"config.json": 5}')
    assert "config.json is missing: run `nanoserve fetch`" in run("doctor")[1]
    file = folder / "config.json"
    file.write_text("{}")
    assert "config.json has 2 bytes instead of 5: run `nanoserve fetch`" in run("doctor")[1]
    with denied(file):
        code, out, _ = run("doctor")
    assert code == 0
    assert "config.json exists, but cannot be read: Permission denied" in out


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
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
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


@pytest.mark.parametrize(
    ("switch", "names"),
    [
        ([], ["float32", "bfloat16", "q4", "float32 paged", "q4 paged", "transformers"]),
        (["--no-cache"], ["float32", "transformers"]),
        (["--dtype", "bfloat16"], ["bfloat16", "transformers"]),
        (["--quantization", "none"], ["float32", "float32 paged", "transformers"]),
        (["--quantization", "q4"], ["q4"]),
    ],
)
def test_bench_decode_prints_times_bytes_and_ratios(switch, names, run, fits_q4, monkeypatch):
    monkeypatch.setattr(timing, "read_bandwidth", lambda: 1e10)
    monkeypatch.setattr("nanoserve.bench.decode.near_greedy", lambda model: lambda *ids: True)
    args = ["--context", "5", "--context", "20", "--rounds", "1", "--tokens", "3"]
    code, out, _ = run("bench", "decode", "--model", fits_q4, *args, *switch)
    lines = out.splitlines()
    each = 2 * len(names) - 1  # a line for each code path, and a ratio for all but the reference
    cached = switch != ["--no-cache"]
    assert (code, len(lines)) == (0, 1 + 2 * each)
    assert lines[0].startswith(f"cache {'on' if cached else 'off'}, {torch.get_num_threads()} thr")
    assert lines[0].endswith("peak bandwidth 10.0 GB/s")
    base = "transformers" if "transformers" in names else names[0]
    for context, group in {"5": lines[1 : 1 + each], "20": lines[1 + each :]}.items():
        timed, ratios = dict(zip(names, group, strict=False)), group[len(names) :]
        for name, line in timed.items():
            assert re.match(rf" +{context} tokens  {name} +TTFT +[\d.]+ ms  TPOT +[\d.]+ ms", line)
            assert 1e3 / _number("TPOT", line) == pytest.approx(
                float(re.search(r"([\d.]+) tokens/s", line)[1]), rel=0.05
            )
            assert ("of peak" in line) == cached
        theirs = timed.pop(base)
        for (name, ours), ratio in zip(timed.items(), ratios, strict=True):
            shown = re.fullmatch(
                rf" +{name} is ([\d.]+) times as fast as {base} in TTFT, ([\d.]+) times in TPOT",
                ratio,
            )
            for number, word in ((shown[1], "TTFT"), (shown[2], "TPOT")):
                expected = _number(word, theirs) / _number(word, ours)
                assert float(number) == pytest.approx(expected, rel=0.2)
    if switch == []:
        sizes = [float(re.search(r"([\d.]+) MB/token", line)[1]) for line in lines[1:4]]
        assert sizes[0] > sizes[1] > sizes[2] > 0


def _number(word: str, line: str) -> float:
    return float(re.search(rf"{word} +([\d.]+) ms", line)[1])


def test_bench_decode_shows_no_time_for_a_wrong_answer(run, tiny, monkeypatch):
    monkeypatch.setattr("nanoserve.model.rms_norm", lambda x, weight, eps: x)
    code, out, err = run("bench", "decode", "--model", tiny, "--context", "5", "--tokens", "3")
    assert (code, out) == (2, "")
    assert err.endswith("nanoserve: float32 and transformers differ at prompt length 5\n")


def test_bench_perplexity_compares_q4_with_the_exact_model(run, fits_q4):
    code, out, _ = run("bench", "perplexity", "--model", fits_q4, "--tokens", "40")
    exact, kept = (
        re.match(r"(\w+) +perplexity +([\d.]+), 40 tokens(, [+-][\d.]+%)?$", line).groups()
        for line in out.splitlines()
    )
    assert (code, exact[0], exact[2], kept[0]) == (0, "float32", None, "q4")
    assert float(kept[2][2:-1]) == pytest.approx(
        100 * (float(kept[1]) / float(exact[1]) - 1), abs=0.02
    )


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
    assert re.search(r"^day  1 +The oracle comes first .*started$", out, re.MULTILINE)

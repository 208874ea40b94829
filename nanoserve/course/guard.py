"""Run a learner's code under a time limit, and return an `Outcome`, whatever the code does."""

from __future__ import annotations

import contextlib
import ctypes
import io
import linecache
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nanoserve.course.compare import without_addresses

KEEP = 400  # characters of printed text that are kept
AGAIN = 0.03  # seconds between two attempts to stop code that caught the first TimeLimit


@dataclass
class Outcome:
    """The result of a call. `kind` is "value", "raised", "exit" or "timeout"."""

    kind: str
    value: Any = None
    error: BaseException | None = None
    printed: str = ""
    stopped: bool = True
    line: str = ""  # the innermost line of the answer's own code, when it raised


class TimeLimit(BaseException):
    """Raised inside code that ran too long. `except Exception` does not catch it."""


def guarded(call: Callable[[], Any], limit: float = 10.0, files: tuple[str, ...] = ()) -> Outcome:
    """Run call() for at most `limit` seconds and capture its prints. Raises only KeyboardInterrupt.

    On the main thread of a Unix process a timer stops the call, even if it catches all exceptions.
    Elsewhere the call runs in a daemon thread; `stopped` is False if the thread did not end.
    The random seed is the same in every call, and the caller's random state does not change.
    `files` are the names of the files that hold the answer's own code.
    """
    prints = _Prints()
    on_main = threading.current_thread() is threading.main_thread()
    timed = _by_alarm if on_main and hasattr(signal, "setitimer") else _by_thread
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(prints))
        stack.enter_context(contextlib.redirect_stderr(prints))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(torch.random.fork_rng(devices=[]))
        torch.manual_seed(0)
        outcome = timed(call, limit)
    outcome.printed = prints.text()
    if outcome.error is not None:
        outcome.line = own_line(outcome.error, files)
    return outcome


def message_of(error: BaseException) -> str:
    """The first line of an exception's message, without addresses, at most 160 characters."""
    try:
        text = without_addresses(str(error)).strip()
    except Exception:
        text = ""
    line = text.splitlines()[0] if text else ""
    return line if len(line) <= 160 else line[:157] + "..."


def own_line(error: BaseException, files: tuple[str, ...]) -> str:
    """The last line of the traceback that belongs to one of `files`, as "line 3: `code`"."""
    own = [
        (frame.f_code.co_filename, number)
        for frame, number in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename in files
    ]
    if not own:
        return ""
    name, number = own[-1]
    code = linecache.getline(name, number).strip()
    return f"line {number}: `{code}`" if code else f"line {number}"


class _Prints(io.TextIOBase):
    """Stores the first KEEP characters of the printed text."""

    def __init__(self) -> None:
        self.kept, self.cut = "", False

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        room = KEEP - len(self.kept)
        self.kept += text[:room]
        self.cut = self.cut or len(text) > room
        return len(text)

    def text(self) -> str:
        return self.kept.strip() + (" ..." if self.cut else "")


def _run(call: Callable[[], Any]) -> Outcome:
    try:
        return Outcome("value", call())
    except (KeyboardInterrupt, TimeLimit):
        raise
    except SystemExit as error:
        return Outcome("exit", error=error)
    except BaseException as error:
        return Outcome("raised", error=error)


def _by_alarm(call: Callable[[], Any], limit: float) -> Outcome:
    """Run the call; a repeating timer raises TimeLimit in it after `limit` seconds.

    A bare `except:` in a loop catches TimeLimit, and the loop continues. So a trace function raises
    TimeLimit again, one line later at each attempt, until a line outside every `try` is reached.
    """
    active, attempts = True, 0

    def on_alarm(_signal: int, frame: Any) -> None:
        nonlocal attempts
        if not active:
            return
        attempts += 1
        if attempts > 1:
            _trace(frame, _by_alarm.__code__, (attempts - 2) % 24)
        raise TimeLimit

    tracer = sys.gettrace()
    handler = signal.signal(signal.SIGALRM, on_alarm)
    timer = signal.setitimer(signal.ITIMER_REAL, limit, AGAIN)
    try:
        try:
            return _run(call)
        finally:
            active = False
    except TimeLimit:
        active = False
        return Outcome("timeout")
    finally:
        active = False
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)
        if sys.gettrace() is not tracer:
            sys.settrace(tracer)


def _trace(frame: Any, stop: Any, skip: int) -> None:
    """Raise TimeLimit after `skip` more lines: in `frame`, its callers up to `stop`, new calls."""

    def tracer(_frame: Any, event: str, _arg: Any) -> Any:
        nonlocal skip
        if event == "line":
            skip -= 1
            if skip < 0:
                raise TimeLimit
        return tracer

    while frame is not None and frame.f_code not in (stop, _run.__code__):
        frame.f_trace = tracer
        frame = frame.f_back
    sys.settrace(tracer)


def _by_thread(call: Callable[[], Any], limit: float) -> Outcome:
    outcomes: list[Outcome] = []
    grad = torch.is_grad_enabled()

    def work() -> None:
        with contextlib.suppress(TimeLimit), torch.set_grad_enabled(grad):
            try:
                outcomes.append(_run(call))
            except KeyboardInterrupt as error:
                outcomes.append(Outcome("raised", error=error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        thread.join(limit)
    finally:
        late = thread.is_alive()
        stopped = _stop(thread)
    return Outcome("timeout", stopped=stopped) if late or not outcomes else outcomes[0]


def _stop(thread: threading.Thread) -> bool:
    """Raise TimeLimit in a thread, for about a second; returns whether the thread has ended."""
    for _ in range(30):
        if not thread.is_alive():
            break
        ident = ctypes.c_ulong(thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(TimeLimit))
        thread.join(AGAIN)
    return not thread.is_alive()

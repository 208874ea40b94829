"""The source of an answer, with everything it uses, as a complete module."""

from __future__ import annotations
import __future__

import ast
import importlib
import inspect
import linecache
import symtable
import textwrap
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from nanoserve.course.compare import a


class CannotSave(Exception):
    """The source of an answer cannot be saved; the message says why."""


def module_source(answer: Callable) -> str:
    """Source of a module that defines `answer` and everything that it uses from the notebook.

    The module includes helper functions, helper classes, imports and simple constants. Raises
    CannotSave if a source is not found, or if a value cannot be written as source.
    """
    function = _function(answer)
    parts = _Parts(function.__globals__ if function else {})
    parts.add_definition(answer.__name__, answer)
    imports = sorted(parts.imports, key=lambda line: (line.startswith("from"), line))
    future = ["from __future__ import annotations"] if parts.future else []
    head = "".join(f"{line}\n" for line in [*future, *imports])
    return "\n\n".join([head, *parts.pieces] if head else parts.pieces)


def source_of(thing: Callable) -> str:
    """The text of a function or class, also of one defined in a notebook's cell."""
    name, code = getattr(thing, "__name__", ""), _code(thing)
    if not name.isidentifier():
        raise CannotSave("it has no name: write it with `def`")
    for file in [code.co_filename] if code else _cells():
        tree, lines = _parsed("".join(linecache.getlines(file)))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                last = node.end_lineno or first
                if code is None or first <= code.co_firstlineno <= last:
                    return textwrap.dedent("".join(lines[first - 1 : last])).rstrip() + "\n"
    raise CannotSave(f"the source of `{name}` cannot be found: run the cell that defines it again")


def same_source(one: Callable, other: Callable, method: str | None = None) -> bool:
    """Whether two definitions, or this method of two classes, have the same source."""
    if one is other:
        return True
    try:
        return source_of(_member(one, method)) == source_of(_member(other, method))
    except CannotSave:
        return False


def bare(thing: Any) -> Any:
    """The function inside a kernel (triton.jit and tlsim.jit store it as `fn`); else `thing`."""
    while not isinstance(thing, type) and isinstance(inner := getattr(thing, "fn", None), Callable):
        thing = inner
    return thing


def _cells() -> list[str]:
    """The cells of this session, latest first. A class without methods is searched in them."""
    return [
        file
        for file, entry in reversed(linecache.cache.items())
        if len(entry) == 4 and entry[1] is None
    ]


class _Parts:
    def __init__(self, scope: dict[str, Any]) -> None:
        self.scope, self.future = scope, False
        self.imports: set[str] = set()
        self.pieces: list[str] = []
        self.done: set[str] = set()

    def add(self, name: str, value: Any) -> None:
        """Add the definition of `name`, once, after the definitions that it uses."""
        if name in self.done:
            return
        self.done.add(name)
        line = _import_line(name, value)
        if line:
            self.imports.add(line)
        elif isinstance(value, type) or isinstance(inspect.unwrap(bare(value)), FunctionType):
            self.add_definition(name, value)
        else:
            self.pieces.append(f"{name} = {_constant(name, value)}\n")
            if "torch." in self.pieces[-1]:
                self.imports.add("import torch")

    def add_definition(self, name: str, value: Any) -> None:
        self.done.add(name)
        value = bare(value)
        if value.__name__ == "<lambda>":
            raise CannotSave(f"`{name}` is a lambda: write it with `def`")
        if value.__name__ != name:
            raise CannotSave(f"`{name}` is another name for `{value.__name__}`: use one name")
        if value.__qualname__ != name:
            raise CannotSave(f"`{name}` is defined inside something else: move it to the top level")
        text, function = source_of(value), _function(value)
        if function:
            self._examine(function)
        for needed in sorted(_global_names(text)):
            if needed == name:
                self._add_own_base(name, value)
            elif needed in self.scope and not needed.startswith("__"):
                self.add(needed, self.scope[needed])
        self.pieces.append(text)

    def _examine(self, function: FunctionType) -> None:
        self.future |= bool(function.__code__.co_flags & __future__.annotations.compiler_flag)
        inner = set(function.__code__.co_freevars) - {"__class__"}
        if inner:
            names = ", ".join(f"`{name}`" for name in sorted(inner))
            raise CannotSave(f"it uses {names} of an enclosing function")

    def _add_own_base(self, name: str, value: Any) -> None:
        """For `class Cache(Cache):`, import the base class if a module has it."""
        for base in getattr(value, "__mro__", ())[1:]:
            line = _import_line(name, base) if base.__name__ == name else None
            if line:
                self.imports.add(line)
                return


def _import_line(name: str, value: Any) -> str | None:
    if isinstance(value, ModuleType):
        if value.__name__ == "__main__":
            raise CannotSave(f"`{name}` is the notebook itself")
        plain = value.__name__ == name
        return f"import {name}" if plain else f"import {value.__name__} as {name}"
    module, own = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    own = own or getattr(value, "__name__", None)
    if not module or not own or module == "__main__" or "." in own or "<" in own:
        return None
    try:
        found = getattr(importlib.import_module(module), own, None)
    except ImportError:
        return None
    if found is not value:
        return None
    return f"from {module} import {own}" + ("" if own == name else f" as {name}")


def _constant(name: str, value: Any) -> str:
    text = repr(value)
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device"):
        return text if text.startswith("torch.") else f"torch.{text}"
    if text in ("inf", "-inf", "nan"):
        return f"float('{text}')"
    try:
        if len(text) <= 20_000 and ast.literal_eval(text) == value:
            return text
    except (ValueError, SyntaxError, TypeError, RuntimeError, RecursionError):
        pass
    raise CannotSave(f"it uses `{name}`, {a(value)} of this notebook: make it inside the function")


def _code(thing: Any) -> CodeType | None:
    function = _function(thing)
    return function.__code__ if function else None


def _function(thing: Any) -> FunctionType | None:
    """The function itself; for a class, a method that its own source defines; else None."""
    if not isinstance(thing, type):
        inner = inspect.unwrap(bare(thing)) if callable(thing) else thing
        return inner if isinstance(inner, FunctionType) else None
    for member in vars(thing).values():
        plain = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
        inner = inspect.unwrap(plain) if callable(plain) else None
        if not isinstance(inner, FunctionType):
            continue
        own = inner.__qualname__.startswith(f"{thing.__qualname__}.")
        own = own and inner.__module__ == thing.__module__  # else a decorator added the method
        file = inner.__code__.co_filename  # "<string>" if a decorator generated the method
        if own and file != "<string>" and linecache.getlines(file):
            return inner
    return None


def _global_names(text: str) -> set[str]:
    """Names that a definition uses from outside: in bodies, defaults, annotations, decorators."""
    table = symtable.symtable(text, "<answer>", "exec")
    defined = {child.get_name() for child in table.get_children()}
    names = set()
    for scope in _scopes(table):
        for symbol in scope.get_symbols():
            if scope is table:
                outside = symbol.is_referenced() or symbol.get_name() not in defined
            else:
                outside = symbol.is_global() and symbol.is_referenced()
            if outside:
                names.add(symbol.get_name())
    return names


def _scopes(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _scopes(child)


def _parsed(text: str) -> tuple[ast.Module, list[str]]:
    """The tree and lines of a cell; lines that only IPython understands count as empty."""
    lines = text.splitlines(keepends=True)
    try:
        return ast.parse(text), lines
    except SyntaxError:
        plain = ["pass\n" if line.startswith(("%", "!")) else line for line in lines]
        plain = ["pass\n" if line.rstrip().endswith("?") else line for line in plain]
        try:
            return ast.parse("".join(plain)), lines
        except SyntaxError:
            return ast.Module(body=[], type_ignores=[]), lines


def _member(thing: Any, method: str | None) -> Any:
    return vars(thing).get(method, thing) if method and isinstance(thing, type) else thing

"""Mutants of a function or class: its source with one small fault, made on the syntax tree."""

from __future__ import annotations

import ast
import copy
import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise

BOUNDARY = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
NEGATED = {
    ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mod, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
PAIRS = [
    ("min", "max"), ("minimum", "maximum"), ("any", "all"), ("sin", "cos"), ("zeros", "ones"),
    ("zeros_like", "ones_like"), ("argmin", "argmax"), ("amin", "amax"), ("floor", "ceil"),
    ("sum", "mean"), ("triu", "tril"), ("startswith", "endswith"), ("lstrip", "rstrip"),
]  # fmt: skip
FUNCTIONS = dict(PAIRS) | {right: left for left, right in PAIRS}
CASTS = {"to", "float", "half", "bfloat16", "double", "long", "int", "bool", "type_as"}
COPIES = {"clone", "contiguous", "copy", "detach"}
PLAIN_CASTS, PLAIN_COPIES = {"int", "float", "bool"}, {"list", "tuple", "set", "dict"}
PLAIN_ORDERS = {"sorted", "reversed"}
UNMUTATED = {"decorator_list", "annotation", "returns", "msg", "bases", "format_spec"}
DENIED = (ast.LtE, ast.NotEq, ast.IsNot, ast.NotIn)
FIXED = (
    ast.FunctionDef, ast.Return, ast.Break, ast.Continue, ast.Pass, ast.Import, ast.ImportFrom,
)  # fmt: skip
COMMUTATIVE = {
    "max", "min", "maximum", "minimum", "equal", "allclose", "logical_and", "logical_or",
    "transpose", "promote_types",
}  # fmt: skip
AXES = {"dim", "axis", "dims"}
AXIS_METHODS = {
    "transpose", "unsqueeze", "squeeze", "sum", "mean", "softmax", "log_softmax", "max", "min",
    "argmax", "amax", "amin", "cumsum", "flip", "sort", "flatten", "permute", "movedim", "stride",
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One fault: its kind, the changed lines (as in `ast.unparse`), the source."""

    operator: str
    old: str
    new: str
    source: str


def mutants_of(source: str) -> list[Mutant]:
    """All mutants of a definition, without those of equal meaning that the syntax shows.

    Docstrings, annotations, decorators and the messages of errors are not mutated.
    """
    tree = ast.parse(source)
    _strip_docstrings(tree)
    before = ast.unparse(tree)
    seen, found = {_canonical(before)}, []

    def note(operator: str, *told: str) -> None:
        try:
            text = ast.unparse(ast.fix_missing_locations(tree))
            compile(text, "<mutant>", "exec")
        except (SyntaxError, ValueError):
            return
        same = _canonical(text)
        if same not in seen:
            seen.add(same)
            found.append(Mutant(operator, *(told or _changed_lines(before, text)), text))

    for holder, index, statement in list(_statements(tree)):
        _mutate_statement(holder, index, statement, note)
    names = _Names(tree)
    for parent, field, index, node in list(_slots(tree)):
        for operator, new in _replacements(node, parent, field, names):
            _put(parent, field, index, new)
            note(operator)
        _put(parent, field, index, node)
    for _, _, statement in list(_statements(tree)):
        _swap_names(statement, names, note)
    return found


# statements --------------------------------------------------------------------------------------


def _statements(tree: ast.AST) -> Iterator[tuple[list, int, ast.stmt]]:
    """(the list that holds it, its index, the statement), for each statement inside a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef):
            continue
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                yield from ((block, i, s) for i, s in enumerate(block) if isinstance(s, ast.stmt))


def _mutate_statement(block: list, index: int, statement: ast.stmt, note: Callable) -> None:
    if isinstance(statement, ast.Assign) and hasattr(statement, "unmutated"):
        return
    before = list(block)
    if not isinstance(
        statement, ast.Pass | ast.Import | ast.ImportFrom | ast.Global | ast.Nonlocal
    ):
        block[:] = [*before[:index], *before[index + 1 :]] or [ast.Pass()]
        note("dropped guard" if _is_guard(statement) else "dropped statement")
    if index + 1 < len(before) and _depend(statement, before[index + 1]):
        block[:] = [*before[:index], before[index + 1], statement, *before[index + 2 :]]
        one, other = _header(statement), _header(before[index + 1])
        note("swapped statements", f"{one} / {other}", f"{other} / {one}")
    block[:] = before
    if isinstance(statement, ast.If):
        orelse = statement.orelse
        if orelse:
            statement.orelse = []
            note("dropped branch")
            statement.orelse = orelse
        test = statement.test
        statement.test = ast.UnaryOp(ast.Not(), test)
        note("swapped branches")
        statement.test = ast.Constant(True)
        note("dropped condition")
        statement.test = test
    if isinstance(statement, ast.Break | ast.Continue):
        block[index] = ast.Continue() if isinstance(statement, ast.Break) else ast.Break()
        note("swapped jump")
        block[index] = statement
    if isinstance(statement, ast.AugAssign) and type(statement.op) in OPERATORS:
        op = statement.op
        statement.op = OPERATORS[type(op)]()
        note("changed operator")
        statement.op = op
        block[index] = ast.Assign([statement.target], statement.value, lineno=0)
        note("changed operator")
        block[index] = statement


def _is_check(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Assert) or _is_guard(statement)


def _header(statement: ast.stmt) -> str:
    return _masked(ast.unparse(statement)).splitlines()[0]


def _is_guard(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Raise)


def _depend(one: ast.stmt, other: ast.stmt) -> bool:
    """Whether the order of two neighbouring statements can matter."""
    if isinstance(one, FIXED) or isinstance(other, FIXED):
        return False
    stored, loaded = _touched(one)
    stored_2, loaded_2 = _touched(other)
    if stored & (loaded_2 | stored_2) or stored_2 & loaded:
        return True
    if isinstance(one, ast.Assign) and isinstance(other, ast.Assign):
        return False  # two places
    if _is_check(one) and _is_check(other):
        return False  # two reasons to refuse
    return _has_effect(one) and _has_effect(other)


def _touched(statement: ast.stmt) -> tuple[set[str], set[str]]:
    stored, loaded = set(), set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name):
            (loaded if isinstance(node.ctx, ast.Load) else stored).add(node.id)
        elif isinstance(node, ast.Attribute):
            (loaded if isinstance(node.ctx, ast.Load) else stored).add(ast.unparse(node))
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        loaded.add(statement.target.id)
    return stored, loaded


def _has_effect(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Assign):
        return not all(isinstance(x, ast.Name | ast.Tuple) for x in statement.targets)
    if isinstance(statement, ast.AugAssign):
        return not isinstance(statement.target, ast.Name)
    return not isinstance(statement, ast.AnnAssign)


# expressions -------------------------------------------------------------------------------------


def _slots(tree: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
    """(parent, field, index in the field, node) of each expression that may be mutated."""
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            if _skipped(parent, field):
                continue
            if isinstance(value, ast.expr | ast.slice):
                yield parent, field, None, value
            elif isinstance(value, list):
                for index, item in enumerate(value):
                    if isinstance(item, ast.expr):
                        yield parent, field, index, item


def _skipped(parent: ast.AST, field: str) -> bool:
    if isinstance(parent, ast.keyword) and parent.arg == "strict":
        return True
    return getattr(parent, "unmutated", False) or field in UNMUTATED


def _put(parent: ast.AST, field: str, index: int | None, node: ast.AST) -> None:
    if index is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[index] = node


def _replacements(
    node: ast.AST, parent: ast.AST, field: str, names: _Names
) -> Iterator[tuple[str, ast.AST]]:
    """(the operator's name, the node that replaces this node)"""
    match node:
        case ast.Compare():
            yield from _compares(node)
        case ast.BoolOp(op=op, values=values):
            yield (
                "changed operator",
                ast.BoolOp(ast.And() if isinstance(op, ast.Or) else ast.Or(), values),
            )
            for i in range(len(values)):
                rest = [*values[:i], *values[i + 1 :]]
                yield "dropped condition", rest[0] if len(rest) == 1 else ast.BoolOp(op, rest)
        case ast.BinOp(left=left, op=op, right=right):
            if type(op) in OPERATORS:
                yield "changed operator", ast.BinOp(left, OPERATORS[type(op)](), right)
            yield "dropped operand", left
            if isinstance(op, ast.Add | ast.Mult | ast.Pow):
                yield "dropped operand", right
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "changed operator", operand
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            yield "dropped minus", operand
            if isinstance(operand, ast.Constant) and type(operand.value) is int:
                told = _constant_kind(parent, field)
                yield told, _number(-operand.value + 1)
                yield told, _number(-operand.value - 1)
        case ast.Constant():
            if not isinstance(parent, ast.UnaryOp):
                yield from _constants(node, parent, field)
        case ast.Name(id=name, ctx=ast.Load()):
            for other in names.alike(name):
                yield "swapped name", ast.Name(other, ast.Load())
        case ast.Attribute(value=value, ctx=ast.Load()):
            for other in names.alike_attributes(node):
                yield "swapped name", ast.Attribute(value, other, ast.Load())
        case ast.Call():
            yield from _calls(node)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield "swapped branches", ast.IfExp(test, orelse, body)
            yield "dropped condition", body
            yield "dropped condition", orelse
        case ast.Slice():
            yield from _slices(node)
        case ast.Tuple(elts=elements, ctx=ctx):
            for i in range(len(elements) - 1):
                swapped = [*elements[:i], elements[i + 1], elements[i], *elements[i + 2 :]]
                yield "swapped elements", ast.Tuple(swapped, ctx)
        case ast.List(elts=elements, ctx=ast.Load()):
            for i in range(len(elements)):
                yield "dropped element", ast.List([*elements[:i], *elements[i + 1 :]], ast.Load())


def _compares(node: ast.Compare) -> Iterator[tuple[str, ast.AST]]:
    for i, op in enumerate(node.ops):
        for table in (BOUNDARY, NEGATED):
            if type(op) in table:
                ops = [*node.ops[:i], table[type(op)](), *node.ops[i + 1 :]]
                yield "changed comparison", ast.Compare(node.left, ops, node.comparators)
    if len(node.ops) > 1:
        yield "dropped condition", ast.Compare(node.left, node.ops[:1], node.comparators[:1])
        last = ast.Compare(node.comparators[-2], node.ops[-1:], node.comparators[-1:])
        yield "dropped condition", last


def _number(value: int | float) -> ast.expr:
    return ast.Constant(value) if value >= 0 else ast.UnaryOp(ast.USub(), ast.Constant(-value))


def _constant_kind(parent: ast.AST, field: str) -> str:
    if isinstance(parent, ast.keyword) and parent.arg in AXES:
        return "changed axis"
    if isinstance(parent, ast.Call) and field == "args":
        func = parent.func
        if isinstance(func, ast.Attribute) and func.attr in AXIS_METHODS:
            return "changed axis"
    return "off by one"


def _constants(node: ast.Constant, parent: ast.AST, field: str) -> Iterator[tuple[str, ast.AST]]:
    value = node.value
    if value is True or value is False:
        yield "changed constant", ast.Constant(not value)
    elif type(value) is int:
        told = _constant_kind(parent, field)
        yield told, _number(value + 1)
        yield told, _number(value - 1)
    elif type(value) is float:
        other = {0.0: 1.0, 1.0: 0.0}.get(value, 2 * value)
        yield "changed constant", ast.Constant(other)
    elif type(value) is str and value in ("inf", "-inf"):
        yield "changed constant", ast.Constant("inf" if value == "-inf" else "-inf")
    elif type(value) is str and value and not isinstance(parent, ast.JoinedStr):
        yield "changed constant", ast.Constant(value + "_")


def _calls(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    func, args, keywords = node.func, node.args, node.keywords
    if isinstance(func, ast.Attribute):
        module = isinstance(func.value, ast.Name) and func.value.id in ("torch", "tl", "np", "math")
        if func.attr in CASTS and not module:
            yield "dropped cast", func.value
        if func.attr in COPIES and not module:
            yield "dropped copy", func.value
        if func.attr in FUNCTIONS:
            other = ast.Attribute(func.value, FUNCTIONS[func.attr], ast.Load())
            yield "swapped function", ast.Call(other, args, keywords)
    elif isinstance(func, ast.Name):
        if len(args) == 1 and not keywords and not isinstance(args[0], ast.Starred):
            plain = args[0]
            if isinstance(plain, ast.GeneratorExp):
                plain = None if func.id in PLAIN_COPIES else plain
            if plain is not None and func.id in PLAIN_CASTS:
                yield "dropped cast", plain
            if plain is not None and func.id in PLAIN_COPIES:
                yield "dropped copy", plain
            if plain is not None and func.id in PLAIN_ORDERS:
                yield "dropped order", plain
        if func.id in FUNCTIONS:
            yield "swapped function", ast.Call(ast.Name(FUNCTIONS[func.id]), args, keywords)
        if func.id == "range":
            yield from _ranges(node)
    for i, keyword in enumerate(keywords):
        if keyword.arg not in (None, "strict"):
            told = "dropped cast" if keyword.arg == "dtype" else "dropped argument"
            yield told, ast.Call(func, args, [*keywords[:i], *keywords[i + 1 :]])
    if len(args) > 1 and not isinstance(args[-1], ast.Starred):
        yield "dropped argument", ast.Call(func, args[:-1], keywords)
    for i in range(len(args) - 1):
        swapped = [*args[:i], args[i + 1], args[i], *args[i + 2 :]]
        yield "swapped arguments", ast.Call(func, swapped, keywords)


def _ranges(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    for i, bound in enumerate(node.args[:2]):
        if isinstance(bound, ast.Constant | ast.Starred):
            continue
        for op in (ast.Add(), ast.Sub()):
            moved = ast.BinOp(bound, op, ast.Constant(1))
            args = [*node.args[:i], moved, *node.args[i + 1 :]]
            yield "off by one", ast.Call(node.func, args, node.keywords)


def _slices(node: ast.Slice) -> Iterator[tuple[str, ast.AST]]:
    for field in ("lower", "upper", "step"):
        bound = getattr(node, field)
        if bound is None:
            continue
        yield "dropped bound", _sliced(node, field, None)
        signed = isinstance(bound, ast.UnaryOp) and isinstance(bound.operand, ast.Constant)
        if field != "step" and not isinstance(bound, ast.Constant) and not signed:
            for op in (ast.Add(), ast.Sub()):
                moved = ast.BinOp(bound, op, ast.Constant(1))
                yield "off by one", _sliced(node, field, moved)


def _sliced(node: ast.Slice, field: str, bound: ast.expr | None) -> ast.Slice:
    parts = {name: getattr(node, name) for name in ("lower", "upper", "step")}
    return ast.Slice(**parts | {field: bound})


# names -------------------------------------------------------------------------------------------


class _Names:
    """The names and attributes of a definition, and those that are easily confused."""

    def __init__(self, tree: ast.AST) -> None:
        self.local: set[str] = set()
        self.attributes: dict[str, set[str]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.arg):
                self.local.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.local.add(node.id)
            elif isinstance(node, ast.Attribute) and not getattr(node, "unmutated", False):
                base = ast.unparse(node.value)
                self.attributes.setdefault(base, set()).add(node.attr)
        self.local -= {"self", "cls"}

    def alike(self, name: str) -> list[str]:
        if name not in self.local:
            return []
        return [other for other in sorted(self.local) if _alike(name, other)]

    def alike_attributes(self, node: ast.Attribute) -> list[str]:
        base = ast.unparse(node.value)
        if base in ("torch", "tl", "np", "math", "F"):
            return []
        others = self.attributes.get(base, set())
        return [other for other in sorted(others) if _alike(node.attr, other)]


def _alike(one: str, other: str) -> bool:
    """Whether two names are similar: k and v; k_slot, v_slot and k_head; but not q and q_seq."""
    if one == other:
        return False
    if len(one) == len(other) == 1:
        return True
    parts, others = one.split("_"), other.split("_")
    if len(parts) == len(others) > 1:
        return sum(x != y for x, y in zip(parts, others, strict=True)) == 1
    return len(one) == len(other) and sum(x != y for x, y in zip(one, other, strict=True)) == 1


def _swap_names(statement: ast.stmt, names: _Names, note: Callable) -> None:
    """Swap each pair of local names within one statement (or one header)."""
    nodes = [
        node
        for node in _own(statement)
        if isinstance(node, ast.Name)
        and isinstance(node.ctx, ast.Load)
        and node.id in names.local
        and not getattr(node, "unmutated", False)
    ]
    order = list(dict.fromkeys(node.id for node in nodes))
    pairs = combinations(order, 2) if len(order) <= 5 else pairwise(order)
    for one, other in pairs:
        swap = {one: other, other: one}
        changed = [node for node in nodes if node.id in swap]
        for node in changed:
            node.id = swap[node.id]
        note("swapped names")
        for node in changed:
            node.id = swap[node.id]


def _own(statement: ast.stmt) -> Iterator[ast.AST]:
    """The nodes of a statement without the statements inside it."""
    queue = [child for child in ast.iter_child_nodes(statement) if not isinstance(child, ast.stmt)]
    if isinstance(statement, ast.FunctionDef):
        queue = []
    while queue:
        node = queue.pop(0)
        yield node
        queue.extend(c for c in ast.iter_child_nodes(node) if not isinstance(c, ast.stmt))


# texts -------------------------------------------------------------------------------------------


def _strip_docstrings(tree: ast.AST) -> None:
    """Remove docstrings, and mark what is not mutated: messages, annotations, decorators."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body[:] = node.body[1:] or [ast.Pass()]
        if isinstance(node, ast.Raise) or _is_warning(node):
            _mark(node)
        for field, value in ast.iter_fields(node):
            if field in UNMUTATED:
                for part in value if isinstance(value, list) else [value]:
                    _mark(part)
    _mark_reasons(tree)


def _mark_reasons(tree: ast.AST) -> None:
    """Mark assignments to names that only an error's message uses."""
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    for _ in assigned:  # a reason may be made of other reasons
        free = {n.id for n in names if isinstance(n.ctx, ast.Load) and not hasattr(n, "unmutated")}
        for node in assigned:
            targets = node.targets
            if all(isinstance(x, ast.Name) and x.id not in free for x in targets):
                _mark(node.value)
                node.unmutated = True


def _mark(node: ast.AST | None) -> None:
    for inner in ast.walk(node) if node is not None else ():
        inner.unmutated = True


def _is_warning(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith("warn")


def _changed_lines(before: str, after: str) -> tuple[str, str]:
    """The lines that differ, in both texts; messages of errors are written as `...`."""
    old, new = (_masked(text).splitlines() for text in (before, after))
    gone, come = [], []
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag != "equal":
            gone += [line.strip() for line in old[a:b]]
            come += [line.strip() for line in new[c:d]]
    return " / ".join(gone), " / ".join(come)


def _masked(text: str) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            node.exc.args, node.exc.keywords = [ast.Constant(...)], []
    return ast.unparse(tree)


def _canonical(text: str) -> str:
    return ast.unparse(_Canonical().visit(ast.parse(text)))


class _Canonical(ast.NodeTransformer):
    """Sorts parts whose order has no meaning, so that a swap of such parts is no mutant."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.Mult | ast.BitAnd | ast.BitOr):
            return self._sorted(node)
        signed = _signed(node, 1)
        if any(isinstance(term, ast.UnaryOp) for term in signed):  # a - b + c is c - b + a
            return ast.Call(ast.Name("signed"), sorted(signed, key=ast.unparse), [])
        if isinstance(node.op, ast.Add) and any(map(_numeric, _terms(node, ast.Add))):
            return self._sorted(node)
        return node

    def _sorted(self, node: ast.BinOp) -> ast.AST:
        terms = sorted(_terms(node, type(node.op)), key=ast.unparse)
        result = terms[0]
        for term in terms[1:]:
            result = ast.BinOp(result, node.op, term)
        return result

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if len(node.ops) != 1:
            return node
        left, op, right = node.left, node.ops[0], node.comparators[0]
        if isinstance(op, ast.Gt | ast.GtE):
            op = ast.Lt() if isinstance(op, ast.Gt) else ast.LtE()
            return ast.Compare(right, [op], [left])
        if isinstance(op, ast.In | ast.NotIn) and isinstance(right, ast.Tuple | ast.List | ast.Set):
            right = ast.Tuple(sorted(right.elts, key=ast.unparse), ast.Load())
        if isinstance(op, ast.Eq | ast.NotEq | ast.Is | ast.IsNot):
            left, right = sorted((left, right), key=ast.unparse)
        return ast.Compare(left, [op], [right])

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        inner = node.operand
        if isinstance(node.op, ast.Not) and isinstance(inner, ast.Compare) and len(inner.ops) == 1:
            op = NEGATED[type(inner.ops[0])]()
            return self.visit_Compare(ast.Compare(inner.left, [op], inner.comparators))
        if isinstance(node.op, ast.Not) and isinstance(inner, ast.UnaryOp):
            return inner.operand if isinstance(inner.op, ast.Not) else node
        return node

    def visit_If(self, node: ast.If | ast.IfExp) -> ast.AST:
        """One form for `A if x < y else B` and `B if x >= y else A`."""
        self.generic_visit(node)
        test, body, orelse = node.test, node.body, node.orelse
        if orelse and isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return type(node)(test.operand, orelse, body)
        compare = isinstance(test, ast.Compare) and len(test.ops) == 1
        if orelse and compare and isinstance(test.ops[0], DENIED):
            opposite = self.visit_UnaryOp(ast.UnaryOp(ast.Not(), test))
            return type(node)(opposite, orelse, body)
        return node

    visit_IfExp = visit_If

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in COMMUTATIVE and len(node.args) > 1:
            starred = any(isinstance(x, ast.Starred) for x in node.args)
            if not starred:
                node = copy.copy(node)
                node.args = sorted(node.args, key=ast.unparse)
        if name == "range" and len(node.args) == 2 and _is_constant(node.args[0], 0):
            node.args = node.args[1:]
        return node


def _terms(node: ast.AST, op: type) -> list[ast.AST]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, op):
        return _terms(node.left, op) + _terms(node.right, op)
    return [node]


def _signed(node: ast.AST, sign: int) -> list[ast.AST]:
    """The terms of a sum, the subtracted ones under a minus."""
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "signed":
        return node.args if sign > 0 else [_negative(term) for term in node.args]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        other = sign if isinstance(node.op, ast.Add) else -sign
        return _signed(node.left, sign) + _signed(node.right, other)
    return [node if sign > 0 else _negative(node)]


def _negative(node: ast.AST) -> ast.AST:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return node.operand
    return ast.UnaryOp(ast.USub(), node)


def _numeric(node: ast.AST) -> bool:
    """Whether a node is very likely a number or a tensor, whose + is commutative."""
    match node:
        case ast.Constant(value=value):
            return isinstance(value, int | float)
        case ast.BinOp(op=op):
            return isinstance(op, ast.Mult | ast.Sub | ast.Div | ast.FloorDiv | ast.Pow | ast.Mod)
        case ast.Name():
            return True
        case ast.Subscript(slice=ast.Tuple(elts=elements)):
            return any(_is_constant(x, None) for x in elements)
        case ast.Call(func=ast.Attribute(attr=attr)):
            return attr in ("arange", "program_id", "size", "numel")
    return False


def _is_constant(node: ast.AST, value: object) -> bool:
    same = isinstance(node, ast.Constant) and type(node.value) is type(value)
    return same and node.value == value

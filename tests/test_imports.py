"""No import cycle between the package's modules, lazy imports included."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "nanoserve"


def imports() -> dict[str, set[str]]:
    """Each module of the package, and the modules of the package that it imports anywhere."""
    names = {path.relative_to(PACKAGE.parent).with_suffix("") for path in PACKAGE.rglob("*.py")}
    modules = {".".join(name.parts).removesuffix(".__init__"): name for name in names}
    found: dict[str, set[str]] = {}
    for module, name in modules.items():
        tree = ast.parse((PACKAGE.parent / name).with_suffix(".py").read_text(encoding="utf-8"))
        used = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                used |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                both = [(f"{node.module}.{alias.name}", node.module) for alias in node.names]
                used |= {inner if inner in modules else outer for inner, outer in both}
        found[module] = {name for name in used if name in modules} - {module}
    return found


def test_no_module_imports_itself_through_others():
    graph = imports()
    assert "nanoserve.course.publish" in graph["nanoserve.course.sync"]
    TopologicalSorter(graph).prepare()  # CycleError names the modules of a cycle

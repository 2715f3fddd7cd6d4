"""The rules of the tree: imports go down and not round, files are worth opening, tests use public names."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest

SOURCE: Final = Path(__file__).resolve().parents[2] / "src"
TESTS: Final = Path(__file__).resolve().parents[1]
PACKAGES: Final = ("nerite", "triton_python_backend_utils", "c_python_backend_utils")
ROOMS: Final = (
    "ray",
    "tools",
    "pytriton",
    "tritonserver",
    "functions",
    "sources",
    "cli",
    "server_process",
    "server_components",
    "picker",
    "router",
    "kubernetes",
    "fronts",
    "transports llm.openai",
    "batches",
    "rollouts",
    "server",
    "inference_entry",
    "regions",
    "testing",
    "repository",
    "routes",
    "models",
    "workers",
    "ensembles",
    "admission",
    "ledger",
    "dispatch",
    "instances",
    "cache",
    "redis",
    "scheduling",
    "llm",
    "frameworks",
    "backends",
    "devices",
    "observability",
    "artifacts",
    "cluster",
    "config",
    "client",
    "judge",
    "autoscaling",
    "balancing",
    "storage",
    "core",
)
"""From top to bottom. A room imports only rooms below it; two in one line may import each other's files."""
LEAVES: Final = ("wire", "http2")
"""Import no room; any room may import them."""
GROUPS: Final = {
    "tools": ("ray", "tools", "artifacts", "client", "testing"),
    "language models": ("llm", "llm.openai"),
    "frameworks": ("frameworks",),
    "functions": ("functions", "pytriton", "tritonserver"),
    "models by name": ("sources",),
}
"""What is not the server. The server imports none of it, but for what ``SEAMS`` lists."""
SEAMS: Final = {
    ("fronts", "llm.openai"): "a front answers /v1 itself",
    ("transports", "llm.openai"): "the router of the HTTP port leads /v1 there",
    ("server_components", "llm"): "the composition root knows how a file shows what a language model does",
    ("server_components", "llm.openai"): "the composition root opens the responses that are kept",
    ("router", "llm.openai"): "errors under /v1 have OpenAI's format",
    ("admission", "llm"): "what a request asks of an engine is estimated before it is queued",
    ("repository", "artifacts"): "a load that fails is told what is plainly wrong with the files",
}
LONGEST: Final = 600
SHORTEST: Final = 40
SHORT: Final = {
    "nerite/artifacts/programs/classify_text.py": "copied into repositories as it is",
    "nerite/artifacts/programs/embed_text.py": "copied into repositories as it is",
    "nerite/functions/command.py": "a server of repositories loads nothing else of the package",
    "nerite/pytriton/client/auth.py": "a module that PyTriton has",
    "nerite/wire/ext_proc.py": "the messages have their names from the schema",
    "nerite/wire/external_scaler.py": "the messages have their names from the schema",
    "nerite/wire/fields.py": "imported by workers, which have no protobuf package",
    "nerite/wire/grpc_service.py": "the messages have their names from the schema",
    "nerite/wire/health.py": "the messages have their names from the schema",
    "nerite/wire/model_config.py": "the messages have their names from the schema",
}
"""Files below the floor, and why. ``__init__.py`` may have any length."""

FILES: Final = sorted(path for package in PACKAGES for path in (SOURCE / package).rglob("*.py"))
NAMES: Final = [str(path.relative_to(SOURCE)) for path in FILES]


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES: Final = {module_of(path): path for path in FILES}


@functools.cache
def tree_of(module: str) -> ast.Module:
    """Return the syntax tree of a module; here, because every process that runs tests imports this file."""
    return ast.parse(MODULES[module].read_text())


def imported(module: str) -> Iterator[str]:
    """Yield the modules of ours that a module imports, wherever in it, those for its types alone included."""
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in MODULES:
                    yield inner
                elif node.module in MODULES:
                    yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)


def room_of(module: str) -> str:
    parts = module.split(".")
    if parts[0] != "nerite" or len(parts) == 1:
        return ""
    return "llm.openai" if parts[1:3] == ["llm", "openai"] else parts[1]


HEIGHT: Final = {room: -height for height, rooms in enumerate(ROOMS) for room in rooms.split()}


@pytest.mark.parametrize("module", [module for module in MODULES if room_of(module)])
def test_imports_go_down(module: str) -> None:
    here = room_of(module)
    wrong = []
    for other in imported(module):
        there = room_of(other)
        if there in ("", here) or (there in LEAVES and here not in LEAVES):
            continue
        if here in LEAVES or HEIGHT[there] > HEIGHT[here]:
            wrong.append(other)
    assert wrong == []


def test_the_architecture_page_has_the_rooms_from_top_to_bottom() -> None:
    page = (SOURCE.parent / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| (`src/.*?) \|", page.partition("## Packages")[2], re.MULTILINE)
    named = [re.findall(r"src/nerite/([\w/]+?)(?:/|\.py)`", row) for row in rows]
    heights = [[HEIGHT[name.replace("/", ".")] for name in row if name not in LEAVES] for row in named]
    assert {name.replace("/", ".") for row in named for name in row} == {*HEIGHT, *LEAVES}
    wrong = [
        row
        for row, (above, below) in zip(rows[1:], pairwise(heights), strict=True)
        if below and min(above) < max(below)
    ]
    assert wrong == []


def test_every_room_is_known() -> None:
    assert {room_of(module) for module in MODULES} - {""} == {*HEIGHT, *LEAVES}


def test_the_server_imports_no_other_group() -> None:
    others = {room: group for group, rooms in GROUPS.items() for room in rooms}
    seams = set()
    for module in MODULES:
        here = room_of(module)
        if here in others or here in ("", "cli"):
            continue
        for other in imported(module):
            if room_of(other) in others:
                seams.add((here, room_of(other)))
    assert seams == set(SEAMS)


def test_no_imports_go_round() -> None:
    """Tarjan's algorithm: a strongly connected component of more than one file is a cycle."""
    edges = {module: sorted(set(imported(module)) - {module}) for module in MODULES}
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    cycles = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in edges[module]:
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            component = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(component) > 1:
                cycles.append(sorted(component))

    for module in MODULES:
        if module not in index:
            visit(module)
    assert cycles == []


def test_no_public_class_has_the_name_of_another() -> None:
    """Classes of ``pb_utils`` have the names that Triton gives them, and models in ``programs`` that of their base.

    So have those that answer as PyTriton and as Triton's in-process package.
    """
    places = defaultdict(list)
    for module in MODULES:
        if room_of(module) in ("", "pytriton", "tritonserver") or ".programs." in module:
            continue
        for node in tree_of(module).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


@pytest.mark.parametrize("name", NAMES)
def test_files_are_worth_opening(name: str) -> None:
    lines = len((SOURCE / name).read_text().splitlines())
    assert lines <= LONGEST
    assert name.endswith("__init__.py") or lines >= SHORTEST or name in SHORT


@pytest.mark.parametrize("module", list(MODULES))
def test_a_caught_error_is_kept_without_its_frames(module: str) -> None:
    """In a local it has that frame, which has it: the request, too, is there until the collector finds them."""
    if room_of(module) == "testing":  # what it raises is for people, with its frames
        return
    wrong = []
    handlers = [node for node in ast.walk(tree_of(module)) if isinstance(node, ast.ExceptHandler)]
    for handler in handlers:
        if handler.name and "NeriteError" in ast.unparse(handler.type or handler):
            for node in ast.walk(handler):
                if isinstance(node, ast.Assign | ast.Return) and node.value is not None:
                    values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
                    wrong += [node.lineno for value in values if ast.unparse(value) == handler.name]
    assert wrong == []


PUBLIC: Final = frozenset({"_asdict", "_exit", "_getframe", "_replace"})
"""Documented methods of named tuples, and functions of ``os`` and ``sys``, whose names begin with an underscore."""
OWNERS: Final = frozenset({"self", "cls", "super()", "torch._C"})
"""What has attributes that a test may use although they are private: its own classes, and the core of PyTorch."""
TAKING_NAMES: Final = frozenset({"getattr", "setattr", "delattr", "hasattr", "patch", "object"})
"""Functions that take the name of an attribute, or its path, as text."""


def private_names(tree: ast.AST) -> list[str]:
    """Return each use of a name that is private to another file or class, with its line."""

    def is_private(name: str) -> bool:
        return name.startswith("_") and not name.startswith("__") and name not in PUBLIC

    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            wrong = is_private(node.attr) and not OWNERS & {ast.unparse(node), ast.unparse(node.value)}
        elif isinstance(node, ast.ImportFrom):
            wrong = any(is_private(alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in TAKING_NAMES:
            texts = [each.value for each in node.args[:2] if isinstance(each, ast.Constant)]
            wrong = any(is_private(str(text).rpartition(".")[2]) for text in texts)
        else:
            continue
        if wrong:
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("self._x + cls._y + super()._z + row._replace(a=1) + torch._C.f", False),
        ("a.__name__, getattr(a, '__name__'), setattr(a, 'b', '_c')", False),
        ("a._x", True),
        ("self.a._x", True),
        ("torch._D", True),
        ("from a import _x", True),
        ("patch.setattr(a, '_x', 1)", True),
        ("patch.setattr('a._x', 1)", True),
    ],
)
def test_what_is_a_private_name(text: str, wrong: bool) -> None:
    assert bool(private_names(ast.parse(text))) == wrong


def test_tests_use_public_names() -> None:
    """A test of what nobody else sees breaks when it is done in another way, though nothing else does."""
    found = {}
    for path in sorted(TESTS.rglob("*.py")):
        if "node_modules" not in path.parts and (wrong := private_names(ast.parse(path.read_text()))):
            found[str(path.relative_to(TESTS))] = wrong
    assert found == {}


def test_a_worker_needs_numpy_and_nothing_else() -> None:
    program = (
        "import sys, nerite.workers.child.worker, nerite.backends.python, triton_python_backend_utils\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    allowed = {"nerite", "triton_python_backend_utils", "numpy", "__main__", "__mp_main__"}
    loaded = {name for name in done.stdout.split() if not name.startswith(("_", "sitecustomize", "cython_runtime"))}
    assert loaded <= allowed


@pytest.mark.parametrize("process", ["router", "picker"])
def test_a_router_loads_nothing_that_runs_models(process: str) -> None:
    program = f"import sys, nerite.{process}.process\nprint(*{{'.'.join(name.split('.')[:2]) for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = {*done.stdout.split()}
    assert f"nerite.{process}" in loaded
    running = ("ensembles", "frameworks", "instances", "models", "workers")
    assert loaded.isdisjoint({*(f"nerite.{room}" for room in running), "triton_python_backend_utils"})

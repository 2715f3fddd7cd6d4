"""The rules of the house: a room imports only rooms below it, workers need little, files stay small."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "nerite"
ROOMS = (
    "cli",
    "mlflow_plugin",
    "server_process",
    "welcome",
    "transports",
    "server",
    "regions",
    "testing",
    "analyze",
    "intake",
    "repository",
    "execution",
    "cache",
    "scheduling",
    "backends",
    "observability",
    "artifacts",
    "config",
    "bench",
    "client",
    "core",
)
"""From top to bottom."""
LEAVES = ("wire", "http2")
"""Import no room; any room may import them."""
LONGEST = 600
FILES = sorted(SOURCE.rglob("*.py"))


def room_of(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def imported(path: Path) -> Iterator[str]:
    """Yield the modules of ours that a file imports, wherever in it; not those it needs for its types alone."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "nerite":
                yield from (f"nerite.{alias.name}" for alias in node.names)
            else:
                yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_down(path: Path) -> None:
    here = room_of(path)
    if here in ("__init__", "__main__"):
        return
    wrong = []
    for module in imported(path):
        parts = module.split(".")
        if parts[0] != "nerite" or len(parts) < 2 or parts[1] in (here, "__version__"):
            continue
        there = parts[1]
        if there in LEAVES and here not in LEAVES:
            continue
        if here in LEAVES or there not in ROOMS or ROOMS.index(there) < ROOMS.index(here):
            wrong.append(module)
    assert wrong == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_stay_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LONGEST


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_caught_error_is_kept_without_its_frames(path: Path) -> None:
    """In a local it has that frame, which has it: the request, too, is there until the collector finds them."""
    if room_of(path) == "testing":  # what it raises is for people, with its frames
        return
    wrong = []
    handlers = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ExceptHandler)]
    for handler in handlers:
        if handler.name and "NeriteError" in ast.unparse(handler.type or handler):
            for node in ast.walk(handler):
                if isinstance(node, ast.Assign | ast.Return) and node.value is not None:
                    values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
                    wrong += [node.lineno for value in values if ast.unparse(value) == handler.name]
    assert wrong == []


def test_every_room_is_known() -> None:
    rooms = {room_of(path) for path in FILES} - {"__init__", "__main__"}
    assert rooms <= {*ROOMS, *LEAVES}


def test_a_worker_needs_numpy_and_nothing_else() -> None:
    program = (
        "import sys, nerite.execution.worker, nerite.backends.python, triton_python_backend_utils\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    allowed = {"nerite", "triton_python_backend_utils", "numpy", "__main__", "__mp_main__"}
    loaded = {name for name in done.stdout.split() if not name.startswith(("_", "sitecustomize", "cython_runtime"))}
    assert loaded <= allowed

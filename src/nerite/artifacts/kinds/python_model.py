"""A model in Python: a ``model.py`` with Triton's class, or a directory with one and what it needs."""

from __future__ import annotations

import ast
from pathlib import Path

from nerite.artifacts.artifact import Artifact, Unusable
from nerite.artifacts.candidate import Candidate
from nerite.config.model_config import ModelConfig

_CLASS = "TritonPythonModel"


def recognise(candidate: Candidate) -> Artifact | None:
    """Return a model in Python."""
    path = candidate.path
    if candidate.is_directory:
        code = path / "model.py"
        if not code.is_file():
            return None
        files = {child.name: child for child in sorted(path.iterdir()) if _belongs(child.name)}
    elif candidate.suffix == ".py":
        code = path
        files = {"model.py": path}
    else:
        return None
    _check(code)
    return Artifact("Python model", path, candidate.name, ModelConfig(backend="python"), files)


def _check(code: Path) -> None:
    """Raise ``Unusable`` for what cannot be a model, as far as that is seen without running it."""
    try:
        tree = ast.parse(code.read_bytes(), str(code))
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise Unusable(code, f"this is no Python{line}: {error}", "Mend it, and see that it can be imported.") from None
    nodes = list(ast.walk(tree))
    imported = {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    assigned = {node.id for node in nodes if isinstance(node, ast.Name)}
    found = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name == _CLASS]
    if not found and not {_CLASS, "*"} & (imported | assigned):
        remedy = f"Write a class {_CLASS} with a method execute(self, requests): docs/python-models.md"
        raise Unusable(code, f"there is no class {_CLASS} in it", remedy)
    if any(not each.bases and not _has_execute(each) for each in found):
        remedy = "Write it: def execute(self, requests), which returns a response to each: docs/python-models.md"
        raise Unusable(code, f"the class {_CLASS} has no method execute", remedy)


def _has_execute(definition: ast.ClassDef) -> bool:
    methods = (ast.FunctionDef, ast.AsyncFunctionDef)
    named = {node.name for node in definition.body if isinstance(node, methods)}
    assigned = {node.id for node in ast.walk(definition) if isinstance(node, ast.Name)}
    return "execute" in named | assigned


def _belongs(name: str) -> bool:
    return name != "__pycache__" and not name.startswith(".")

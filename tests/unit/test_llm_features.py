"""The table of features in docs/llm.md: what it says yes to has a test on the real engine, and no other has."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

from pages import rows

TESTS = Path(__file__).parents[1]
SAYS_YES, SAYS_NO = "yes", "no"
MARK = "pytest.mark.feature"


def test_each_yes_has_a_test_and_each_test_a_yes() -> None:
    table = rows("docs/llm.md", "feature")
    cells = {(engine.strip("`"), name): cell for name, row in table.items() for engine, cell in row.items()}
    assert set(cells.values()) <= {SAYS_YES, SAYS_NO}
    assert {cell for cell, said in cells.items() if said == SAYS_YES} == set(shown())


def shown() -> Iterator[tuple[str, str]]:
    """Yield the engine and the feature of each mark on a test."""
    for folder, folders, files in os.walk(TESTS):
        folders[:] = [name for name in folders if name != "node_modules"]
        for file in files:
            if file.startswith("test_") and file.endswith(".py"):
                text = (Path(folder) / file).read_text()
                if MARK in text:
                    yield from timings(ast.parse(text))


def timings(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == MARK:
                    engine, name = (ast.literal_eval(argument) for argument in mark.args)
                    yield engine, name

"""What docs/security.md says is shown by a test, is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def functions_of(path: Path) -> set[str]:
    """Return the names of the functions of a file."""
    body = ast.parse(path.read_text()).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_test_that_is_named_is_there() -> None:
    named = NAMED.findall(PAGE)
    assert len(named) > 40
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not (ROOT / file).is_file() or name not in functions_of(ROOT / file)
    ]
    assert missing == []


def test_every_attack_has_an_answer_and_a_test() -> None:
    table = PAGE.partition("## Classes of attacks")[2].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table if line.startswith("|")]
    head, _, *attacks = rows
    assert head == ["attack", "found in", "defence", "shown by"]
    assert len(attacks) > 25
    assert [attack[0] for attack in attacks if len(attack) != 4 or not attack[2] or not NAMED.search(attack[3])] == []

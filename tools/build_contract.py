"""Writes docs/contract.md from tests/ledger/."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from ledger.page import page  # noqa: E402  # the path has to be set first


def main() -> None:
    """Write the page."""
    (ROOT / "docs" / "contract.md").write_text(page())


if __name__ == "__main__":
    main()

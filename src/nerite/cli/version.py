"""``nerite version``."""

from __future__ import annotations

from collections.abc import Sequence

import nerite


def run(arguments: Sequence[str]) -> int:
    """Print the version; return the exit status."""
    print(f"nerite {nerite.__version__}")
    return 0

"""Servers whose models run on the real vLLM, where `nerite engines install vllm` has run.

Its environment has 2.2 GB, which no run of all tests can fetch. What needs no vLLM is in tests/unit/backends.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import serving
from nerite.backends.python.environments import environments_folder
from nerite.llm import installation
from serving import Serving

_PYTHON = installation.found(installation.vllm(), environments_folder())
WHERE_VLLM_IS = [
    pytest.mark.timeout(900),  # its import alone takes ten seconds, and the first answer some more
    pytest.mark.skipif(_PYTHON is None, reason="vLLM is not installed: nerite engines install vllm"),
]


@contextlib.contextmanager
def vllm_serving(models: Path, log: Path) -> Iterator[Serving]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "PATIENCE", 500)
        with serving.serving(models, log) as running:
            yield running


def run_beside_vllm(code: str) -> None:
    """Run Python where vLLM and what it needs are installed."""
    assert _PYTHON is not None
    done = subprocess.run([_PYTHON, "-c", code], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

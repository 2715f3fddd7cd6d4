"""Leaves the process as it was: no test sees the modules of another test's Python models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from python_model_files import close_models


@pytest.fixture(autouse=True)
def python_models_are_closed() -> Iterator[None]:
    yield
    close_models()

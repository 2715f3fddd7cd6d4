"""Fixtures of several tests with real servers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from postgres_server import postgres_server


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with postgres_server(tmp_path_factory.mktemp("postgres")) as location:
        yield location

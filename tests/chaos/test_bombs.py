"""Bodies made to be expensive, to every endpoint of every process that reads what clients send: nobody else waits.

What they cost exactly is measured by ``benchmarks/bombs.py``.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bombed import TARGETS
from bombs import Watch, bombs, costing, grpc_bombs
from raw_grpc import INFER, STREAM, RawGrpc, framed

SIZE = int(os.environ.get("NERITE_TEST_BOMB_BYTES", "700000"))
"""Bytes of each body for each endpoint: more than any that is parsed where it arrives."""
LARGE = 32_000_000
LOOP_SECONDS = 1.2
"""Processor time that a loop may take for ``LARGE``: a quarter is usual, and parsing takes twice as much."""
_PARSED = ("/infer", "/generate", "/index", "/completions", "/batches", "_adapter")
PER_BYTE = 4
CONSTANT = 64 << 20
"""Bytes of memory that any body may take."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [*TARGETS])
def test_every_body_to_every_endpoint(name: str, tmp_path: Path) -> None:
    with TARGETS[name](tmp_path) as target, Watch(target.healthy) as watch:
        for path in target.paths:
            for bomb in bombs(SIZE):
                cost = target.cost(path, bomb)
                assert cost.grown < PER_BYTE * bomb.size + CONSTANT, (path, bomb.name, cost)
                assert not watch.wrong, (path, bomb.name, watch.wrong)
        assert watch.answered


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [*TARGETS])
def test_large_bodies(name: str, tmp_path: Path) -> None:
    lists, sequence = (next(bomb for bomb in bombs(LARGE) if bomb.name == kind) for kind in ("lists", "a sequence"))
    with TARGETS[name](tmp_path) as target:
        for path in (path for path in target.paths if path.endswith(_PARSED)):
            bomb = sequence if "/v2/models" in path else lists
            with Watch(target.healthy) as watch:
                cost = target.cost(path, bomb)
            assert watch.answered and not watch.wrong, (path, watch.wrong)
            assert cost.seconds < LOOP_SECONDS, (path, cost)
            assert cost.grown < PER_BYTE * bomb.size + CONSTANT, (path, cost)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["server", "fronts", "router"])
def test_messages_over_grpc(name: str, tmp_path: Path) -> None:
    with TARGETS[name](tmp_path) as target, Watch(target.healthy) as watch:
        for bomb in grpc_bombs(4 * SIZE):
            for path in (INFER, STREAM):
                with costing(*target.processes) as cost:
                    raw = RawGrpc(target.running)
                    stream = raw.begin(path, **({"grpc_encoding": "gzip"} if bomb.unpacked else {}))
                    raw.send(stream, framed(bomb.body, compressed=bool(bomb.unpacked)), end=True)
                    assert raw.closed or raw.status(stream)[0] >= 0
                    raw.close()
                    spent = cost()
                assert spent.grown < PER_BYTE * bomb.size + CONSTANT, (path, bomb.name, spent)
                assert spent.seconds < LOOP_SECONDS, (path, bomb.name, spent)
                assert not watch.wrong, (path, bomb.name, watch.wrong)
        assert watch.answered

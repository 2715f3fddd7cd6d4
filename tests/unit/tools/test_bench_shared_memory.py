from __future__ import annotations

from multiprocessing.shared_memory import SharedMemory
from typing import Any, cast

import pytest

from nerite.client import ClientError
from nerite.tools.bench.forms import BenchTensor, RegionPlace
from nerite.tools.bench.session import BenchedServer, BenchRegions


class Knowing:
    """A server that knows regions."""

    def __init__(self, most: int = 10) -> None:
        self.most = most
        self.regions: dict[str, tuple[str, int]] = {}

    def register_shared_memory(self, region: str, key: str, size: int) -> None:
        if len(self.regions) == self.most:
            raise ClientError("no more")
        self.regions[region] = key, size

    def unregister_shared_memory(self, region: str) -> None:
        del self.regions[region]


def regions(server: Knowing) -> BenchRegions:
    return BenchRegions(cast(BenchedServer, server))


def exists(name: str) -> bool:
    try:
        SharedMemory(name).close()
    except FileNotFoundError:
        return False
    return True


def test_inputs_and_outputs_lie_side_by_side_and_are_gone_in_the_end() -> None:
    server = Knowing()
    with regions(server) as held:
        given = [BenchTensor("a", "UINT8", (3,), b"one"), BenchTensor("b", "UINT8", (5,), b"three")]
        places: list[Any] = [tensor.data for tensor in held.inputs(given)]
        outputs = held.outputs(["c", "d"], 10)
        assert [place.size for place in places] == [3, 5]
        (name,) = {place.region for place in places}
        memory = SharedMemory(name)
        assert [bytes(memory.buf[place.offset : place.offset + place.size]) for place in places] == [b"one", b"three"]
        memory.close()
        assert [output.place for output in outputs] == [
            RegionPlace(outputs[0].place.region, 10, 0) if outputs[0].place else None,
            RegionPlace(outputs[0].place.region, 10, 64) if outputs[0].place else None,
        ]
        names = list(server.regions)
        assert all(key == f"/{region}" and size >= 64 for region, (key, size) in server.regions.items())
        assert all(map(exists, names))
    assert server.regions == {}
    assert not any(map(exists, names))


def test_nothing_stays_where_the_server_refuses() -> None:
    server = Knowing(most=0)
    with pytest.raises(ClientError, match="no more"), regions(server) as held:
        held.outputs(["a"], 1)
    assert server.regions == {}

"""Inferences that a front hands to the core with tensors in regions on GPUs, which only the core has opened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from front_channel import LARGE, Ends, answered, asked, response, tell, tensor, values

from doubles import Caller
from nerite.core.errors import NotFound
from nerite.core.request import RequestedOutput, SharedMemoryInput, SharedMemoryRequest
from nerite.core.response import InferenceResponse
from nerite.core.tensor import DeviceBuffer
from nerite.devices.cuda import HANDLE_SIZE
from nerite.devices.devices import ClientMemory
from nerite.regions import SharedMemoryRegions

BASE = 1 << 40
"""Address of the memory that the core opens."""


class Stream:
    """Notes the copies that it is asked for."""

    def __init__(self) -> None:
        self.copies: list[tuple[int, int]] = []

    def to_device(self, target: int, source: int, size: int) -> None:
        self.copies.append((target - BASE, size))

    def wait(self) -> None:
        """Do nothing: they are complete."""


class Devices:
    """A GPU that does at once what it is asked to do."""

    usable = True

    def __init__(self) -> None:
        self.stream = Stream()

    async def open_client_memory(self, device: int, handle: bytes) -> ClientMemory:
        return ClientMemory(BASE, 2 * LARGE, lambda: None)

    def thread(self, device: int) -> Any:
        return self

    def do(self, job: Callable[[Stream], None], done: Callable[[object, None], None]) -> None:
        job(self.stream)
        done(None, None)


class Regions:
    """The regions of a core and those of a front, with one on a GPU."""

    def __init__(self, ends: Ends) -> None:
        self.devices: Any = Devices()
        self.core, self.front = (
            SharedMemoryRegions(allowed=True, devices=self.devices),
            SharedMemoryRegions(allowed=True),
        )
        server: Any = ends.server
        server.regions = self.core

    async def register(self) -> None:
        await self.core.register_cuda("r", bytes(HANDLE_SIZE), 0, 2 * LARGE)

    def tell(self) -> None:
        """Have the front know them."""
        self.front.follow(self.core.registered)

    def request(self, caller: Caller, size: int, outputs: tuple[int, ...] = ()) -> SharedMemoryRequest:
        """Return a front's request with two inputs, the second in the region, and outputs there at these offsets."""
        wanted = [
            RequestedOutput(f"OUT{index}", place=SharedMemoryInput("r", offset, LARGE))
            for index, offset in enumerate(outputs)
        ]
        header = asked(3, size, outputs=wanted, shared=True)
        if wanted:
            header = header.with_device_outputs(frozenset(each.name for each in wanted))
        data = [tensor(3), self.front.read(SharedMemoryInput("r", 64, size), lambda _: None)]
        request = SharedMemoryRequest(header, data, caller, 123)
        request.regions = self.front.use(request, ["r"])
        return request


@pytest.mark.parametrize("size", [8, LARGE])
def test_tensors_on_a_gpu_stay_there(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        regions = Regions(ends)
        await regions.register()
        regions.tell()
        for turn in range(2):  # the header of the second one is known
            caller = Caller()
            ends.front.call(regions.request(caller, size, outputs=(1024,)))
            await ends.settle()
            received = ends.server.requests[turn]
            on_host, on_gpu = received.data
            assert not isinstance(on_host, DeviceBuffer) and bytes(on_host) == tensor(3)
            assert isinstance(on_gpu, DeviceBuffer)
            assert (on_gpu.device, on_gpu.address, on_gpu.size) == (0, BASE + 64, size)
            if turn:
                regions.core.unregister_cuda("r")
            assert regions.core.listed_cuda("r"), "it is in use"
            received.respond(response(size, 5))
            await ends.settle()
            ((_, answer, final),) = caller.answers
            assert (final, values(answer.buffers)) == (True, [b"", tensor(5, 2)]), "the first was written"
            assert answer.header is not None and answer.header.outputs == answered(size, 5).outputs
            assert regions.devices.stream.copies[turn:] == [(1024, size)]
        assert regions.core.listed_cuda("") == []

    tell(monkeypatch, story)


def test_several_responses_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        regions = Regions(ends)
        await regions.register()
        regions.tell()
        caller = Caller()
        ends.front.call(regions.request(caller, 8, outputs=(0, LARGE)))
        await ends.settle()
        replied = answered(8, LARGE)
        for last in (False, True):
            data = [tensor(8), tensor(LARGE)]
            ends.server.requests[0].respond(InferenceResponse(replied, data), final=last)
        await ends.settle()
        assert [(final, values(each.buffers)) for _, each, final in caller.answers] == [
            (False, [b"", b""]),
            (True, [b"", b""]),
        ]
        assert regions.devices.stream.copies == [(0, 8), (LARGE, LARGE)] * 2

    tell(monkeypatch, story)


@pytest.mark.parametrize("again", [False, True])
def test_a_region_that_the_core_has_no_more(again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The front does not know it yet; another region may have the name."""

    async def story(ends: Ends) -> None:
        regions = Regions(ends)
        await regions.register()
        regions.tell()
        regions.core.unregister_cuda("r")
        if again:
            await regions.register()
        for outputs in ((), (0,)):
            caller = Caller()
            ends.front.call(regions.request(caller, 8, outputs=outputs))
            await ends.settle()
            ((_, answer, final),) = caller.answers
            assert final and isinstance(answer.error, NotFound)
            assert answer.error.message == "Unable to find shared memory region: 'r'"
        assert not ends.server.requests and not ends.core.calls
        regions.core.unregister_cuda("r")
        assert regions.core.listed_cuda("") == []
        caller = Caller()
        await ends.call(caller, asked(8), tensor(8))
        ends.server.requests[0].respond(response(8))
        await ends.settle()
        assert values(caller.answers[0][1].buffers) == [tensor(8, 2)], "the next call is one as any other"

    tell(monkeypatch, story)

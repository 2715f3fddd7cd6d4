"""Pools of pinned and device memory, and the buddy algorithm that divides them."""

from __future__ import annotations

import gc
import random
import threading

import pytest

from nerite.core.errors import Internal, Unavailable
from nerite.core.tensor import address_of
from nerite.devices import cuda
from nerite.devices.pools import SMALLEST, BuddyAllocator, DevicePool, PinnedPool

KB = 1024


@pytest.mark.parametrize("seed", range(20))
def test_blocks_never_overlap_and_all_comes_back(seed: int) -> None:
    chance = random.Random(seed)
    size = chance.randrange(64 * KB, 1 << 20)
    blocks = BuddyAllocator(size)
    live: dict[int, int] = {}
    for _ in range(2000):
        if live and chance.random() < 0.5:
            offset = chance.choice([*live])
            del live[offset]
            blocks.give_back(offset)
        else:
            wanted = int(2 ** chance.uniform(0, 17))
            found = blocks.allocate(wanted)
            if found is not None:
                assert found % SMALLEST == 0 and found + wanted <= size
                assert all(found + wanted <= at or at + length <= found for at, length in live.items())
                live[found] = wanted
    for offset in live:
        blocks.give_back(offset)
    assert blocks.used == 0
    # All is one again: as much fits as at first.
    assert blocks.allocate(1 << size.bit_length() - 1) is not None


def test_no_room() -> None:
    blocks = BuddyAllocator(4 * KB)
    assert blocks.allocate(4 * KB + 1) is None
    whole = blocks.block(4 * KB)
    assert whole is not None and blocks.used == 4 * KB and blocks.allocate(1) is None
    del whole
    assert blocks.used == 0 and blocks.allocate(1) is not None
    assert BuddyAllocator(SMALLEST - 1).allocate(1) is None


def test_threads_share_an_allocator() -> None:
    blocks = BuddyAllocator(1 << 20)
    failures = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        held = []
        for _ in range(3000):
            held.append(blocks.block(chance.randrange(1, 20 * KB)))
            if len(held) > 5:
                held.pop(chance.randrange(len(held)))
        failures.extend(each for each in held if each is not None and each.offset < 0)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failures and blocks.used == 0


@pytest.mark.usefixtures("cuda_process")
def test_pinned_memory_is_freed_with_the_last_view() -> None:
    pool = PinnedPool(64 * KB)
    first = pool.allocate(1000)
    assert first is not None and len(first) == 1000 and pool.used == 1024
    first[:3] = b"abc"
    assert pool.holds(address_of(first)) and not pool.holds(address_of(bytearray(8)))
    part = first[1:3]
    del first
    gc.collect()
    assert pool.used == 1024 and bytes(part) == b"bc"
    del part
    gc.collect()
    assert pool.used == 0
    assert pool.allocate(65 * KB) is None
    pool.close()


@pytest.mark.usefixtures("cuda_process")
def test_pinned_memory_that_is_in_use_is_not_freed() -> None:
    pool = PinnedPool(64 * KB)
    view = pool.allocate(10)
    pool.close()
    assert view is not None
    view[:2] = b"ok"
    assert bytes(view[:2]) == b"ok"


def test_device_memory(cuda_process: object) -> None:
    pool = DevicePool(0, 64 * KB)
    buffer = pool.allocate(3000)
    assert buffer is not None and (buffer.device, len(buffer), pool.offset_of(buffer)) == (0, 3000, 0)
    part = buffer[100:200]
    assert (part.address, len(part)) == (buffer.address + 100, 100) and pool.offset_of(part) == 100
    del buffer
    assert pool.used == 4096
    del part
    assert pool.used == 0
    elsewhere = cuda.allocate(64)
    assert pool.offset_of(DevicePool(0, SMALLEST).allocate(1) or pytest.fail()) is None
    cuda.free(elsewhere)
    with pytest.raises(Unavailable, match="CUDA error: out of memory"):
        DevicePool(0, 2 << 30)
    pool.close()
    with pytest.raises(Internal, match="CUDA error: invalid argument"):
        pool.close()

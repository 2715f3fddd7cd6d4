"""SharedMemoryRegions of shared memory, on real files of it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nerite.core.errors import AlreadyExists, Internal, InvalidArgument, NeriteError, NotFound, Unavailable, Unsupported
from nerite.core.request import NOBODY, Caller, RequestHeader, SharedMemoryInput, SharedMemoryRequest
from nerite.core.response import EMPTY
from nerite.regions import RemotePart, SharedMemoryRegions

KEY = f"nerite_test_{os.getpid()}"


@pytest.fixture
def file() -> Iterator[Path]:
    path = Path("/dev/shm") / KEY
    path.write_bytes(bytes(range(256)) * 40)
    yield path
    path.unlink()


@pytest.fixture
def regions() -> SharedMemoryRegions:
    return SharedMemoryRegions(allowed=True)


def no_room(size: int) -> None:
    """A model has no memory for it."""


def read(of: SharedMemoryRegions, offset: int, size: int, name: str = "r") -> memoryview:
    return of.read(SharedMemoryInput(name, offset, size), no_room)


def test_inputs_are_what_was_there(regions: SharedMemoryRegions, file: Path) -> None:
    regions.register("r", KEY, 100, 1000)
    data = read(regions, 10, 4)
    assert bytes(data) == bytes([110, 111, 112, 113])
    # It is the request's own: neither side sees what the other does with it.
    data[0] = 7
    assert file.read_bytes()[110] == 110
    file.write_bytes(bytes(10240))
    assert bytes(data) == bytes([7, 111, 112, 113])


def test_inputs_are_read_into_memory_of_the_model(regions: SharedMemoryRegions, file: Path) -> None:
    regions.register("r", KEY, 0, 1000)
    room = memoryview(bytearray(4))
    assert regions.read(SharedMemoryInput("r", 10, 4), lambda size: room) is room
    assert bytes(room) == bytes([10, 11, 12, 13])


def test_outputs_are_written(regions: SharedMemoryRegions, file: Path) -> None:
    regions.register("r", KEY, 100, 1000)
    place = regions.output(SharedMemoryInput("r", 10, 4))
    assert place.size == 4
    place.write(b"ab")
    place.write(b"")
    assert file.read_bytes()[108:114] == bytes([108, 109]) + b"ab" + bytes([112, 113])


@pytest.mark.parametrize("offset", [0, 1, 4095, 4096, 5000])
def test_any_offset(regions: SharedMemoryRegions, file: Path, offset: int) -> None:
    regions.register("r", "//" + KEY, offset, 10240 - offset)
    assert bytes(read(regions, 0, 1)) == bytes([offset % 256])
    (region,) = regions.listed("r")
    assert region[:4] == ("r", "//" + KEY, offset, 10240 - offset)


def test_who_writes_to_a_region_keeps_it(regions: SharedMemoryRegions, file: Path) -> None:
    regions.register("r", KEY, 0, 100)
    place = regions.output(SharedMemoryInput("r", 0, 100))
    regions.unregister("r")
    for ask in (lambda: read(regions, 0, 100), lambda: regions.output(SharedMemoryInput("r", 0, 100))):
        with pytest.raises(NotFound, match="Unable to find shared memory region: 'r'"):
            ask()
    place.write(b"a")
    assert file.read_bytes()[:2] == b"a\1"


def descriptors() -> int:
    links = Path("/proc/self/fd").iterdir()
    return sum(os.path.basename(os.readlink(link)) == KEY for link in links if link.is_symlink())


def test_a_region_stays_until_requests_that_use_it_are_answered(regions: SharedMemoryRegions, file: Path) -> None:
    async def test() -> None:
        for name in "ab":
            regions.register(name, KEY, 0, 100)
        place = SharedMemoryInput("a", 0, 100)
        answered, lost = (SharedMemoryRequest(RequestHeader("m", "", ()), (), NOBODY, 0) for _ in range(2))
        for request in (answered, lost):
            regions.use(request, [place.region, place.region])
        regions.unregister("")
        assert [region.name for region in regions.listed("")] == ["a"]
        with pytest.raises(AlreadyExists):
            regions.register("a", KEY, 0, 100)
        assert len(read(regions, 0, 100, "a")) == 100
        answered.respond(EMPTY)
        assert [region.name for region in regions.listed("a")] == ["a"]
        del request, lost
        with pytest.raises(NotFound):
            read(regions, 0, 100, "a")
        regions.register("a", KEY, 0, 50)
        assert [region.byte_size for region in regions.listed("")] == [50]

    asyncio.run(test())


def test_a_region_is_closed_soon_after_the_last_request(
    regions: SharedMemoryRegions, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else is asked of the regions."""
    monkeypatch.setattr("nerite.regions.REMOVED_AFTER", 0.01)

    async def test() -> None:
        regions.register("a", KEY, 0, 100)
        request = SharedMemoryRequest(RequestHeader("m", "", ()), (), NOBODY, 0)
        regions.use(request, ["a"])
        regions.unregister("a")
        for _ in range(3):
            await asyncio.sleep(0.01)
        assert descriptors() == 1
        request.respond(EMPTY)
        async with asyncio.timeout(10):
            while descriptors():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    asyncio.run(test())


def test_what_nobody_uses_is_given_back(regions: SharedMemoryRegions, file: Path) -> None:
    for name in "ab":
        regions.register(name, KEY, 0, 100)
    assert descriptors() == 2
    regions.unregister("a")
    assert descriptors() == 1
    with pytest.raises(InvalidArgument):
        regions.register("c", KEY, 0, 1 << 20)
    place = regions.output(SharedMemoryInput("b", 0, 100))
    regions.unregister("")
    regions.unregister("c")
    assert (descriptors(), regions.listed("")) == (1, [])
    del place
    assert descriptors() == 0


SHORTENED = (
    "shared memory region 'r' has been shortened: its file has {} bytes, and the region ends at 9000. Unregister"
)


@pytest.mark.parametrize("left", [0, 4096, 8100, 8999])
def test_a_file_that_was_shortened(regions: SharedMemoryRegions, file: Path, left: int) -> None:
    regions.register("r", KEY, 100, 8900)
    place = regions.output(SharedMemoryInput("r", 8000, 900))
    os.truncate(file, left)
    for use in (lambda: read(regions, 8000, 900), lambda: place.write(bytes(900))):
        with pytest.raises(InvalidArgument, match=SHORTENED.format(left)):
            use()
    assert file.stat().st_size == left, "it must not be made longer"
    if left > 200:  # what is there is there
        assert len(read(regions, 0, 100)) == 100
        regions.output(SharedMemoryInput("r", 0, 100)).write(b"x" * 100)
    os.truncate(file, 10240)
    assert bytes(read(regions, 8899, 1)) == (bytes([8999 % 256]) if left > 8999 else b"\0")
    place.write(b"y" * 900)
    assert file.read_bytes()[8100:9000] == b"y" * 900


def test_a_file_that_was_made_longer_or_removed(regions: SharedMemoryRegions, file: Path) -> None:
    regions.register("r", KEY, 0, 100)
    os.truncate(file, 1 << 20)
    assert bytes(read(regions, 99, 1)) == bytes([99])
    file.unlink()
    file.write_bytes(b"another file")  # of the same name
    regions.output(SharedMemoryInput("r", 0, 1)).write(b"z")
    assert (bytes(read(regions, 0, 2)), file.read_bytes()) == (b"z\1", b"another file")


def test_inputs_without_room_have_bounds(
    regions: SharedMemoryRegions, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nerite.regions.MAX_COPIED", 1000)
    regions.register("r", KEY, 0, 10240)
    held = [read(regions, 0, 400), read(regions, 0, 600)]
    with pytest.raises(Unavailable, match=r"1 bytes of shared memory cannot be read now: .* occupy 1000 of 1000 bytes"):
        read(regions, 0, 1)
    part = held.pop()[:1]
    with pytest.raises(Unavailable):
        read(regions, 0, 1)
    del part
    assert len(read(regions, 0, 600)) == 600


def test_regions_are_listed_by_name(regions: SharedMemoryRegions, file: Path) -> None:
    for name in "ba":
        regions.register(name, KEY, 0, 100)
    assert [region.name for region in regions.listed("")] == ["a", "b"]


MISTAKES: dict[str, tuple[Callable[[SharedMemoryRegions], object], type[NeriteError], str]] = {
    "twice": (lambda of: of.register("known", KEY, 0, 1), AlreadyExists, "shared memory region 'known' already in"),
    "no file": (lambda of: of.register("r", "nobody", 0, 1), Internal, "Unable to open shared memory region: 'nobody'"),
    "another folder": (lambda of: of.register("r", "../etc/passwd", 0, 1), Internal, "Unable to open shared memory"),
    "a folder": (lambda of: of.register("r", "..", 0, 1), Internal, "Unable to open shared memory region: '..'"),
    "no character": (lambda of: of.register("r", "a\0b", 0, 1), Internal, "Unable to open shared memory region: 'a"),
    "nothing": (lambda of: of.register("r", "", 0, 1), InvalidArgument, "cannot register shared memory region 'r' - "),
    "slashes": (
        lambda of: of.register("r", "//", 0, 1),
        InvalidArgument,
        "cannot register shared memory region 'r' - ",
    ),
    "a folder behind slashes": (lambda of: of.register("r", "//..", 0, 1), Internal, "Unable to open shared memory"),
    "too much": (lambda of: of.register("r", KEY, 10_000, 241), InvalidArgument, "failed to register shared memory"),
    "no bytes": (lambda of: of.register("r", KEY, 0, 0), InvalidArgument, "failed to register shared memory region"),
    "reserved": (
        lambda of: of.register("r", "//triton_python_backend_shm_region_7", 0, 1),
        InvalidArgument,
        "cannot register shared memory region 'r' with key '//triton_python_backend_shm_region_7' as the key contains",
    ),
    "listed": (lambda of: of.listed("r"), NotFound, "Unable to find system shared memory region: 'r'"),
    "offset": (lambda of: read(of, 100, 1, "known"), InvalidArgument, "Invalid offset for shared memory"),
    "size": (
        lambda of: of.output(SharedMemoryInput("known", 90, 11)),
        InvalidArgument,
        "Invalid offset + byte size for",
    ),
    "CUDA": (
        lambda of: asyncio.run(of.register_cuda("r", bytes(64), 0, 4)),
        Unsupported,
        "failed to register CUDA shared memory region: 'r', GPUs",
    ),
    "CUDA listed": (lambda of: of.listed_cuda("r"), NotFound, "Unable to find cuda shared memory region: 'r'"),
    "CUDA of the system": (lambda of: of.listed_cuda("known"), NotFound, "The region named 'known' is registered as"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(regions: SharedMemoryRegions, file: Path, name: str) -> None:
    regions.register("known", KEY, 0, 100)
    call, kind, told = MISTAKES[name]
    with pytest.raises(kind) as refusal:
        call(regions)
    assert refusal.value.message.startswith(told)


def test_a_link_is_not_followed(regions: SharedMemoryRegions, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    link = Path("/dev/shm") / f"{KEY}_link"
    link.symlink_to(tmp_path / "secret")
    try:
        with pytest.raises(Internal):
            regions.register("r", link.name, 0, 6)
    finally:
        link.unlink()


@pytest.mark.parametrize("call", ["register", "unregister", "register_cuda", "unregister_cuda"])
def test_nothing_is_registered_unless_that_is_allowed(call: str) -> None:
    arguments = {"register": ("r", KEY, 0, 1), "register_cuda": ("r", bytes(64), 0, 1)}.get(call, ("r",))
    with pytest.raises(Unsupported, match="Start the server with '--allow-client-shm=true' to enable"):
        answer = getattr(SharedMemoryRegions(allowed=False), call)(*arguments)
        if answer is not None:
            asyncio.run(answer)
    assert SharedMemoryRegions(allowed=False).listed("") == []


def test_a_region_is_its_tenants_alone(regions: SharedMemoryRegions, file: Path) -> None:
    """Its name, and the file as long as it is registered, whatever that is called."""

    async def test() -> None:
        other = file.with_name(f"{KEY}_other")
        other.write_bytes(b"b" * 200)
        link = file.with_name(f"{KEY}_link")
        try:
            link.hardlink_to(file)
            regions.register("r", KEY, 0, 100, "alice")
            place = SharedMemoryInput("r", 0, 4)
            for thief in ("bob", ""):
                asks: list[Callable[[], object]] = [
                    lambda: regions.read(place, no_room, thief),  # noqa: B023
                    lambda: regions.output(place, thief),  # noqa: B023
                    lambda: regions.listed("r", thief),  # noqa: B023
                ]
                for ask in asks:
                    with pytest.raises(NotFound):
                        ask()
                assert regions.listed("", thief) == []
                regions.unregister("r", thief)
                regions.unregister("", thief)
                for key in (KEY, f"/{KEY}", link.name):
                    with pytest.raises(Internal, match="Unable to open shared memory region"):
                        regions.register("mine", key, 0, 100, thief)
            regions.register("r", other.name, 0, 100, "bob")
            assert bytes(regions.read(place, no_room, "alice")) == bytes([0, 1, 2, 3])
            assert bytes(regions.read(place, no_room, "bob")) == b"bbbb"
            header = RequestHeader("m", "", (), caller=Caller("bob"))
            ((_, number),) = regions.use(SharedMemoryRequest(header, (), NOBODY, 0), ["r"])
            assert number == regions.listed("r", "bob")[0].number
            front = SharedMemoryRegions(allowed=True)
            front.follow(regions.registered)
            assert bytes(front.read(place, no_room, "bob")) == b"bbbb"
            regions.unregister("", "alice")
            assert [each.name for each in regions.listed("", "bob")] == ["r"]
            regions.register("now", KEY, 0, 100, "bob")
        finally:
            other.unlink()
            link.unlink(missing_ok=True)

    asyncio.run(test())


def test_regions_of_another_process(regions: SharedMemoryRegions, file: Path) -> None:
    """Those of the same number stay open; those whose file is gone are left out."""
    regions.follow([(1, "", "kept", KEY, 0, 100), (2, "", "moved", KEY, 0, 100), (3, "", "gone", KEY, 0, 100)])
    kept = regions.listed("kept")[0].file
    unanswered = SharedMemoryRequest(RequestHeader("m", "", ()), (), NOBODY, 0)
    assert regions.use(unanswered, ["moved", "gone", "unknown"]) == [("moved", 2), ("gone", 3)]
    regions.follow(
        [(1, "", "kept", KEY, 0, 100), (4, "", "moved", KEY, 10, 100), (5, "", "nothing", f"{KEY}_none", 0, 100)]
    )
    assert [(each.name, each.offset) for each in regions.listed("")] == [("kept", 0), ("moved", 10)]
    assert regions.listed("kept")[0].file is kept
    assert bytes(read(regions, 0, 2, "moved")) == bytes([10, 11])


def test_regions_on_gpus_of_another_process(regions: SharedMemoryRegions) -> None:
    """They are not opened: what is in them is known by its place, whose bounds are checked."""
    regions.follow([(1, "", "gpu", 0, 0, 100), (2, "", "moved", 0, 0, 100)])
    place = SharedMemoryInput("gpu", 90, 10)
    for part in (regions.read(place, no_room), regions.output(place)):
        assert isinstance(part, RemotePart)
        assert (part.place, len(part)) == (place, 10)
    with pytest.raises(InvalidArgument, match="Invalid offset \\+ byte size for shared memory region: 'gpu'"):
        regions.read(SharedMemoryInput("gpu", 91, 10), no_room)
    assert regions.registered == [(1, "", "gpu", 0, 0, 100), (2, "", "moved", 0, 0, 100)]
    regions.follow([(3, "", "moved", 1, 0, 50)])
    assert regions.registered == [(3, "", "moved", 1, 0, 50)]


def test_a_front_that_knows_another_region_by_a_name(regions: SharedMemoryRegions, file: Path) -> None:
    async def test() -> None:
        front = SharedMemoryRegions(allowed=True)
        regions.register("r", KEY, 0, 100)
        front.follow(regions.registered)
        request = SharedMemoryRequest(RequestHeader("m", "", ()), (), NOBODY, 0)
        used = front.use(request, ["r"])
        regions.use_for_front(request, used)
        regions.unregister("r")
        assert regions.listed("r"), "the request is not answered"
        request.respond(EMPTY)
        regions.use_for_front(request, used)  # its front has read what was there
        regions.register("r", KEY, 0, 100)
        with pytest.raises(NotFound, match="Unable to find shared memory region: 'r'"):
            regions.use_for_front(request, used)

    asyncio.run(test())

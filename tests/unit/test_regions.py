"""Regions of shared memory, on real files of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nerite.core.errors import AlreadyExists, Internal, InvalidArgument, NeriteError, NotFound, Unsupported
from nerite.core.request import SharedPlace
from nerite.execution.guest_memory import GuestMemory
from nerite.regions import Regions

KEY = f"nerite_test_{os.getpid()}"


@pytest.fixture
def file() -> Iterator[Path]:
    path = Path("/dev/shm") / KEY
    path.write_bytes(bytes(range(256)) * 40)
    yield path
    path.unlink()


@pytest.fixture
def regions() -> Regions:
    return Regions(GuestMemory(), allowed=True)


def test_a_region_is_the_memory_itself(regions: Regions, file: Path) -> None:
    regions.register("r", KEY, 100, 1000)
    view = regions.view(SharedPlace("r", 10, 4))
    assert bytes(view) == bytes([110, 111, 112, 113])
    view[:2] = b"ab"
    assert file.read_bytes()[110:114] == b"ab" + bytes([112, 113])


@pytest.mark.parametrize("offset", [0, 1, 4095, 4096, 5000])
def test_any_offset(regions: Regions, file: Path, offset: int) -> None:
    regions.register("r", "/" + KEY, offset, 10240 - offset)
    assert bytes(regions.view(SharedPlace("r", 0, 1))) == bytes([offset % 256])
    (region,) = regions.listed("r")
    assert region[:4] == ("r", "/" + KEY, offset, 10240 - offset)


def test_whoever_uses_a_region_keeps_it(regions: Regions, file: Path) -> None:
    regions.register("r", KEY, 0, 100)
    view = regions.view(SharedPlace("r", 0, 100))
    regions.unregister("r")
    with pytest.raises(NotFound, match="Unable to find shared memory region: 'r'"):
        regions.view(SharedPlace("r", 0, 100))
    view[0] = 7
    assert file.read_bytes()[0] == 7


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count(KEY)


def test_what_nobody_uses_is_given_back(regions: Regions, file: Path) -> None:
    for name in "ab":
        regions.register(name, KEY, 0, 100)
    assert mappings() == 2
    regions.unregister("a")
    assert mappings() == 1
    regions.unregister("")
    regions.unregister("c")
    assert (mappings(), regions.listed("")) == (0, [])


def test_regions_are_listed_by_name(regions: Regions, file: Path) -> None:
    for name in "ba":
        regions.register(name, KEY, 0, 100)
    assert [region.name for region in regions.listed("")] == ["a", "b"]


MISTAKES: dict[str, tuple[Callable[[Regions], object], type[NeriteError], str]] = {
    "twice": (lambda of: of.register("known", KEY, 0, 1), AlreadyExists, "shared memory region 'known' already in"),
    "no file": (lambda of: of.register("r", "nobody", 0, 1), Internal, "Unable to open shared memory region: 'nobody'"),
    "another folder": (lambda of: of.register("r", "../etc/passwd", 0, 1), Internal, "Unable to open shared memory"),
    "a folder": (lambda of: of.register("r", "..", 0, 1), Internal, "Unable to open shared memory region: '..'"),
    "no character": (lambda of: of.register("r", "a\0b", 0, 1), Internal, "Unable to open shared memory region: 'a"),
    "nothing": (lambda of: of.register("r", "", 0, 1), Internal, "Unable to open shared memory region: ''"),
    "too much": (lambda of: of.register("r", KEY, 10_000, 241), InvalidArgument, "failed to register shared memory"),
    "no bytes": (lambda of: of.register("r", KEY, 0, 0), InvalidArgument, "failed to register shared memory region"),
    "reserved": (
        lambda of: of.register("r", "/triton_python_backend_shm_region_7", 0, 1),
        InvalidArgument,
        "cannot register shared memory region 'r' with key '/triton_python_backend_shm_region_7' as the key contains",
    ),
    "listed": (lambda of: of.listed("r"), NotFound, "Unable to find system shared memory region: 'r'"),
    "offset": (lambda of: of.view(SharedPlace("known", 100, 1)), InvalidArgument, "Invalid offset for shared memory"),
    "size": (lambda of: of.view(SharedPlace("known", 90, 11)), InvalidArgument, "Invalid offset + byte size for"),
    "CUDA": (lambda of: of.register_cuda("r"), Unsupported, "failed to register CUDA shared memory region: 'r', GPUs"),
    "CUDA listed": (lambda of: of.check_cuda("r"), NotFound, "Unable to find cuda shared memory region: 'r'"),
    "CUDA of the system": (lambda of: of.check_cuda("known"), NotFound, "The region named 'known' is registered as"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(regions: Regions, file: Path, name: str) -> None:
    regions.register("known", KEY, 0, 100)
    call, kind, told = MISTAKES[name]
    with pytest.raises(kind) as refusal:
        call(regions)
    assert refusal.value.message.startswith(told)


def test_a_link_is_not_followed(regions: Regions, tmp_path: Path) -> None:
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
    arguments = ("r", KEY, 0, 1) if call == "register" else ("r",)
    with pytest.raises(Unsupported, match="Start the server with '--allow-client-shm=true' to enable"):
        getattr(Regions(GuestMemory(), allowed=False), call)(*arguments)
    assert Regions(GuestMemory(), allowed=False).listed("") == []

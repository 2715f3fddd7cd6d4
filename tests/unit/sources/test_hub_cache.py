"""The cache of the hub: where it is, what is in it, and what is removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from nerite.core.errors import Unavailable
from nerite.sources.hub_cache import HubCache, NotedFiles, cache_root
from nerite.sources.hub_files import HubChoice, HubFile

ONE, TWO = "1" * 40, "2" * 40
BIG = HubFile("model.safetensors", 5, "a" * 64)
OLD, NEW = HubFile("config.json", 3, "b" * 40), HubFile("config.json", 4, "c" * 40)


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({"HOME": "/home/x"}, "/home/x/.cache/huggingface/hub"),
        ({"HOME": "/home/x", "XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
        ({"HF_HOME": "/hf"}, "/hf/hub"),
        ({"HF_HOME": "/hf", "HF_HUB_CACHE": "/cache"}, "/cache"),
    ],
)
def test_where_it_is(environment: dict[str, str], place: str) -> None:
    assert cache_root(environment) == Path(place)


@pytest.fixture
def cache(tmp_path: Path) -> HubCache:
    """A cache with two states of a model, which share a file."""
    cache = HubCache(tmp_path / "hub")
    for file in (BIG, OLD, NEW):
        put(cache, file)
    cache.complete("org/m", ONE, "main", HubChoice((BIG, OLD)))
    cache.complete("org/m", TWO, "main", HubChoice((BIG, NEW)))
    return cache


def put(cache: HubCache, file: HubFile, repository: str = "org/m") -> None:
    blob = cache.blob(repository, file)
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(b"x" * file.size)


def test_states_share_files(cache: HubCache) -> None:
    assert cache.commit_of("org/m", "") == cache.commit_of("org/m", "main") == TWO
    assert cache.commit_of("org/m", ONE) == ONE
    assert cache.commit_of("org/m", "v1") == cache.commit_of("org/other", "main") == ""
    assert (cache.snapshot("org/m", ONE) / "config.json").read_bytes() == b"xxx"
    assert (cache.snapshot("org/m", ONE) / "model.safetensors").samefile(cache.blob("org/m", BIG))
    assert cache.noted("org/m", ONE) == NotedFiles(cache.snapshot("org/m", ONE), [])
    assert cache.noted("org/m", ONE, "config.json") is None, "that was not asked for"


def test_what_is_complete_is_not_written_again(cache: HubCache) -> None:
    """So that a cache may be on a disk that is only read."""
    files = {path: path.stat().st_ino for path in cache.root.rglob("*") if not path.is_dir()}
    cache.complete("org/m", TWO, "main", HubChoice((BIG, NEW)))
    assert {path: path.stat().st_ino for path in cache.root.rglob("*") if not path.is_dir()} == files


def test_what_is_listed(cache: HubCache) -> None:
    first, second = cache.revisions()
    assert (first.repository, first.commit, first.names, first.size, first.complete) == ("org/m", ONE, (), 8, True)
    assert (second.commit, second.names, second.size) == (TWO, ("main",), 9)
    cache.blob("org/m", NEW).unlink()
    assert [each.complete for each in cache.revisions()] == [True, False]
    noted = cache.noted("org/m", TWO)
    assert noted is not None
    assert noted.missing == ["config.json"]
    assert cache.has("org/m", OLD)
    assert not cache.has("org/m", NEW)
    assert not cache.has("org/m", OLD._replace(size=9)), "it was not written completely"


def test_one_state_is_removed(cache: HubCache) -> None:
    assert cache.remove("org/m", [ONE]) >= OLD.size
    (left,) = cache.revisions()
    assert (left.commit, left.complete) == (TWO, True)
    assert not cache.blob("org/m", OLD).exists()
    cache.remove("org/m", [TWO])
    assert cache.revisions() == []
    assert not cache.folder("org/m").exists()


def test_broken_downloads(cache: HubCache) -> None:
    part = cache.part("org/m", HubFile("x", 100, "d" * 64))
    part.write_bytes(b"x" * 40)
    (part.parent / f"{'e' * 64}.0123abcd.incomplete").write_bytes(b"x" * 2)  # of the hub's library
    assert cache.unfinished() == {"org/m": 42}
    cache.remove("org/m", [ONE], parts=False)
    assert cache.unfinished() == {"org/m": 42}
    with cache.downloading("org/m", lambda: None), pytest.raises(Unavailable, match="it is being downloaded"):
        cache.remove_parts("org/m")
    with cache.using("org/m"):
        assert cache.remove_parts("org/m") == 42
    assert cache.unfinished() == {}


def test_what_is_used_stays(cache: HubCache) -> None:
    with cache.using("org/m"), cache.using("org/m"), pytest.raises(Unavailable, match="a server uses it"):
        cache.remove("org/m", [ONE])
    assert len(cache.revisions()) == 2


def test_a_cache_that_does_not_exist(tmp_path: Path) -> None:
    cache = HubCache(tmp_path / "nothing")
    assert cache.revisions() == []
    assert cache.unfinished() == {}
    assert not (tmp_path / "nothing").exists()


def test_a_link_whose_file_was_removed_is_made_again(cache: HubCache) -> None:
    cache.blob("org/m", NEW).unlink()
    other = NEW._replace(size=7, identity="f" * 40)
    put(cache, other)
    cache.complete("org/m", TWO, "main", HubChoice((BIG, other), (), "config.json"))
    assert (cache.snapshot("org/m", TWO) / "config.json").read_bytes() == b"x" * 7
    noted = cache.noted("org/m", TWO)
    assert noted is not None
    assert noted.model.name == "config.json"

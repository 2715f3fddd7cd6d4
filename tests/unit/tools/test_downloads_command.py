"""``nerite downloads``."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from nerite.sources.hub_cache import HubCache
from nerite.sources.hub_files import HubChoice, HubFile
from nerite.tools.downloads import run

ONE, TWO = "1" * 40, "2" * 40
FILES = {ONE: HubFile("a", 1000, "a" * 40), TWO: HubFile("a", 2000, "b" * 40)}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubCache:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    cache = HubCache(tmp_path)
    for commit, file in FILES.items():
        blob = cache.blob("org/m", file)
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(bytes(file.size))
        cache.complete("org/m", commit, "main", HubChoice((file,)))
    return cache


def commits(cache: HubCache) -> list[str]:
    return [each.commit for each in cache.revisions()]


def test_list(cache: HubCache, capsys: pytest.CaptureFixture[str]) -> None:
    cache.part("org/m", FILES[ONE]).write_bytes(bytes(500))
    assert run(["ls"]) == 0
    said = capsys.readouterr().out
    assert "org/m" in said
    assert "2.0 kB" in said
    assert "broken download" in said
    assert run(["ls", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["directory"] == str(cache.root)
    assert [(each["commit"], each["names"]) for each in listed["models"]] == [(ONE, []), (TWO, ["main"])]
    assert listed["unfinished"] == {"org/m": 500}


def test_remove_one_state(cache: HubCache, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["rm", f"org/m@{ONE[:8]}"]) == 0
    assert capsys.readouterr().out.startswith(f"removed hf:org/m@{ONE[:8]}: 1.")
    assert commits(cache) == [TWO]
    assert run(["rm", "org/m@main"]) == 0
    assert commits(cache) == []


def test_remove_what_is_not_there(cache: HubCache, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["rm", "org/other"]) == 1
    assert "there is no model 'org/other' in" in capsys.readouterr().err
    assert run(["rm", "org/m@v1"]) == 1
    assert "there is no revision 'v1' of 'org/m'" in capsys.readouterr().err
    assert run(["rm", "../../etc"]) == 1
    assert "is not the name of a model" in capsys.readouterr().err
    assert len(commits(cache)) == 2


def test_prune(cache: HubCache, capsys: pytest.CaptureFixture[str]) -> None:
    part = cache.part("org/m", FILES[ONE])
    part.write_bytes(bytes(500))
    assert run(["prune", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert said.splitlines() == [
        "would remove a broken download of org/m: 500 bytes",
        f"would remove org/m@{ONE[:12]}: 1.0 kB",
    ]
    assert len(commits(cache)) == 2
    with cache.using("org/m"):
        assert run(["prune"]) == 1
    assert "'org/m' is not removed: a server uses it" in capsys.readouterr().err
    assert not part.exists(), "no server uses that"
    assert run(["prune"]) == 0
    assert commits(cache) == [TWO]
    capsys.readouterr()
    assert run(["prune"]) == 0
    assert capsys.readouterr().out == "Nothing to remove.\n"


def test_prune_by_age(cache: HubCache) -> None:
    assert run(["prune", "--unused-for", "30"]) == 0
    assert commits(cache) == [TWO]
    old = time.time() - 31 * 24 * 3600
    os.utime(cache.snapshot("org/m", TWO), (old, old))
    for lock in cache.root.rglob("nerite.use"):
        os.utime(lock, (old, old))
    assert run(["prune", "--unused-for", "30"]) == 0
    assert commits(cache) == []


def test_mistakes(cache: HubCache) -> None:
    assert run([]) == 2
    assert run(["rm"]) == 2
    assert run(["list"]) == 2

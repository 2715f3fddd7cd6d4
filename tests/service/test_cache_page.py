"""The page about the response cache says what the server does."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from nerite.cache.redis import RedisSettings
from pages import ROOT, Page
from redis_server import redis_server
from serving import Serving, adds, eventually, pbtxt, python_model, serving

NAME = "docs/cache.md"
TEXT = (ROOT / NAME).read_text()
PAGE = Page(NAME)


def flags(start: str) -> list[str]:
    """The flags of a command of the page."""
    (command,) = [line for _, text in PAGE.blocks for line in text.splitlines() if line.startswith(start)]
    return [word for word in command.split() if word.startswith("--")]


def hits(server: Serving) -> int:
    for _ in range(2):
        server.infer("m", [1.0])
    return int(server.metrics()['nv_cache_num_hits_per_model{model="m",version="1"}'])


def models(folder: Path) -> Path:
    python_model(folder, "m", adds(1), pbtxt(more=PAGE.block("response_cache")))
    return folder


def test_in_memory_and_what_there_is_to_see(tmp_path: Path) -> None:
    command = flags("nerite serve models --cache-config=local")
    with serving(models(tmp_path / "models"), tmp_path / "log", *command) as server:
        assert hits(server) == 1
        shown = {name.partition("{")[0] for name in server.metrics()}
    assert set(re.findall(r"`(nv_cache_\w+)`", TEXT)) <= shown


def test_in_redis(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis") as redis:
        command = [each.replace("6379", str(redis.port)) for each in flags("nerite serve models --cache-config=redis")]
        with serving(models(tmp_path / "models"), tmp_path / "log", *command) as server:
            eventually(lambda: "content_hash" in server.json("POST", "/v2/repository/index")[0])
            assert hits(server) == 1
            assert "nerite_cache_failures" in server.metrics()


def test_all_settings_are_told() -> None:
    rows = [line for line in TEXT.partition("| setting |")[2].splitlines() if line.startswith("| `")]
    told = re.findall(r"`(\w+)`", " ".join(row.split("|")[1] for row in rows))
    assert sorted(told) == sorted(field.name for field in fields(RedisSettings))
    for row in rows:
        _, names, default, *_ = row.split("|")
        (first, *_) = re.findall(r"`(\w+)`", names)
        if default.strip().isdecimal():
            assert int(default) == getattr(RedisSettings("h", 1), first)

"""A policy file while it is changed: what two looks agree on counts, and no mistake does harm."""

from __future__ import annotations

from pathlib import Path

import pytest

from nerite.admission.policy_file import PolicyChange, WatchedPolicy, check_policy
from nerite.core.errors import InvalidArgument

GOOD = "[default]\nconcurrency = 1\n"
BETTER = "[default]\nconcurrency = 2\n"
BAD = "[default]\nconcurency = 2\n"


def test_news(tmp_path: Path) -> None:
    standing = WatchedPolicy("p.toml", PolicyChange(GOOD))
    assert not standing.see(PolicyChange(GOOD))
    assert not standing.see(PolicyChange(BETTER)), "it may be half written"
    assert standing.policy.everybody.concurrency == 1
    assert standing.see(PolicyChange(BETTER))
    assert standing.policy.everybody.concurrency == 2
    assert standing.news() == "the policy file 'p.toml' was read and is in force"
    assert not standing.see(PolicyChange(BETTER))


def test_a_mistake_keeps_what_was() -> None:
    standing = WatchedPolicy("p.toml", PolicyChange(GOOD))
    standing.see(PolicyChange(BAD))
    assert standing.see(PolicyChange(BAD))
    assert standing.policy.everybody.concurrency == 1
    assert "p.toml:2: default.concurency: is not known. Did you mean concurrency?" in standing.news()
    assert "stays in force" in standing.news()
    for problem in ("cannot be read: No such file or directory", "is not UTF-8"):
        standing.see(PolicyChange("", problem))
        assert standing.see(PolicyChange("", problem))
        assert problem in standing.news()
    standing.see(PolicyChange(BETTER))
    assert standing.see(PolicyChange(BETTER))
    assert (standing.problem, standing.policy.everybody.concurrency) == ("", 2)


def test_a_mistake_at_the_beginning() -> None:
    with pytest.raises(InvalidArgument, match=r"p\.toml:2: default\.concurency"):
        WatchedPolicy("p.toml", PolicyChange(BAD))
    with pytest.raises(InvalidArgument, match=r"'p\.toml' cannot be read"):
        WatchedPolicy("p.toml", PolicyChange("", "cannot be read: Permission denied"))


def test_redis_is_that_of_the_start() -> None:
    standing = WatchedPolicy("p.toml", PolicyChange("[redis]\nurl = 'redis://h'\n" + GOOD))
    for text in (BETTER, "[redis]\nurl = 'redis://i'\n" + BETTER):
        standing.see(PolicyChange(text))
        assert standing.see(PolicyChange(text))
        assert "p.toml: redis.url: is that of the start: restart the server to change it" in standing.news()
        assert standing.policy.everybody.concurrency == 1
    text = "[redis]\nurl = 'redis://h'\noutage_share = 0.5\n" + BETTER
    standing.see(PolicyChange(text))
    assert standing.see(PolicyChange(text))
    assert standing.policy.shared is not None
    assert (standing.policy.shared.outage_share, standing.policy.everybody.concurrency) == (0.5, 2)


def test_looks(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    assert check_policy(str(path)).problem == "cannot be read: No such file or directory"
    path.write_text(GOOD)
    assert check_policy(str(path)) == PolicyChange(GOOD)
    for nothing in ("", " \n"):
        path.write_text(nothing)
        assert check_policy(str(path)).problem == "is empty"
    path.write_bytes(b"\xff")
    assert check_policy(str(path)).problem.startswith("is not UTF-8")
    with path.open("wb") as file:
        file.truncate(5 * 1024 * 1024)
    assert "is larger than" in check_policy(str(path)).problem

"""What a router takes of the lines that ``nerite ray members`` prints."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence

import pytest

from nerite.balancing.member import Member
from nerite.cluster.settings import MemberSource, PoolSettings
from nerite.core.errors import NotInstalled
from nerite.router.ray_members import RayMembers

POOL = PoolSettings("main", MemberSource(ray="platform/main"))


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> tuple[RayMembers, list[Sequence[Member]]]:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())
    found: list[Sequence[Member]] = []
    return RayMembers(POOL, found.append), found


def line(*members: str) -> bytes:
    return json.dumps({"members": members}).encode() + b"\n"


def test_members_are_taken_when_they_have_changed(taken: tuple[RayMembers, list[Sequence[Member]]]) -> None:
    members, found = taken
    members.read(line("10.0.0.1:80 grpc=10.0.0.1:81 name=main/1"))
    members.read(line("10.0.0.1:80 grpc=10.0.0.1:81 name=main/1"))
    members.read(line())
    assert [[each.name for each in each] for each in found] == [["main/1"], []]
    assert found[0][0].grpc == "10.0.0.1:81"


@pytest.mark.parametrize(
    "wrong",
    [
        b"hello\n",
        b"[]\n",
        b"{}\n",
        b'{"members": 1}\n',
        b'{"members": ["no address"]}\n',
        b'{"members": [1]}\n',
        b'{"problem": "nothing runs under the name platform"}\n',
    ],
)
def test_the_last_members_stay(wrong: bytes, taken: tuple[RayMembers, list[Sequence[Member]]]) -> None:
    members, found = taken
    members.read(line("h:1"))
    members.read(wrong)
    assert [len(each) for each in found] == [1]


def test_without_ray_the_pool_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(NotInstalled, match=r"pool 'main': Ray is not installed.*pip install 'nerite\[ray\]'"):
        RayMembers(POOL, lambda _members: None)

"""LoRA adapters behind a router: requests go to members that list them, and stay where they were loaded."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from routing import StandInMember, pool, routing, samples, stand_ins
from serving import Serving

CHAT = "/v1/chat/completions"


def ask(router: Serving, model: str, **more: object) -> int:
    content = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
    return router.ask("POST", CHAT, {"model": model, **content, **more})[0]


def homes(*members: StandInMember, by: str = "model") -> dict[str, set[int]]:
    """Return which members were asked for each adapter."""
    found: dict[str, set[int]] = {}
    for number, member in enumerate(members):
        for asked in member.requests:
            name = next(part for part in asked.body.decode().split('"') if part.startswith("adapter"))
            found.setdefault(name, set()).add(number)
    return found


def test_an_adapter_stays_where_it_was_loaded(tmp_path: Path) -> None:
    names = tuple(f"adapter-{number}" for number in range(8))
    with (
        stand_ins(2, models=("base",), adapters=names) as members,
        routing(tmp_path, pool(*(each.address for each in members), kind="vllm", prefix=False)) as router,
    ):
        for _ in range(5):
            assert {ask(router, name) for name in names} == {200}
        found = homes(*members)
        assert found.keys() == set(names)
        assert all(len(places) == 1 for places in found.values()), found
        picks = samples(router, "nerite_router_picks_total")
        assert picks['nerite_router_picks_total{pool="main",reason="lora"}'] == 4 * len(names)
        assert Counter(number for places in found.values() for number in places).keys() == {0, 1}


def test_members_that_do_not_list_an_adapter_are_not_asked_for_it(tmp_path: Path) -> None:
    with (
        stand_ins(1, models=("base",)) as (plain,),
        stand_ins(1, models=("base",), adapters=("adapter",)) as (able,),
        routing(tmp_path, pool(plain.address, able.address, kind="vllm")) as router,
    ):
        assert {ask(router, "adapter") for _ in range(6)} == {200}
        assert (len(plain.requests), len(able.requests)) == (0, 6)
        assert ask(router, "adapter-else") == 404


def test_an_adapter_that_the_body_chooses(tmp_path: Path) -> None:
    with (
        stand_ins(2, models=("base",)) as members,
        routing(tmp_path, pool(*(each.address for each in members), kind="vllm", prefix=False)) as router,
    ):
        for number in range(20):
            assert ask(router, "base", lora_name=f"adapter-{number % 4}") == 200
        assert all(len(places) == 1 for places in homes(*members).values())

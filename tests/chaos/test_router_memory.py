"""A router whose clients never repeat themselves, before members that come and go: its memory stays as it was."""

from __future__ import annotations

import http.client
import json
import os
import random
import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from routing import ROUTER, StandInMember, pool, routing, stand_ins
from serving import PATIENCE, Serving, eventually

REQUESTS = int(os.environ.get("NERITE_TEST_ROUTER_REQUESTS", "16000"))
CLIENTS = 4
MODELS = tuple(f"m{number}" for number in range(64))
INDEX = 2_000_000
"""Bytes for the beginnings of prompts, so few that they are used up soon."""
SEQUENCES = 2_000
GROWTH = 12_000_000
"""Bytes by which memory may differ, with what it breaks up into: not by how much was sent."""
POLICY = """
header = "x-tenant"
[tenants.acme]
header_values = ["acme"]
[default]
requests_per_minute = 100_000_000
"""
WORDS = [f"word{number}" for number in range(1000)]


def resident(router: Serving) -> int:
    """Return the memory of the router in bytes."""
    return int(Path(f"/proc/{router.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def ask(connection: http.client.HTTPConnection, rng: random.Random, number: int) -> int:
    """Send a request that was never sent before; return its status."""
    unique = f"{number} {rng.getrandbits(60)}"
    headers = {"x-tenant": f"tenant {unique}", "x-own": unique}
    model = rng.choice(MODELS)
    kind = number % 8
    if kind < 5:
        text = unique + " ".join(rng.choices(WORDS, k=600))
        if kind % 2:
            headers["x-session-id"] = unique
        said = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 8, "user": unique}
        connection.request("POST", "/v1/chat/completions", json.dumps(said), headers)
    elif kind < 7:
        flags = {"sequence_id": unique, "sequence_start": True, "sequence_end": kind == 6}
        connection.request("POST", f"/v2/models/{model}/infer", json.dumps({"parameters": flags}), headers)
    else:
        connection.request("POST", f"/v2/models/none-{rng.getrandbits(60)}/infer", "{}", headers)
    answer = connection.getresponse()
    answer.read()
    return answer.status


def flood(router: Serving, first: int, count: int) -> Counter[int]:
    """Send so many requests over some connections; return their statuses."""
    statuses: Counter[int] = Counter()
    lock = threading.Lock()

    def run(start: int) -> None:
        rng = random.Random(start)
        connection = http.client.HTTPConnection(router.http, timeout=PATIENCE)
        found = Counter(ask(connection, rng, number) for number in range(start, first + count, CLIENTS))
        connection.close()
        with lock:
            statuses.update(found)

    threads = [threading.Thread(target=run, args=(first + at,)) for at in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statuses


@pytest.mark.timeout(120 + REQUESTS // 100)
def test_memory_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(POLICY)
    members_file = tmp_path / "members.txt"
    with ExitStack() as stack:
        members: list[StandInMember] = stack.enter_context(stand_ins(3, models=MODELS))
        lasting, passing = members[:2], members[2]

        def come_and_go(number: int) -> str:
            """Write the members, of which one has never been there before."""
            lines = [each.address for each in lasting] + [f"{passing.address} name=passing-{number}"]
            members_file.with_suffix(".new").write_text("\n".join(lines) + "\n")
            members_file.with_suffix(".new").replace(members_file)
            return f'nerite_router_member_ready{{member="passing-{number}",pool="main"}}'

        come_and_go(0)
        settings = {"index_bytes": INDEX, "max_sequences": SEQUENCES, "sequence_idle": "10m"}
        table = pool(members_file=str(members_file), **settings)
        router = stack.enter_context(routing(tmp_path, table, router=f'{ROUTER}policy-file = "policy.toml"\n'))
        part = REQUESTS // 16
        sizes: list[int] = []
        statuses: Counter[int] = Counter()
        for number in range(16):
            name = come_and_go(number + 1)
            eventually(lambda name=name: router.metrics().get(name) == 1)
            statuses += flood(router, number * part, part)
            for each in members:
                each.requests.clear()
            sizes.append(resident(router))
        assert statuses.keys() <= {200, 404, 429}, statuses
        assert statuses[200] > REQUESTS // 2
        shown = [size // 1_000_000 for size in sizes]
        print("MB:", shown)
        assert max(sizes[8:]) - max(sizes[4:8]) < GROWTH, f"MB: {shown}"
        caches = router.metrics()
        for name, value in caches.items():
            if name.startswith("nerite_internal_cache_bytes"):
                assert value <= caches[name.replace("_bytes", "_limit_bytes")], name
        assert not [name for name in caches if "passing-" in name and "passing-16" not in name]

"""A router whose members come and go, or send what is no HTTP: clients get answers, and nothing is left over."""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from routing import Received, StandInMember, chunk, events, pool, reset, response, routing, samples, stand_ins
from serving import PATIENCE, Serving, eventually

CHAT = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True})
ROUNDS = 12


def answer(asked: Received, connection: socket.socket) -> bytes | None:
    """Answer an inference at once, and a chat with ten events over a while."""
    if "chat" not in asked.path:
        return response(asked.body)
    connection.sendall(events("0", end=False))
    for number in range(1, 10):
        time.sleep(0.01)
        connection.sendall(chunk(f"data: {number}\n\n".encode()))
    return b"0\r\n\r\n"


class Client(threading.Thread):
    """Asks one thing after another until it is told to stop, and counts what it gets."""

    def __init__(self, router: Serving, path: str, body: str) -> None:
        super().__init__()
        self.router, self.path, self.body = router, path, body
        self.found: Counter[str] = Counter()
        self.over = threading.Event()
        self.start()

    def run(self) -> None:
        connection = http.client.HTTPConnection(self.router.http, timeout=PATIENCE)
        while not self.over.is_set():
            connection.request("POST", self.path, self.body)
            got = connection.getresponse()
            told = got.read().decode()
            if not self.path.endswith("completions"):
                self.found[f"{got.status} {told if got.status != 200 else told == self.body}"] += 1
            elif got.status != 200:
                self.found[f"{got.status} {told}"] += 1
            else:
                whole = told == "".join(f"data: {number}\n\n" for number in range(10))
                self.found["whole" if whole else "told" if 'data: {"error"' in told else told] += 1
        connection.close()


def is_at_rest(router: Serving) -> bool:
    found = router.metrics()
    open_ones = [value for name, value in found.items() if name.startswith("nerite_router_member_requests")]
    work = [value for name, value in found.items() if name.startswith("nerite_router_member_work")]
    return not any(open_ones) and not any(work) and found['nerite_router_under_way{pool="main"}'] == 0


def test_members_that_come_and_go(tmp_path: Path) -> None:
    members = [StandInMember(answer) for _ in range(3)]
    try:
        settings = pool(*(each.address for each in members), retry_floor=1000)
        with routing(tmp_path, f"{settings}[pool.ejection]\nmax-ejected = 0\n") as router:
            clients = [Client(router, "/v2/models/m/infer", "{}") for _ in range(3)]
            clients += [Client(router, "/v1/chat/completions", CHAT) for _ in range(3)]
            try:
                for number in range(ROUNDS):
                    place = number % 3
                    port = int(members[place].address.rpartition(":")[2])
                    members[place].stop()
                    eventually(lambda: ready(router) < 3)
                    members[place] = StandInMember(answer, port=port)
                    eventually(lambda: ready(router) == 3)
            finally:
                for each in clients:
                    each.over.set()
                for each in clients:
                    each.join()
            assert [set(each.found) for each in clients[:3]] == [{"200 True"}] * 3
            assert all(each.found["whole"] and not set(each.found) - {"whole", "told"} for each in clients[3:])
            eventually(lambda: is_at_rest(router))
    finally:
        for each in members:
            each.stop()


def ready(router: Serving) -> float:
    return samples(router, "nerite_router_members_ready")['nerite_router_members_ready{pool="main"}']


WHOLE = (
    response(b'{"a":1}'),
    events("one", "two"),
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.0 200 OK\r\n\r\nuntil the end",
)


@pytest.mark.parametrize("seed", range(3))
def test_members_that_send_anything(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)

    def wrong(asked: Received, connection: socket.socket) -> None:
        data = bytearray(rng.choice(WHOLE))
        for _ in range(rng.randint(0, 3)):
            at = rng.randrange(len(data))
            data[at : at + rng.choice((0, 1, 4))] = rng.randbytes(rng.choice((0, 1, 2)))
        for at in range(0, len(data), 20):
            connection.sendall(data[at : at + 20])
        if rng.random() < 0.3:
            reset(connection)

    with stand_ins(2, wrong) as members, routing(tmp_path, pool(*(each.address for each in members))) as router:
        for _ in range(150):
            try:
                status, _, _ = router.ask("POST", "/v1/chat/completions", CHAT.encode())
            except (http.client.HTTPException, ConnectionError):  # the answer broke off, or has an odd head
                continue
            assert 100 <= status <= 999
        eventually(lambda: is_at_rest(router))
        for each in members:
            each.answer = lambda asked, connection: response()
        eventually(lambda: router.ask("POST", "/v2/models/m/infer", b"{}")[0] == 200)

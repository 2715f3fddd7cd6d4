"""The model of front processes, and the phases and spreads that its benchmark computes."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import front_model  # noqa: E402
import front_phases  # noqa: E402
import front_spread  # noqa: E402
from front_model import Network, ServiceTimes, Simulation, bound, from_table  # noqa: E402

TIMES = ServiceTimes(front_in=10, front_out=10, core_in=2, core_out=2, worker=3, wake=0)


def rate(network: Network) -> float:
    return Simulation(network).run(0.1).rate


def test_one_client_has_the_rate_of_its_own_way() -> None:
    times = TIMES._replace(wake=1)
    found = rate(Network(1, 1, 1, 4, times, wire=13))
    # Five visits, each with a wake-up.
    assert found == pytest.approx(1e6 / (times.total + 5 + 13), rel=0.05)


@pytest.mark.parametrize(
    ("fronts", "processors", "limit"),
    [(1, 16, 1e6 / 20), (4, 16, 4e6 / 20), (16, 64, 1e6 / 4), (4, 2, 2e6 / 27)],
    ids=["front", "fronts", "core", "processors"],
)
def test_many_clients_reach_the_bound(fronts: int, processors: int, limit: float) -> None:
    network = Network(256, fronts, 4, processors, TIMES)
    assert bound(network) == pytest.approx(limit)
    assert 0.9 * limit < rate(network) < 1.03 * limit


def test_messages_that_wait_share_a_wake_up() -> None:
    costly = TIMES._replace(wake=50)
    few = Simulation(Network(1, 2, 1, 8, costly)).run(0.1)
    many = Simulation(Network(256, 2, 1, 8, costly)).run(0.1)
    assert few.batch == pytest.approx(1)
    assert many.batch > 4


def test_processes_take_turns_on_a_processor() -> None:
    network = Network(64, 2, 2, 1, TIMES, turn=5.0)
    assert rate(network) == pytest.approx(bound(network), rel=0.05)


def test_a_seed_gives_the_same_outcome() -> None:
    network = Network(16, 2, 2, 4, TIMES)
    assert Simulation(network, 3).run(0.05) == Simulation(network, 3).run(0.05)


def test_times_are_read_from_the_row_with_most_fronts() -> None:
    rows = [
        {"load": "HTTP, small", "processes": 1, "core": 20.0, "fronts": 0.0, "others": 6.0},
        {"load": "HTTP, small", "processes": 2, "core": 8.0, "fronts": 22.0, "others": 6.0}
        | {"core_sleeps": 0.5, "fronts_sleeps": 0.5, "others_sleeps": 0.5},
        {"load": "gRPC, small", "processes": 4, "core": 1.0, "fronts": 1.0, "others": 1.0},
    ]
    assert from_table(rows, "HTTP", wake=4) == ServiceTimes(10, 10, 3, 3, 4, 4)
    with pytest.raises(ValueError, match="no load"):
        from_table(rows, "chat", 4)


def test_the_tables_have_all_numbers() -> None:
    text = front_model.tables(Network(8, 1, 2, 1, TIMES), 0.002)
    lines = [line for line in text.splitlines() if line.startswith("| 64 |")]
    assert [len(line.split("|")) for line in lines] == [len(front_model.FRONTS) + 3, 8]


PROCESS = ["main (nerite/fronts/process.py:230)", "Runner.run (asyncio/runners.py:118)"]
RECEIVED = [*PROCESS, "HttpConnection.buffer_updated (nerite/transports/http/connection.py:175)"]
CHANNEL = "Channel._send (nerite/workers/ipc/channel.py:153)"


@pytest.mark.parametrize(
    ("frames", "phase"),
    [
        ([*PROCESS, "uv_run (core.c:464)"], "loop"),
        ([*PROCESS, "uv__read (stream.c:1050)", "read (libc.so.6)"], "read"),
        ([*PROCESS, "uv__io_poll (linux.c:1452)", "epoll_pwait (libc.so.6)"], "poll"),
        ([*PROCESS, "SSLProtocol__do_read (sslproto.c:10)", "read (libc.so.6)"], "TLS"),
        (RECEIVED, "parse"),
        ([*RECEIVED, "read_tensors (nerite/transports/http/json_tensors.py:9)"], "JSON"),
        ([*RECEIVED, "infer (nerite/inference_entry.py:112)"], "decide"),
        ([*RECEIVED, CHANNEL, "send (libc.so.6)"], "hand over"),
        ([*PROCESS, "HttpService.answer (nerite/transports/http/service.py:256)"], "answer"),
        ([*PROCESS, "HttpConnection.send (nerite/transports/http/connection.py:245)", "write (libc.so.6)"], "write"),
    ],
)
def test_a_stack_belongs_to_a_phase(frames: list[str], phase: str) -> None:
    assert front_phases.phase(frames) == phase


def test_shares_are_those_of_the_main_thread() -> None:
    raw = [
        f"thread (1): MainThread;{';'.join(RECEIVED)} 30",
        f"thread (1): MainThread;{';'.join(PROCESS)} 10",
        "thread (2): watchdog;wait (threading.py:331) 60",
    ]
    found = front_phases.shares(raw)
    assert found["parse"] == 0.75
    assert found["loop"] == 0.25
    assert sum(found.values()) == 1


def test_the_largest_connections_first_is_the_most_even_spread() -> None:
    assert front_spread.busiest([3, 1]) == 1.5
    assert front_spread.largest_first(2, 2) == pytest.approx(4 / 3)
    chance = random.Random(1)
    assert all(front_spread.at_random(16, 4, chance) >= front_spread.largest_first(16, 4) - 1e-9 for _ in range(200))

"""What clients may have together, and the defaults for a machine."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from doubles import FakeAside, samples, written
from nerite.core.errors import Exhausted
from nerite.transports import ports
from nerite.transports.limits import (
    ByteReservation,
    BytesInFlight,
    SharedBytesInFlight,
    TransportLimits,
    bytes_for,
    connections_for,
)

GB = 2**30


def test_bytes_that_there_is_room_for() -> None:
    of = BytesInFlight(100)
    one, other = ByteReservation(of), ByteReservation(of)
    assert one.take(60) and other.take(40)
    assert (of.used, of.fits(0), of.fits(1)) == (100, True, False)
    assert not one.take(1)
    assert (one.size, of.used) == (60, 100)
    one.give_back()
    assert (one.size, of.used) == (0, 40)
    assert one.take(60)
    one.give_back(10)
    assert (one.size, of.used) == (50, 90)
    other.absorb(one)
    assert (one.size, other.size, of.used) == (0, 90, 90)
    other.give_back()
    assert of.used == 0


def test_a_message_in_pieces_is_counted_ahead() -> None:
    of = BytesInFlight(100_000)
    share = ByteReservation(of)
    steps = set()
    for arrived in range(1_000, 60_001, 1_000):
        assert share.cover(arrived, 60_000)
        assert arrived <= share.size <= min(2 * arrived, 60_000)
        steps.add(share.size)
    assert (len(steps), of.used) == (5, 60_000)
    # Where there is no room ahead, what has arrived is counted alone.
    other = ByteReservation(of)
    assert other.cover(30_000, 60_000)
    assert other.size == 30_000
    assert not other.cover(41_000, 60_000)
    assert (other.size, of.used, of.refused) == (30_000, 90_000, 0)


def test_no_limit() -> None:
    of = BytesInFlight(0)
    assert of.fits(10**15)
    assert ByteReservation(of).take(10**15)
    assert of.used == 10**15


def test_processes_share_one_limit() -> None:
    slots = memoryview(bytearray(3 * 8)).cast("Q")
    first, second = (SharedBytesInFlight(100, slots, own) for own in (0, 1))
    assert first.take(60)
    assert second.fits(40) and not second.fits(41)
    assert not second.take(41)
    assert second.take(30)
    assert first.total == second.total == 90
    assert (first.used, second.used) == (60, 30)
    first.give_back(60)
    assert second.take(70) and second.total == 100
    slots[2] = 7  # of a process that then ends
    first.ended(2)
    assert first.total == 100


def test_a_refusal_says_whether_it_helps_to_wait() -> None:
    of = BytesInFlight(100)
    later, never = of.refusal(50), of.refusal(101)
    assert (later.http_status, later.grpc_status, later.retry_after) == (429, 8, 1)
    assert "--max-bytes-in-flight" in later.message and "Try again" in later.message
    assert (never.retry_after, "Try again" in never.message) == (0, False)
    assert "--max-bytes-in-flight" in never.message
    assert of.refused == 2
    share = ByteReservation(of)
    with pytest.raises(Exhausted):
        share.take_or_raise(101)
    assert (share.size, of.used, of.refused) == (0, 0, 3)


def test_bytes_are_exact_in_many_threads() -> None:
    of = BytesInFlight(10_000_000)

    def work() -> None:
        share = ByteReservation(of)
        for _ in range(20_000):
            assert share.take(7)
        share.give_back(7 * 10_000)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert of.used == 4 * 7 * 10_000


def test_requests_have_to_come_on_faster_where_there_is_little_room() -> None:
    bounds = TransportLimits(max_bytes=100, aside=FakeAside())
    assert bounds.patience(60) == 60
    assert bounds.bytes.take(75)
    assert bounds.patience(60) == 60
    assert bounds.bytes.take(1)
    assert bounds.patience(60) == 7.5
    assert bounds.patience(0) == 0
    assert TransportLimits(aside=FakeAside()).patience(60) == 60


@pytest.mark.parametrize(
    ("files", "connections"),
    [(64, 32), (256, 128), (1024, 768), (4096, 3072), (20_000, 15_000), (1_048_576, 16_384), (-1, 16_384)],
)
def test_connections_where_so_many_files_may_be_open(files: int, connections: int) -> None:
    assert connections_for(files) == connections


def test_bytes_where_there_is_so_much_memory() -> None:
    assert [bytes_for(memory) for memory in (16 * GB, 2 * GB, 100_000_000, 0)] == [4 * GB, GB // 2, 64 * 2**20, 0]


def test_open_connections_are_reported_by_port() -> None:
    server: Any = SimpleNamespace(connections_by_port={"http": 4, "grpc": 0})
    found = samples(lambda page: page.write(ports.METRICS, [ports.METRICS.row(server)]))
    assert found == {"nerite_connections": {'port="http"': 4, 'port="grpc"': 0}}


def test_the_metrics_tell_everything() -> None:
    bounds = TransportLimits(max_bytes=1000, max_connections=7, aside=FakeAside())
    bounds.bytes.take(10)
    bounds.bytes.refusal(1)
    bounds.refused["stalled"] += 2
    bounds.closed["idle"] += 3
    page = written(bounds.write_metrics).decode()
    for line in (
        "nerite_connections_limit 7",
        'nerite_connections_closed_total{reason="refused"} 0',
        'nerite_connections_closed_total{reason="idle"} 3',
        "nerite_bytes_in_flight 10",
        "nerite_bytes_in_flight_limit 1000",
        'nerite_arrivals_refused_total{reason="bytes_in_flight"} 1',
        'nerite_arrivals_refused_total{reason="stalled"} 2',
        'nerite_arrivals_refused_total{reason="fields"} 0',
        'nerite_arrivals_refused_total{reason="message_size"} 0',
    ):
        assert line in page.splitlines()

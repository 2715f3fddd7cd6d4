"""Keepalive and connection age, decided without a clock."""

from __future__ import annotations

import math

from nerite.config.options import KeepaliveOptions
from nerite.transports.grpc.keepalive import Keepalive, KeepaliveRules, KeepaliveVerdict


def keepalive(**options: int) -> Keepalive:
    return Keepalive(KeepaliveRules(KeepaliveOptions(**{"time_ms": 10_000, "timeout_ms": 2_000, **options})), now=100.0)


def test_by_default_a_silent_client_is_left_alone_for_two_hours() -> None:
    of = Keepalive(KeepaliveRules(KeepaliveOptions()), now=0.0)
    assert of.check(7199.0, calls=1) is KeepaliveVerdict.NOTHING
    assert of.check(7200.0, calls=1) is KeepaliveVerdict.PING


def test_a_silent_client_is_pinged_and_given_up_if_it_stays_silent() -> None:
    of = keepalive()
    assert of.check(109.9, calls=1) is KeepaliveVerdict.NOTHING
    assert of.check(110.0, calls=1) is KeepaliveVerdict.PING
    assert of.check(111.9, calls=1) is KeepaliveVerdict.NOTHING
    assert of.check(112.0, calls=1) is KeepaliveVerdict.ABORT


def test_a_client_that_answers_is_alive() -> None:
    of = keepalive()
    assert of.check(110.0, calls=1) is KeepaliveVerdict.PING
    of.heard(110.5)
    assert of.check(112.5, calls=1) is KeepaliveVerdict.NOTHING
    assert of.check(120.5, calls=1) is KeepaliveVerdict.PING


def test_a_client_without_calls_is_pinged_only_if_it_may_be() -> None:
    assert keepalive().check(500.0, calls=0) is KeepaliveVerdict.NOTHING
    assert keepalive(permit_without_calls=True).check(500.0, calls=0) is KeepaliveVerdict.PING


def test_only_so_many_pings_follow_each_other_without_an_answer_of_the_server() -> None:
    of = keepalive(max_pings_without_data=2)
    verdicts = []
    for now in range(110, 160, 10):
        verdicts.append(of.check(float(now), calls=1))
        of.heard(float(now))
    assert verdicts == [KeepaliveVerdict.PING] * 2 + [KeepaliveVerdict.NOTHING] * 3
    of.answered = True
    assert of.check(160.0, calls=1) is KeepaliveVerdict.PING
    without_limit = keepalive(max_pings_without_data=0)
    for now in range(110, 160, 10):
        assert without_limit.check(float(now), calls=1) is KeepaliveVerdict.PING
        without_limit.heard(float(now))


def test_an_old_connection_is_shut_down_and_later_aborted() -> None:
    of = keepalive(max_connection_age_ms=5_000, max_connection_age_grace_ms=3_000)
    assert of.check(104.9, calls=1) is KeepaliveVerdict.NOTHING
    assert of.check(105.0, calls=1) is KeepaliveVerdict.SHUT_DOWN
    of.heard(107.0)
    assert of.check(107.9, calls=1) is KeepaliveVerdict.NOTHING
    assert of.check(108.0, calls=1) is KeepaliveVerdict.ABORT


def test_an_old_connection_may_take_its_time_if_there_is_no_grace() -> None:
    of = keepalive(max_connection_age_ms=5_000, time_ms=10**9)
    assert of.check(105.0, calls=1) is KeepaliveVerdict.SHUT_DOWN
    assert of.check(100_000.0, calls=1) is KeepaliveVerdict.NOTHING


def test_looked_at_often_enough_for_the_rules_and_not_more() -> None:
    def every(**options: int) -> float:
        return KeepaliveRules(KeepaliveOptions(**options)).check_interval

    assert every() == 5.0
    assert every(timeout_ms=10**9) == 30.0
    assert every(time_ms=1) == 0.02
    assert every(max_connection_age_ms=1_000) == 0.25
    assert KeepaliveRules(KeepaliveOptions()).max_age == math.inf

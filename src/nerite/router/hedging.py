"""Hedging: a request whose member is late is sent to another one, too, and the first answer wins."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

from nerite.balancing.member import Member
from nerite.core.errors import NeriteError
from nerite.router.exchange import RoutedExchange
from nerite.router.member_call import GatewayTimeout, MemberCall
from nerite.router.pools import RouterPool


class HedgedRelay(ABC):
    """The client's side of a request that may have two exchanges, whatever the protocol."""

    __slots__ = ("_hedge_timer", "_refusal", "_second", "exchange")

    def __init__(self) -> None:
        self.exchange: RoutedExchange
        """The first exchange, which the owner sets."""
        self._second: RoutedExchange | None = None
        """The second one, if the first is late."""
        self._refusal: NeriteError | None = None
        """Why the first failed, while the second is under way."""
        self._hedge_timer: asyncio.TimerHandle | None = None

    @abstractmethod
    def begin_call(self, pool: RouterPool, member: Member, exchange: RoutedExchange) -> MemberCall:
        """Send the request to a member for one of the exchanges."""

    @abstractmethod
    def send_error(self, error: NeriteError) -> None:
        """Answer with an error. No part of an answer was sent."""

    @abstractmethod
    def break_off(self, error: NeriteError) -> None:
        """End an answer that has begun and cannot be completed."""

    def refuse(self, error: NeriteError) -> None:
        """Answer with an error of the first exchange, unless the second may still answer."""
        if self._second is not None and not self._second.over and not isinstance(error, GatewayTimeout):
            self._refusal = error
            return
        self.end_hedge()
        self.send_error(error)

    def second_refused(self) -> None:
        """Answer with the error of the first exchange if it has failed: the second has no answer either."""
        if self._refusal is not None:
            self.send_error(self._refusal)

    def leaves_to_first(self, exchange: RoutedExchange) -> bool:
        """Return whether the first exchange may still answer instead of this one."""
        return exchange is not self.exchange and not self.exchange.over

    def hedge_if_late(self, pool: RouterPool) -> None:
        """Begin the second exchange when the first has no answer after a while, if requests are hedged."""
        if self._hedge_timer is None and (delay := pool.balancer.hedge_delay_ns(self.exchange.request)) is not None:
            self._hedge_timer = asyncio.get_running_loop().call_later(delay / 1e9, self._hedge)

    def _hedge(self) -> None:
        client = _SecondClient(self)
        self._second = second = self.exchange.again(client)
        if second is not None:
            client.exchange = second
            second.begin()

    def won(self, exchange: RoutedExchange) -> None:
        """End the other exchange: this one has an answer."""
        if self._hedge_timer is None:
            return
        if exchange is self.exchange:
            self.end_hedge()
        else:
            self._hedge_timer.cancel()
            exchange.take_over(self.exchange)
            self.exchange.cancel()

    def end_hedge(self) -> None:
        """End the second exchange, or do not begin it."""
        if self._hedge_timer is not None:
            self._hedge_timer.cancel()
        second, self._second = self._second, None
        if second is not None:
            second.cancel()


class _SecondClient:
    """The client's side of the second exchange."""

    __slots__ = ("_relay", "exchange")

    def __init__(self, relay: HedgedRelay) -> None:
        self._relay = relay
        self.exchange: RoutedExchange

    def send_to(self, pool: RouterPool, member: Member) -> MemberCall:
        return self._relay.begin_call(pool, member, self.exchange)

    def refuse(self, error: NeriteError) -> None:
        self._relay.second_refused()

    def break_off(self, error: NeriteError) -> None:
        self._relay.break_off(error)

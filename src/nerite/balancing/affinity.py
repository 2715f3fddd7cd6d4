"""Which member has an advantage for a request: it has the prompt's beginning, the session or the adapter.

The load is bounded. A member gets a request because of its advantage only while its expected work is no more than that
of the least loaded member and what the advantage saves; or, if it has half of the prompt, no more than
``load_factor`` times the mean. Beyond that another member gets the request, and has the advantage from then on, too: so
what everybody asks for spreads over as many members as it needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from nerite.balancing.holder_index import HolderIndex
from nerite.balancing.member import RoutedRequest
from nerite.balancing.member_load import MemberLoad
from nerite.balancing.policy import PoolPolicy

_MUCH: Final = 0.5
"""Share of a prompt that is worth going to a member that has more than the least work."""


class Candidates(NamedTuple):
    """The members that can take a request."""

    loads: list[MemberLoad]
    by_ticket: Mapping[int, MemberLoad]


class Affinity:
    """Knows what members hold."""

    def __init__(self, policy: PoolPolicy) -> None:
        self._policy = policy
        self.index = HolderIndex(policy.index_bytes)

    def prefill_work(self, request: RoutedRequest, ticket: int) -> float:
        """Return the work that a request is at a member before the first token of its answer."""
        tokens = request.prompt_tokens
        if request.prefix:
            place = self.index.held(request.prefix, ticket)
            if place >= 0:
                tokens = max(0.0, tokens - request.prefix_tokens[place])
        work = tokens * self._policy.prefill_weight
        if request.lora and ticket not in self.index.holders(_adapter_key(request)):
            work += self._policy.adapter_tokens
        return work

    def add(self, request: RoutedRequest, ticket: int) -> None:
        """Note that a request is sent to a member, which holds what belongs to it from now on."""
        if request.prefix and self._policy.prefix:
            self.index.add(request.prefix, ticket)
        if request.session:
            self.index.move(_session_key(request), ticket)
        if request.lora:
            self.index.add((_adapter_key(request),), ticket)

    def choose(self, request: RoutedRequest, fit: Candidates) -> tuple[MemberLoad, str] | None:
        """Return the member that has the greatest advantage within the bound, and a word for it. None: there is none.

        ``fit`` is in order of the scores.
        """
        if not (request.prefix or request.session or request.lora):
            return None
        loads = fit.loads
        least = loads[0].score
        most = self._policy.load_factor * sum([load.score for load in loads]) / len(loads)
        weight = self._policy.prefill_weight
        if request.session:
            load = self._lightest(_session_key(request), fit)
            if load and load.score <= max(most, least + request.prompt_tokens * weight / load.speed):
                return load, "session"
        if request.prefix and (load := self._with_prefix(request, fit, least, most)):
            return load, "prefix"
        if request.lora:
            load = self._lightest(_adapter_key(request), fit)
            if load and load.score <= max(most, least + self._policy.adapter_tokens / load.speed):
                return load, "lora"
        return None

    def _lightest(self, key: int, fit: Candidates) -> MemberLoad | None:
        best = None
        for ticket in self.index.holders(key):
            load = fit.by_ticket.get(ticket)
            if load is not None and (best is None or load.score < best.score):
                best = load
        return best

    def _with_prefix(self, request: RoutedRequest, fit: Candidates, least: float, most: float) -> MemberLoad | None:
        seen: tuple[int, ...] = ()
        for place in range(self.index.deepest(request.prefix), -1, -1):
            key = request.prefix[place]
            holders = self.index.holders(key)
            if holders == seen:
                continue  # They hold the longer beginning, too, and that was not enough.
            seen = holders
            load = self._lightest(key, fit)
            if load is None:
                continue
            tokens = request.prefix_tokens[place]
            bound = least + tokens * self._policy.prefill_weight / load.speed
            if tokens >= _MUCH * request.prompt_tokens:
                bound = max(bound, most)
            if load.score <= bound:
                return load
        return None


def _session_key(request: RoutedRequest) -> int:
    return hash(("session", request.model, request.session))


def _adapter_key(request: RoutedRequest) -> int:
    return hash(("lora", request.model, request.lora))

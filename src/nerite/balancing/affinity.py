"""Which member has an advantage for a request: it has the prompt's beginning, the session or the adapter.

The load is bounded. A member gets a request because of its advantage only while its expected work is no more than
``load_factor`` times the mean, or than that of the least loaded member and a multiple of what the advantage saves.
Beyond that another member gets the request, and has the advantage from then on, too: so what everybody asks for spreads
over as many members as it needs. What a large share of all requests ask for spreads earlier, over the same share of
the members: so those requests need not wait where another prompt is computed. Of those that have it, the lighter of as
many as that, or two, that were used last comes first: the others may have dropped from their caches what they once had.

Where prompts return, one of which no member has much goes to the member that has computed the fewest tokens of prompts,
within a bound of its load: so caches fill evenly. A member that holds more than fits computes it again and again.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Final, NamedTuple
from zlib import crc32

from nerite.balancing.frequent_keys import FrequentKeys
from nerite.balancing.hash_ring import HashRing
from nerite.balancing.holder_index import MOST_HOLDERS, HolderIndex
from nerite.balancing.member import RoutedRequest
from nerite.balancing.member_load import MemberLoad
from nerite.balancing.policy import PoolPolicy

_SAVED: Final = 3.0
"""How much more a member may have to do than the least loaded one, in relation to what it saves by that.

What is computed twice delays all requests, and takes room in two caches; waiting delays one request. In the simulations
of ``benchmarks/balancing.py`` 3 is better than 1 where caches are almost full, and no worse elsewhere.
"""
_SAVED_ONCE: Final = 0.5
"""The same for what has fewer holders than its share of the requests asks for: it is computed once more, for many."""
_SHARED: Final = 0.2
_NOT_SHARED: Final = 0.02
"""Shares of work from elsewhere above which there are other routers, and below which there are none."""
_RARE: Final = 0.1
"""Share of prompts that members had up to which it is of no use to agree with other routers on the rest."""
_HIT_WEIGHT: Final = 0.02
"""Of the newest prompt in the average of shares."""
_SCORE: Final = attrgetter("score")
_MUCH: Final = 0.5
"""Share of a prompt that is worth going to a member that has more than the least work."""


class Candidates(NamedTuple):
    """The members that can take a request."""

    loads: list[MemberLoad]
    by_ticket: Mapping[int, MemberLoad]
    by_name: Mapping[str, MemberLoad]


class Affinity:
    """Knows what members hold."""

    def __init__(self, policy: PoolPolicy) -> None:
        self._policy = policy
        self.index = HolderIndex(policy.index_bytes)
        self.ring = HashRing({})
        self._frequent = FrequentKeys()
        """Of each prompt, the longest beginning that any member has."""
        self._shared = False
        self._hits = 1.0
        """Share of prompts that members had, on average; before anything is known, all."""

    def begin(self, request: RoutedRequest, load: MemberLoad) -> float:
        """Note that a request is sent to a member, which holds what belongs to it from then on.

        Returns the work that it is there before the first token of its answer.
        """
        ticket = load.ticket
        tokens = request.prompt_tokens
        if request.prefix and self._policy.prefix:
            place = self.index.held(request.prefix, ticket)
            if place >= 0:
                tokens = max(0.0, tokens - request.prefix_tokens[place])
            if request.prompt_tokens:
                self._hits += _HIT_WEIGHT * (1.0 - tokens / request.prompt_tokens - self._hits)
            self.index.add(request.prefix, ticket)
            load.computed += tokens
        work = tokens * self._policy.prefill_weight
        if request.lora:
            key = _adapter_key(request)
            if ticket not in self.index.holders(key):
                work += self._policy.adapter_tokens
            self.index.add((key,), ticket)
        if request.session:
            self.index.move(_session_key(request), ticket)
        return work

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
            key = _session_key(request)
            load = self._lightest(key, fit)
            if load is None and self._shared:
                load = next(self.ring.walk(key, fit.by_name))
            if load and load.score <= max(most, least + _SAVED * request.prompt_tokens * weight / load.speed):
                return load, "session"
        if self._policy.prefix and request.prefix and (found := self._by_prefix(request, fit, least, most)):
            return found
        if request.lora:
            key = _adapter_key(request)
            load = self._lightest(key, fit)
            if load and load.score <= max(most, least + self._policy.adapter_tokens / load.speed):
                return load, "lora"
            if load is None:
                # Nobody has it: adapters spread over the members, and all routers agree where each is loaded first.
                load = next(self.ring.walk(key, fit.by_name))
                if load.score <= max(most, least):
                    return load, "hash"
        return None

    def set_share_of_others(self, share: float) -> None:
        """Take how much of the members' work comes from elsewhere.

        If it is much, there are other routers: what no member has is sent where each of them would send it. What was
        learned before is forgotten then, because each router has learned something else.
        """
        if not self._shared and share > _SHARED:
            self._shared = True
            self.index = HolderIndex(self._policy.index_bytes)
        elif share < _NOT_SHARED:
            self._shared = False

    def _lightest(self, key: int, fit: Candidates) -> MemberLoad | None:
        best = None
        for ticket in self.index.holders(key):
            load = fit.by_ticket.get(ticket)
            if load is not None and (best is None or load.score < best.score):
                best = load
        return best

    def _by_prefix(
        self, request: RoutedRequest, fit: Candidates, least: float, most: float
    ) -> tuple[MemberLoad, str] | None:
        seen: tuple[int, ...] = ()
        deepest = self.index.deepest(request.prefix)
        half = _MUCH * request.prompt_tokens
        weight = self._policy.prefill_weight
        wanted = 0
        share = self._frequent.add(request.prefix[max(deepest, 0)])
        if deepest >= 0 and request.prefix_tokens[deepest] >= half:
            wanted = min(round(share * len(fit.loads)), MOST_HOLDERS)
        elif not self._shared and self._hits > _RARE:
            return self._emptiest(request, fit, least), "least_cached"
        for place in range(deepest, -1, -1):
            tokens = request.prefix_tokens[place]
            if self._shared and tokens < half:
                break
            key = request.prefix[place]
            holders = self.index.holders(key)
            if holders == seen:
                continue  # They hold the longer beginning, too, and that was not enough.
            seen = holders
            there = [load for ticket in holders if (load := fit.by_ticket.get(ticket))]
            if len(there) > 1:
                newest = max(2, wanted)
                there[:newest] = sorted(there[:newest], key=_SCORE)
            times = _SAVED if len(there) >= wanted else _SAVED_ONCE
            for load in there:
                saved = tokens * weight / load.speed
                if load.score <= (max(most, least + times * saved) if tokens >= half else least + saved):
                    return load, "prefix"
        if self._shared and self._hits > _RARE and deepest + 1 < len(request.prefix):
            # The first beginning that is not known is the same for all routers that know what is common.
            for load in self.ring.walk(request.prefix[deepest + 1], fit.by_name):
                if load.score <= max(most, least + _SAVED * request.prompt_tokens * weight / load.speed):
                    return load, "hash"
        return None

    def _emptiest(self, request: RoutedRequest, fit: Candidates, least: float) -> MemberLoad:
        """Return the member that has computed the fewest tokens of prompts, of those that have little work.

        Little is the least work, and this prompt's own times the share of prompts that members had.
        """
        more = self._hits * request.prompt_tokens * self._policy.prefill_weight
        light = [load for load in fit.loads if load.score <= least + more / load.speed]
        return min(light, key=lambda load: load.computed / load.speed)


def _session_key(request: RoutedRequest) -> int:
    return crc32(f"{request.model}\0{request.session}".encode())  # Alike in all routers.


def _adapter_key(request: RoutedRequest) -> int:
    return crc32(f"lora\0{request.model}\0{request.lora}".encode())

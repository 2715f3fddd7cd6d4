"""Simulated servers of a language model: a prefix cache of blocks, continuous batching, and the time of each step."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, Final

from nerite.balancing.member import LoadReport

BLOCK: Final = 256
"""Bytes of a block of the cache: 64 tokens."""
BYTES_PER_TOKEN: Final = 4
MOST_RUNNING: Final = 32
PREFILL_TOKENS: Final = 2048
"""Tokens of prompts that a step computes at most (chunked prefill)."""
STEP_TOKENS: Final = 2
"""Tokens that a step decodes for each request: fewer events than one at a time."""
WEIGHTS_S: Final = 0.008
"""To read the weights once: the time of a step for one token of one request."""
DECODE_S: Final = 0.00015
"""For each request that decodes, for each token."""
PREFILL_S: Final = 0.0001
"""For each token of a prompt that is not cached."""


class SimulatedRequest:
    """A prompt, the length of its answer, and what became of it."""

    __slots__ = ("answer", "arrived", "attempt", "blocks", "cached", "direct", "failed", "first", "left", "prefill",
                 "prompt", "routed", "session", "tokens", "tried")  # fmt: skip

    def __init__(self, prompt: bytes, answer: int, arrived: float, session: str = "", direct: bool = False) -> None:
        self.prompt = prompt
        self.answer = answer
        self.arrived = arrived
        self.session = session
        self.direct = direct
        """It came to the member without any router."""
        self.tokens = len(prompt) // BYTES_PER_TOKEN
        self.blocks: list[int] = []
        last = 0
        for start in range(0, len(prompt) - BLOCK + 1, BLOCK):
            last = hash((last, prompt[start : start + BLOCK]))
            self.blocks.append(last)
        self.cached = 0
        self.prefill = 0
        self.left = answer
        self.first = math.inf
        """When its first token came."""
        self.failed = False
        self.tried: tuple[str, ...] = ()
        self.routed: Any = None
        self.attempt: Any = None


class SimulatedMember:
    """One server."""

    def __init__(self, name: str, cached_tokens: int, slowness: float = 1.0) -> None:
        self.name = name
        self.slowness = slowness
        self.alive = True
        self.waiting: deque[SimulatedRequest] = deque()
        self.running: list[SimulatedRequest] = []
        self.stepping = False
        self._cache: OrderedDict[int, None] = OrderedDict()
        self._most = cached_tokens * BYTES_PER_TOKEN // BLOCK

    @property
    def report(self) -> LoadReport:
        """What it says of its load."""
        return LoadReport(float(len(self.waiting)), float(len(self.running)))

    def plan_step(self) -> float:
        """Begin a step. Returns its seconds."""
        while self.waiting and len(self.running) < MOST_RUNNING:
            request = self.waiting.popleft()
            hits = 0
            for block in request.blocks:
                if block not in self._cache:
                    break
                self._cache.move_to_end(block)
                hits += 1
            # The last token of a prompt is always computed.
            request.cached = min(hits * BLOCK // BYTES_PER_TOKEN, request.tokens - 1)
            request.prefill = request.tokens - request.cached
            self.running.append(request)
        budget = PREFILL_TOKENS
        decoding = 0
        for request in self.running:
            if request.prefill:
                part = min(request.prefill, budget)
                request.prefill -= part
                budget -= part
            else:
                decoding += 1
        prefilled = PREFILL_TOKENS - budget
        decode = STEP_TOKENS * (WEIGHTS_S + DECODE_S * decoding) if decoding else WEIGHTS_S
        return self.slowness * (decode + PREFILL_S * prefilled)

    def end_step(self, now: float, progressed: Callable[[SimulatedRequest, int], None]) -> list[SimulatedRequest]:
        """Hand out the tokens of a step. Returns the requests that have ended."""
        ended = []
        for request in self.running:
            if request.prefill:
                continue
            if math.isinf(request.first):
                request.first = now
                self._keep(request.blocks)
            tokens = min(STEP_TOKENS, request.left)
            request.left -= tokens
            progressed(request, tokens)
            if not request.left:
                ended.append(request)
        self.running = [request for request in self.running if request.left]
        return ended

    def _keep(self, blocks: list[int]) -> None:
        for block in blocks:
            self._cache[block] = None
            self._cache.move_to_end(block)
        while len(self._cache) > self._most:
            self._cache.popitem(last=False)

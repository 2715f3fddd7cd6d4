"""Callers that keep so many requests under way: the generators of ``nerite bench``, with tensors wherever they are.

For 602 KB there and back they take 131 us of processor time over HTTP and 245 over gRPC, where wrk takes 179 and h2load
384, and they know shared memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal, NamedTuple, Self

import numpy as np

from nerite.client.connection import Address
from nerite.tools.bench.forms import BenchOutput, BenchRequest, BenchTensor, GrpcInferForm, HttpInferForm, RoundRobin
from nerite.tools.bench.measurement import BenchPlan, BenchTarget, LoadLevel
from nerite.tools.bench.session import Fleet
from serving import Serving

Protocol = Literal["http", "grpc"]
_WARM_UP = 0.3


class Pace(NamedTuple):
    """What a load showed."""

    rate: float
    """Requests a second."""
    p50: float
    """Milliseconds."""
    p99: float
    client: float
    """Processor time of the busiest client process, in proportion to the time."""


class Callers:
    """Client processes that send one request again and again. A context manager that ends them."""

    def __init__(
        self,
        server: Serving,
        protocol: Protocol,
        model: str,
        inputs: Sequence[BenchTensor],
        outputs: Sequence[BenchOutput],
        processes: int,
    ) -> None:
        address = Address.parse(server.http if protocol == "http" else server.grpc)
        asked = BenchRequest(model, "", tuple(inputs), tuple(outputs))
        form = HttpInferForm(address, {}, asked) if protocol == "http" else GrpcInferForm(asked)
        plan = BenchPlan(BenchTarget(protocol, address), RoundRobin((form.encoded(),)))
        self._fleet = Fleet(plan, processes)

    def __enter__(self) -> Self:
        self._fleet.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._fleet.__exit__()

    def ready(self) -> None:
        """Return when the processes are there."""
        self._fleet.take()

    def pace(self, concurrency: int, seconds: float) -> Pace:
        """Have so many requests under way for that time. Raises ``RuntimeError`` if one fails."""
        self._fleet.begin(LoadLevel(concurrency=concurrency))
        try:
            time.sleep(_WARM_UP)
            before, began = self._fleet.take(), time.perf_counter()
            time.sleep(seconds)
            after, took = self._fleet.take(), time.perf_counter() - began
        finally:
            self._fleet.end()
        records = after.records
        if reasons := [*before.records.reasons, *records.reasons]:
            raise RuntimeError(reasons[0])
        if len(records.ended) < 2:
            raise RuntimeError(f"{len(records.ended)} answers in {took:.1f} s")
        # From the first end to the last one: of few requests, those that the time cuts are too large a part.
        ended = np.sort(records.ended)
        rate = (len(ended) - 1) / float(ended[-1] - ended[0])
        p50, p99 = np.quantile(records.latency, [0.5, 0.99]) * 1e3
        spent = [now - then for now, then in zip(after.spent, before.spent, strict=True)]
        return Pace(rate, float(p50), float(p99), max(spent) / took)

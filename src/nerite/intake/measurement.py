"""How long a model takes: at batches of several sizes, and with several instances. Asked of a server that runs."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from nerite.client import Client, ClientError, Model, TensorDescription
from nerite.client.random_value import random_value, smallest
from nerite.core.tensor import Array

_SECONDS: Final = 0.2
"""For each size; a model that is slower is asked a few times all the same."""
_MOST_RUNS, _FEWEST_RUNS, _WARM_UPS = 50, 3, 2
_SLOW: Final = 2.0
"""Seconds after which no larger batch is tried."""
_CALLERS: Final = 4
_INSTANCES_SECONDS: Final = 0.3
_WORTH_A_LOOK: Final = 0.7
"""Larger batches are not tried any more when they reach less than this part of the best rate."""

Shapes = Mapping[str, tuple[int, ...]]
"""Of inputs with free sizes: those to measure with, without the batch."""
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Latency:
    """What a caller waits for a batch, and what of it is the model's own time. Medians, and means of the server's."""

    batch: int
    ms: float
    compute_ms: float

    @property
    def per_second(self) -> float:
        """Elements of batches in a second, one batch after the other."""
        return self.batch / self.ms * 1000


@dataclass(frozen=True, slots=True)
class Throughput:
    """What several callers at once get from a number of instances."""

    instances: int
    per_second: float


def inputs_of(model: Model, needed: Sequence[str], batch: int, shapes: Shapes) -> dict[str, Array]:
    """Return random inputs; ``batch`` is 0 for a model that has no batches. Raises ``ClientError``."""
    wanted = [tensor for tensor in model.inputs if tensor.name in needed]
    return {tensor.name: random_value(tensor, _shape(tensor, batch, shapes)) for tensor in wanted}


def latencies(
    client: Client, model: Model, needed: Sequence[str], largest: int, shapes: Shapes, tell: Tell
) -> list[Latency]:
    """Return how long batches take, of 1, 2, 4 … elements; ``largest`` is 0 for a model that has no batches.

    Raises ``ClientError`` if the model refuses the smallest; a larger one that it refuses ends the list.
    """
    found: list[Latency] = []
    for batch in _sizes(largest):
        tell(f"measuring batches of {batch}" if largest else "measuring")
        try:
            found.append(_latency(client, model, inputs_of(model, needed, min(batch, largest), shapes), batch))
        except ClientError:
            if not found:
                raise
            break
        least = _WORTH_A_LOOK * max(each.per_second for each in found)
        # Two in a row: one may have had a bad moment.
        if found[-1].ms > _SLOW * 1000 or all(each.per_second < least for each in found[-2:]):
            break
    return found


def throughput(client: Client, url: str, model: Model, inputs: Mapping[str, Array], instances: int) -> Throughput:
    """Return how many requests a second are answered when several ask at once."""
    counts: list[int] = []
    client.infer(model.name, inputs)
    end = time.monotonic() + _INSTANCES_SECONDS

    def ask() -> None:
        with Client(url) as own:
            count = 0
            while time.monotonic() < end:
                own.infer(model.name, inputs)
                count += 1
            counts.append(count)

    began = time.monotonic()
    threads = [threading.Thread(target=ask) for _ in range(_CALLERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Throughput(instances, sum(counts) / (time.monotonic() - began))


def best_of_each(measured: Sequence[Throughput]) -> list[Throughput]:
    """Return the best rate of each number of instances, the smallest number first."""
    best: dict[int, Throughput] = {}
    for each in sorted(measured, key=lambda each: each.per_second):
        best[each.instances] = each
    return [best[count] for count in sorted(best)]


def _latency(client: Client, model: Model, inputs: Mapping[str, Array], batch: int) -> Latency:
    for _ in range(_WARM_UPS):
        began = time.perf_counter()
        client.infer(model.name, inputs)
        if time.perf_counter() - began > _SLOW:
            break
    (before,) = client.statistics(model.name, model.versions[-1])
    times: list[float] = []
    while len(times) < _FEWEST_RUNS or (len(times) < _MOST_RUNS and sum(times) < _SECONDS):
        began = time.perf_counter()
        client.infer(model.name, inputs)
        times.append(time.perf_counter() - began)
        if times[-1] > _SLOW:
            break
    (after,) = client.statistics(model.name, model.versions[-1])
    return Latency(batch, statistics.median(times) * 1000, after.since(before).mean_compute_ms)


def _sizes(largest: int) -> Iterator[int]:
    size = 1
    while size < largest:
        yield size
        size *= 2
    yield max(largest, 1)


def _shape(tensor: TensorDescription, batch: int, shapes: Shapes) -> tuple[int, ...]:
    own = tensor.shape[1:] if batch else tensor.shape
    given = shapes.get(tensor.name)
    if given is not None:
        if len(given) != len(own) or any(size not in (-1, wanted) for size, wanted in zip(own, given, strict=True)):
            raise ClientError(
                f"'{tensor.name}' cannot have the shape {list(given)}: it is {list(own)}, -1 being any size"
            )
        return (batch, *given) if batch else given
    shape = smallest(tensor)
    return (batch, *shape[1:]) if batch else shape

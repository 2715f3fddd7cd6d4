"""The configurations that come into question: for each setting the values that it may have."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from nerite.analyze.settings import SETTINGS, THREADS, Value
from nerite.config.model_config import ModelConfig
from nerite.core.errors import InvalidArgument

Point: TypeAlias = tuple[Value, ...]
"""A value for each setting, in their order."""

_LARGEST_BATCH: Final = 64
_GROWING: Final = frozenset({"onnxruntime", "openvino", "pytorch"})
"""Backends whose models are asked for larger batches than their configurations allow so far."""
_DELAYS: Final = (0, 500, 2000)
_ON_GPU: Final = (1, 2, 4)


@dataclass(frozen=True)
class Space:
    """A grid. The values of an axis are in order, so that a step leads to what is nearly the same."""

    axes: Mapping[str, tuple[Value, ...]]
    present: Point
    """How the model is configured now. It is one of the points."""

    @property
    def size(self) -> int:
        """How many points there are."""
        size = 1
        for values in self.axes.values():
            size *= len(values)
        return size

    @property
    def points(self) -> Iterator[Point]:
        """All of them, the present one first."""
        yield self.present
        yield from (point for point in itertools.product(*self.axes.values()) if point != self.present)

    @property
    def starts(self) -> Iterator[Point]:
        """Where a search may begin: as it is now, one large instance, many small ones."""
        yield self.present
        small = {name: values[0] for name, values in self.axes.items()}
        top = {name: values[-1] for name, values in self.axes.items()}
        large: dict[str, Value] = {name: top[name] for name in ("max_batch", "threads") if name in top}
        large |= {name: small[name] for name in ("instances",) if name in small}
        many: dict[str, Value] = {name: top[name] for name in ("max_batch", "instances") if name in top}
        if 1 in self.axes.get("threads", ()):
            many["threads"] = 1
        for wanted in (large, many):
            yield tuple(wanted.get(name, now) for name, now in zip(self.axes, self.present, strict=True))

    def step(self, point: Point, steps: Mapping[int, int]) -> Point | None:
        """Return the point that is so many values further on some axes; None beyond the end of one."""
        found = list(point)
        for axis, (number, values) in enumerate(zip(range(len(point)), self.axes.values(), strict=True)):
            place = values.index(point[number]) + steps.get(axis, 0)
            if not 0 <= place < len(values):
                return None
            found[axis] = values[place]
        return tuple(found)

    def changes(self, point: Point) -> dict[str, Value]:
        """Return the settings that are not as they are now."""
        named = zip(self.axes, point, self.present, strict=True)
        return {name: value for name, value, now in named if value != now}


def space_of(config: ModelConfig, cores: int, wanted: Mapping[str, Sequence[Value]]) -> Space:
    """Return what may be tried of a model with a complete configuration; ``wanted`` are values that somebody names.

    Raises ``InvalidArgument`` for a model, or a setting of it, that has nothing to vary.
    """
    if config.ensemble_scheduling is not None:
        raise InvalidArgument(f"'{config.name}' is made of other models.\n    Analyze each of them.")
    if config.sequence_batching is not None:
        raise InvalidArgument(f"the requests of '{config.name}' are those of sequences, which are not analyzed yet.")
    found: dict[str, Sequence[Value]] = dict(_usual(config, cores))
    for name, values in wanted.items():
        if name not in found and name not in ("backend", "preferred"):
            raise InvalidArgument(f"'{config.name}' has no {name} to vary.\n    It has: {', '.join(found)}.")
        found[name] = values
    present = {name: SETTINGS[name].read(config) for name in SETTINGS if name in found}
    axes = {name: _ordered({*found[name], now}) for name, now in present.items()}
    return Space(axes, tuple(present.values()))


def _usual(config: ModelConfig, cores: int) -> Iterator[tuple[str, Sequence[Value]]]:
    own = config.max_batch_size
    if own > 0:
        largest = max(own, _LARGEST_BATCH) if config.backend in _GROWING else own
        yield "max_batch", [*_powers(4, largest), largest]
        yield "delay", _DELAYS
    on_gpu = any(group.kind == "KIND_GPU" for group in config.instance_group)
    yield "instances", _ON_GPU if on_gpu else [*_powers(2, cores), cores]
    if config.backend in THREADS and not on_gpu:
        yield "threads", [0, *_powers(2, cores), cores]


def _powers(factor: int, most: int) -> Iterator[int]:
    number = 1
    while number <= most:
        yield number
        number *= factor


def _ordered(values: set[Value]) -> tuple[Value, ...]:
    # Words (off, backends) stand before numbers.
    return tuple(sorted(values, key=lambda value: (isinstance(value, int), value)))

"""The configurations that come into question: for each setting the values that it may have."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

from nerite.analyze.settings import SETTINGS, THREADS, Value
from nerite.analyze.subject import Subject, Subjects
from nerite.config.model_config import ModelConfig
from nerite.core.errors import InvalidArgument

Point: TypeAlias = tuple[Value, ...]
"""A value for each setting, in their order."""
Wanted: TypeAlias = Sequence[tuple[str, str, Sequence[Value]]]
"""Values that somebody names: of which model (empty: of all that have it), setting, values."""

_LARGEST_BATCH: Final = 64
_GROWING: Final = frozenset({"onnxruntime", "openvino", "pytorch"})
"""Backends whose models are asked for larger batches than their configurations allow so far."""
_DELAYS: Final = (0, 500, 2000)
_ON_GPU: Final = (1, 2, 4)
_NAMED_ONLY: Final = ("backend", "preferred")
"""Settings that are varied where somebody names values."""


@dataclass(frozen=True)
class Space:
    """A grid. The values of an axis are in order, so that a step leads to what is nearly the same."""

    axes: Mapping[str, tuple[Value, ...]]
    present: Point
    """How the models are configured now. It is one of the points."""

    @property
    def size(self) -> int:
        """How many points there are."""
        return math.prod(len(values) for values in self.axes.values())

    @property
    def points(self) -> Iterator[Point]:
        """All of them, the present one first."""
        yield self.present
        yield from (point for point in itertools.product(*self.axes.values()) if point != self.present)

    @property
    def starts(self) -> Iterator[Point]:
        """Where a search may begin, of all models.

        As it is now; one large instance; one with batches of a middle size that wait for others; many small ones.
        """
        yield self.present
        for batch, delay, instances in ((1.0, None, 0.0), (0.67, 0.5, 0.0), (1.0, None, 1.0)):
            wanted = {"max_batch": batch, "delay": delay, "instances": instances, "threads": 1.0 - instances}
            yield tuple(map(partial(self._start, wanted), self.axes, self.present))

    def _start(self, wanted: Mapping[str, float | None], key: str, now: Value) -> Value:
        """Return the value that is as far along an axis as is wanted; the present one where nothing is."""
        values = self.axes[key]
        if key.rpartition(".")[2] == "threads" and wanted["threads"] == 0.0:
            # The first value may say that an instance has its share, which is more than one.
            return 1 if 1 in values else now
        along = wanted.get(key.rpartition(".")[2])
        return now if along is None else values[round(along * (len(values) - 1))]

    def step(self, point: Point, axis: int, steps: int) -> Point | None:
        """Return the point that is so many values further on an axis; None beyond its end."""
        values = list(self.axes.values())[axis]
        place = values.index(point[axis]) + steps
        if not 0 <= place < len(values):
            return None
        return (*point[:axis], values[place], *point[axis + 1 :])

    def place(self, point: Point) -> list[float]:
        """Return where a point is: for each axis how far along its values, from 0 to 1."""
        axes = zip(self.axes.values(), point, strict=True)
        return [values.index(value) / max(1, len(values) - 1) for values, value in axes]

    def changes(self, point: Point) -> dict[str, Value]:
        """Return the settings that are not as they are now."""
        named = zip(self.axes, point, self.present, strict=True)
        return {name: value for name, value, now in named if value != now}


def space_of(subjects: Subjects, cores: int, wanted: Wanted) -> Space:
    """Return what may be tried. Raises ``InvalidArgument`` for a setting that nothing has, or nothing to vary."""
    axes: dict[str, tuple[Value, ...]] = {}
    present: list[Value] = []
    used = set()
    for subject in subjects.all:
        config = subject.complete
        found: dict[str, Sequence[Value]] = dict(_usual(config, cores))
        for at, (model, name, values) in enumerate(wanted):
            if model in ("", subject.name) and (name in found or name in _NAMED_ONLY):
                found[name] = values
                used.add(at)
        for name, setting in SETTINGS.items():
            if name in found:
                present.append(setting.read(config))
                axes[subjects.key(subject, name)] = _ordered({*found[name], present[-1]})
    for at, (model, name, _) in enumerate(wanted):
        if at not in used:
            raise InvalidArgument(_no_such(model, name, subjects.all, axes))
    return Space(axes, tuple(present))


def _no_such(model: str, name: str, subjects: Sequence[Subject], axes: Mapping[str, object]) -> str:
    names = [subject.name for subject in subjects]
    if model and model not in names:
        return f"the settings of '{model}' are not varied here.\n    Those of: {', '.join(names)}."
    whose = f"'{model or names[0]}' has" if model or len(names) == 1 else "none of the models has"
    return f"{whose} no {name} to vary.\n    There are: {', '.join(axes)}."


def _usual(config: ModelConfig, cores: int) -> Iterator[tuple[str, Sequence[Value]]]:
    own = config.max_batch_size
    if own > 0:
        largest = max(own, _LARGEST_BATCH) if config.backend in _GROWING else own
        yield "max_batch", [*_powers(4, largest), largest]
        if config.sequence_batching is None:
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

"""The search for the best configuration: the space of the settings that can vary, and what to measure next.

A search is a generator that yields a point and is sent its score. It never yields a point twice, and it is
deterministic: equal scores give equal points, so that an interrupted run resumes by replaying known scores.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Final, Literal, TypeAlias

import numpy as np

from nerite.config.loading import CONFIG_FILE, poll_model_directory
from nerite.config.model_config import ModelConfig, ModelDynamicBatching, ModelInstanceGroup, ModelParameter
from nerite.config.text import edited, to_text
from nerite.core.errors import InvalidArgument
from nerite.core.tensor import Array

Value: TypeAlias = int | str
OFF: Final = "off"
"""Value of the delay that disables dynamic batching."""
THREADS: Final = {
    "onnxruntime": "intra_op_thread_count",
    "openvino": "INFERENCE_NUM_THREADS",
    "pytorch": "INTRA_OP_THREAD_COUNT",
    "litert": "tflite_num_threads",
    "fil": "cpu_nthread",
}
"""Parameter that sets the number of threads of an instance, by backend."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting that can vary. ``read`` takes a complete configuration, ``change`` one as written in config.pbtxt."""

    purpose: str
    read: Callable[[ModelConfig], Value]
    change: Callable[[ModelConfig, Value], ModelConfig]
    words: frozenset[str] | None = frozenset()
    """Values that are not integers; None: any text is a value."""

    def parsed(self, text: str) -> Value:
        """Parse a value. Raises ``ValueError``."""
        if self.words is None or text in self.words:
            return text
        number = int(text)
        if number < 0:
            raise ValueError(text)
        return number


def changed(written: ModelConfig, backend: str, values: Mapping[str, Value]) -> ModelConfig:
    """Return a configuration with changed settings; ``backend`` runs the model if the configuration names none."""
    config = dataclasses.replace(written, backend=written.backend or backend)
    # The backend is changed first, because the parameter for the threads depends on it.
    for name, setting in SETTINGS.items():
        if name in values:
            config = setting.change(config, values[name])
    return config if "backend" in values else dataclasses.replace(config, backend=written.backend)


def _backend(config: ModelConfig, value: Value) -> ModelConfig:
    return dataclasses.replace(config, backend=str(value), platform="")


def _max_batch(config: ModelConfig, value: Value) -> ModelConfig:
    largest, batching = int(value), config.dynamic_batching
    if batching is not None:
        # Larger preferred sizes would be invalid.
        fitting = tuple(size for size in batching.preferred_batch_size if size <= largest)
        batching = dataclasses.replace(batching, preferred_batch_size=fitting)
    return dataclasses.replace(config, max_batch_size=largest, dynamic_batching=batching)


def _batching(config: ModelConfig) -> ModelDynamicBatching:
    return config.dynamic_batching or ModelDynamicBatching()


def _preferred(config: ModelConfig, value: Value) -> ModelConfig:
    sizes = (int(value),) if value else ()
    batching = dataclasses.replace(_batching(config), preferred_batch_size=sizes)
    return dataclasses.replace(config, dynamic_batching=batching)


def _read_preferred(config: ModelConfig) -> Value:
    return next(iter(_batching(config).preferred_batch_size), 0)


def _delay(config: ModelConfig, value: Value) -> ModelConfig:
    if value == OFF:
        return dataclasses.replace(config, dynamic_batching=None)
    batching = dataclasses.replace(_batching(config), max_queue_delay_microseconds=int(value))
    return dataclasses.replace(config, dynamic_batching=batching)


def _read_delay(config: ModelConfig) -> Value:
    return OFF if config.dynamic_batching is None else config.dynamic_batching.max_queue_delay_microseconds


def _instances(config: ModelConfig, value: Value) -> ModelConfig:
    first, *others = config.instance_group or (ModelInstanceGroup(),)
    return dataclasses.replace(config, instance_group=(dataclasses.replace(first, count=int(value)), *others))


def _read_instances(config: ModelConfig) -> Value:
    return config.instance_group[0].count if config.instance_group else 1


def _threads(config: ModelConfig, value: Value) -> ModelConfig:
    key = THREADS[config.backend]
    parameters = {name: parameter for name, parameter in config.parameters.items() if name != key}
    if value:
        parameters[key] = ModelParameter(string_value=str(value))
    return dataclasses.replace(config, parameters=parameters)


def _read_threads(config: ModelConfig) -> Value:
    found = config.parameters.get(THREADS.get(config.backend, ""))
    return int(found.string_value) if found is not None and found.string_value.isdecimal() else 0


SETTINGS: Final = {
    "backend": Setting("backend that runs the model", lambda config: config.backend, _backend, None),
    "max_batch": Setting("maximum batch size", lambda config: config.max_batch_size, _max_batch),
    "preferred": Setting("preferred batch size, 0 for none", _read_preferred, _preferred),
    "delay": Setting(
        "queue delay of the dynamic batcher in microseconds, off for no dynamic batching",
        _read_delay,
        _delay,
        frozenset({OFF}),
    ),
    "instances": Setting("number of instances of the model", _read_instances, _instances),
    "threads": Setting("threads per instance, 0 for its share of the cores", _read_threads, _threads),
}
"""All settings by name, in the order in which they are changed."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model whose settings are varied."""

    path: Path
    """Path of its config.pbtxt, which need not exist."""
    text: str
    """Text of that file."""
    written: ModelConfig
    """Configuration as written in that file."""
    complete: ModelConfig
    """Configuration as completed when the model was loaded."""

    @classmethod
    def read(cls, directory: Path, complete: ModelConfig) -> Subject:
        """Return the model in a directory, whose configuration was completed to ``complete`` when it was loaded."""
        path = directory / CONFIG_FILE
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        written = dataclasses.replace(poll_model_directory(directory).text.config, name=complete.name)
        return cls(path, text, written, complete)

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.complete.name

    def config(self, values: Mapping[str, Value]) -> ModelConfig:
        """Return the written configuration with changed settings."""
        return changed(self.written, self.complete.backend, values)

    def rewritten(self, values: Mapping[str, Value]) -> str:
        """Return the text of config.pbtxt with changed settings, and everything else unchanged."""
        return edited(self.text, self.written, self.config(values))


@dataclass(frozen=True)
class Subjects:
    """Models whose settings are varied together."""

    all: tuple[Subject, ...]
    prefixed: bool = False
    """Settings are named MODEL.SETTING."""

    def key(self, subject: Subject, setting: str) -> str:
        """Return the name of a model's setting."""
        return f"{subject.name}.{setting}" if self.prefixed else setting

    def values(self, changes: Mapping[str, Value]) -> Iterator[tuple[Subject, dict[str, Value]]]:
        """Yield each model with its changed settings."""
        parts = [(*key.rpartition(".")[::2], value) for key, value in changes.items()]
        for subject in self.all:
            yield subject, {setting: value for model, setting, value in parts if model in ("", subject.name)}

    def identity(self, changes: Mapping[str, Value]) -> str:
        """Return a key of the configurations, independent of the current ones and of the layout of their text."""
        return "".join(to_text(subject.config(values)) for subject, values in self.values(changes))

    def texts(self, changes: Mapping[str, Value]) -> dict[str, str]:
        """Return the text of each model's config.pbtxt with the changes."""
        return {subject.name: subject.rewritten(values) for subject, values in self.values(changes)}


Point: TypeAlias = tuple[Value, ...]
"""A value for each setting, in the order of the axes."""
Wanted: TypeAlias = Sequence[tuple[str, str, Sequence[Value]]]
"""Values requested by the user: model (empty for all models that have the setting), setting, values."""

_LARGEST_BATCH: Final = 64
_GROWING: Final = frozenset({"onnxruntime", "openvino", "pytorch"})
"""Backends whose models are tried with larger batches than their current configurations allow."""
_DELAYS: Final = (0, 500, 2000)
_ON_GPU: Final = (1, 2, 4)
_NAMED_ONLY: Final = ("backend", "preferred")
"""Settings that are varied only if the user names values."""


@dataclass(frozen=True)
class Space:
    """A grid of configurations. The values of an axis are ordered, so that neighbouring points are similar."""

    axes: Mapping[str, tuple[Value, ...]]
    present: Point
    """The current configuration, which is one of the points."""

    @property
    def size(self) -> int:
        """Number of points."""
        return math.prod(len(values) for values in self.axes.values())

    @property
    def points(self) -> Iterator[Point]:
        """All points, the current configuration first."""
        yield self.present
        yield from (point for point in itertools.product(*self.axes.values()) if point != self.present)

    @property
    def starts(self) -> Iterator[Point]:
        """Starting points of a search, with the same choice for all models.

        The current configuration; one large instance; one with medium-sized batches and a delay; many small instances.
        """
        yield self.present
        for batch, delay, instances in ((1.0, None, 0.0), (0.67, 0.5, 0.0), (1.0, None, 1.0)):
            wanted = {"max_batch": batch, "delay": delay, "instances": instances, "threads": 1.0 - instances}
            yield tuple(map(partial(self._start, wanted), self.axes, self.present))

    def _start(self, wanted: Mapping[str, float | None], key: str, now: Value) -> Value:
        """Return the value at the wanted fraction of an axis, or the current one if none is wanted."""
        values = self.axes[key]
        if key.rpartition(".")[2] == "threads" and wanted["threads"] == 0.0:
            # The first value may be 0, which gives an instance its share of the cores, and not one thread.
            return 1 if 1 in values else now
        along = wanted.get(key.rpartition(".")[2])
        return now if along is None else values[round(along * (len(values) - 1))]

    def step(self, point: Point, axis: int, steps: int) -> Point | None:
        """Return the point that is ``steps`` values further along an axis, or None beyond its end."""
        values = list(self.axes.values())[axis]
        place = values.index(point[axis]) + steps
        if not 0 <= place < len(values):
            return None
        return (*point[:axis], values[place], *point[axis + 1 :])

    def place(self, point: Point) -> list[float]:
        """Return the coordinates of a point, from 0 to 1 on each axis."""
        axes = zip(self.axes.values(), point, strict=True)
        return [values.index(value) / max(1, len(values) - 1) for values, value in axes]

    def changes(self, point: Point) -> dict[str, Value]:
        """Return the settings that differ from the current configuration."""
        named = zip(self.axes, point, self.present, strict=True)
        return {name: value for name, value, now in named if value != now}


def space_of(subjects: Subjects, cores: int, wanted: Wanted) -> Space:
    """Return the space of configurations to try. Raises ``InvalidArgument`` for a setting that no model has."""
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
        return f"'{model}' is not one of the models whose settings vary.\n    These are: {', '.join(names)}."
    whose = f"'{model or names[0]}' has" if model or len(names) == 1 else "none of the models has"
    return f"{whose} no setting '{name}' that can vary.\n    Settings that can: {', '.join(axes)}."


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
    # Text values (off, backends) sort before numbers.
    return tuple(sorted(values, key=lambda value: (isinstance(value, int), value)))


# Prediction of unmeasured points by a Gaussian process.
#
# Similar configurations perform similarly, so each measurement is evidence about all points, and several close to each
# other outweigh one inaccurate measurement. The process models ranks, not rates, so that it does not matter by how
# much bad configurations are worse, or how one that exceeds the limits compares with one within them.

_LENGTH_SCALE: Final = 1.0
"""Length scale of the kernel. Each axis has length 1, regardless of its number of values."""
_NOISE: Final = 0.15
"""Measurement noise, in standard deviations of all measurements."""
_STANDARD: Final = NormalDist()


def promise(places: Array, known: Sequence[int], order: Sequence[int]) -> Array:
    """Return the expected improvement of each row of coordinates in ``places`` over all measured points.

    ``known`` are the indices of the measured points, and ``order`` the number of measured points worse than each.
    """
    measured = places[list(known)]
    values = np.array([_STANDARD.inv_cdf((rank + 0.5) / len(known)) for rank in order])
    own = _similarity(measured, measured) + _NOISE**2 * np.eye(len(known))
    others = _similarity(places, measured)
    solved = np.linalg.solve(own, np.column_stack([values, others.T]))
    expected = others @ solved[:, 0]
    deviation = np.sqrt(np.maximum(1e-9, 1 - np.einsum("ij,ji->i", others, solved[:, 1:])))
    ahead = (expected - expected[list(known)].max()) / deviation
    probability = np.array([_STANDARD.cdf(each) for each in ahead.tolist()])
    density = np.array([_STANDARD.pdf(each) for each in ahead.tolist()])
    improvement: Array = deviation * (ahead * probability + density)
    improvement[list(known)] = 0.0
    return improvement


def _similarity(some: Array, others: Array) -> Array:
    """Return the similarity of each pair of points, from 0 to 1: a Matérn 3/2 kernel per axis, multiplied."""
    distance = np.sqrt(3) / _LENGTH_SCALE * np.abs(some[:, None] - others[None])
    similarity: Array = np.prod((1 + distance) * np.exp(-distance), axis=2)
    return similarity


Score: TypeAlias = tuple[int, float]
"""Larger is better."""
Search: TypeAlias = Generator[Point, Score, None]
Method = Literal["quick", "guided", "brute"]
_PART: Final = 4
"""The guided search and the repeated measurements after it use at most one in this many points."""
_FOR_AN_AXIS: Final = 20
"""Maximum number of points per axis, regardless of the size of the space."""
_CANDIDATES: Final = 3_000
"""Maximum number of points considered by the guided search."""


def search(method: Method, space: Space, points: int) -> Search:
    """Return a search by ``method`` that yields at most ``points`` points."""
    if method == "brute":
        return _brute(space, points)
    return _guided(space, points) if method == "guided" else _Climber(space, points).climb()


def budget(method: Method, space: Space, again: int, most: int | None = None) -> int:
    """Return the maximum number of points to measure. ``again`` is the cost of repeated measurements, in points."""
    points = space.size
    if method != "brute":
        # In a small space, each setting is tried at least once in both directions.
        fewest = 2 * len(space.axes) + 1
        points = min(points, max(fewest, min(points // _PART - again, _FOR_AN_AXIS * len(space.axes))))
    return points if most is None else min(points, most)


def _brute(space: Space, points: int) -> Search:
    for point in itertools.islice(space.points, points):
        _ = yield point


def _guided(space: Space, points: int) -> Search:
    """Start with points that are far apart, then always take the one with the largest expected improvement."""
    candidates = _candidates(space)
    number = {point: at for at, point in enumerate(candidates)}
    places = np.array([space.place(point) for point in candidates])
    known: dict[int, Score] = {}
    for start in dict.fromkeys(space.starts):
        if len(known) < points:
            known[number[start]] = yield start
    while len(known) < min(points, len(candidates)):
        worse = [sum(other < score for other in known.values()) for score in known.values()]
        # With a single known point there is nothing to compare.
        following = int(promise(places, list(known), worse).argmax()) if len(known) > 1 else 1
        known[following] = yield candidates[following]


def _candidates(space: Space) -> Sequence[Point]:
    """Return all points, or in a large space the starting points and a fixed random sample."""
    if space.size <= _CANDIDATES:
        return list(space.points)
    choose = random.Random(0)
    some = [tuple(map(choose.choice, space.axes.values())) for _ in range(_CANDIDATES)]
    return list(dict.fromkeys([*space.starts, *some]))


class _BudgetSpent(Exception):
    """The maximum number of points has been measured."""


class _Climber:
    """Hill climbing, one setting at a time."""

    def __init__(self, space: Space, most: int) -> None:
        self._space = space
        self._most = most
        self._known: dict[Point, Score] = {}

    def climb(self) -> Search:
        """Climb from the current configuration."""
        point, before = self._space.present, None
        try:
            while point != before:
                before = point
                for axis in range(len(point)):
                    point = yield from self._along(point, axis)
        except _BudgetSpent:
            return

    def _along(self, point: Point, axis: int) -> Generator[Point, Score, Point]:
        """Move up or down an axis while the score improves; return the best point."""
        for direction in (1, -1):
            found = point
            while (further := self._space.step(found, axis, direction)) is not None:
                score = yield from self._score(found)
                further_score = yield from self._score(further)
                if further_score <= score:
                    break
                found = further
            if found != point:
                return found
        return point

    def _score(self, point: Point) -> Generator[Point, Score, Score]:
        if point not in self._known:
            if len(self._known) >= self._most:
                raise _BudgetSpent
            self._known[point] = yield point
        return self._known[point]

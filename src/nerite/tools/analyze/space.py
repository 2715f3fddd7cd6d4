"""The configurations that come into question: for each setting the values that it may have."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

from nerite.config.loading import CONFIG_FILE, poll_model_directory
from nerite.config.model_config import ModelConfig, ModelDynamicBatching, ModelInstanceGroup, ModelParameter
from nerite.config.text_printer import edited, to_text
from nerite.core.errors import InvalidArgument

# What may be varied: how each setting is read from a configuration, and what it changes there.

Value: TypeAlias = int | str
OFF: Final = "off"
"""Of the delay: requests are not gathered at all."""
THREADS: Final = {
    "onnxruntime": "intra_op_thread_count",
    "openvino": "INFERENCE_NUM_THREADS",
    "pytorch": "INTRA_OP_THREAD_COUNT",
    "litert": "tflite_num_threads",
    "fil": "cpu_nthread",
}
"""The parameter that says how many threads an instance has, by backend."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One of them. ``read`` takes a complete configuration, ``change`` one as it is written."""

    purpose: str
    read: Callable[[ModelConfig], Value]
    change: Callable[[ModelConfig, Value], ModelConfig]
    words: frozenset[str] | None = frozenset()
    """Values that are no whole numbers; None: any text is one."""

    def parsed(self, text: str) -> Value:
        """Read a value. Raises ``ValueError``."""
        if self.words is None or text in self.words:
            return text
        number = int(text)
        if number < 0:
            raise ValueError(text)
        return number


def changed(written: ModelConfig, backend: str, values: Mapping[str, Value]) -> ModelConfig:
    """Return a configuration with settings changed; ``backend`` is what runs the model where it does not say so."""
    config = dataclasses.replace(written, backend=written.backend or backend)
    # Which parameter has the threads is for the backend to say, so it comes first.
    for name, setting in SETTINGS.items():
        if name in values:
            config = setting.change(config, values[name])
    return config if "backend" in values else dataclasses.replace(config, backend=written.backend)


def _backend(config: ModelConfig, value: Value) -> ModelConfig:
    return dataclasses.replace(config, backend=str(value), platform="")


def _max_batch(config: ModelConfig, value: Value) -> ModelConfig:
    largest, batching = int(value), config.dynamic_batching
    if batching is not None:
        # Larger ones are a mistake.
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
    parameters = {name: said for name, said in config.parameters.items() if name != key}
    if value:
        parameters[key] = ModelParameter(string_value=str(value))
    return dataclasses.replace(config, parameters=parameters)


def _read_threads(config: ModelConfig) -> Value:
    said = config.parameters.get(THREADS.get(config.backend, ""))
    return int(said.string_value) if said is not None and said.string_value.isdecimal() else 0


SETTINGS: Final = {
    "backend": Setting("what runs the model", lambda config: config.backend, _backend, None),
    "max_batch": Setting("the largest batch", lambda config: config.max_batch_size, _max_batch),
    "preferred": Setting("the preferred size of batches, 0 for none", _read_preferred, _preferred),
    "delay": Setting(
        "microseconds that requests wait for others, off for no dynamic batching",
        _read_delay,
        _delay,
        frozenset({OFF}),
    ),
    "instances": Setting("copies of the model", _read_instances, _instances),
    "threads": Setting("threads of an instance, 0 for its share of the cores", _read_threads, _threads),
}
"""By name, in the order in which they are changed."""

# The models that are analyzed: those that are asked, and those whose settings are varied.


@dataclass(frozen=True, slots=True)
class Subject:
    """A model whose settings are varied."""

    path: Path
    """Of its config.pbtxt, which need not be there."""
    text: str
    """What stands there."""
    written: ModelConfig
    """What that says."""
    complete: ModelConfig
    """What is made of it."""

    @classmethod
    def read(cls, directory: Path, complete: ModelConfig) -> Subject:
        """Return the model in a directory, which has loaded as ``complete``."""
        path = directory / CONFIG_FILE
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        written = dataclasses.replace(poll_model_directory(directory).text.config, name=complete.name)
        return cls(path, text, written, complete)

    @property
    def name(self) -> str:
        """The model's name."""
        return self.complete.name

    def config(self, values: Mapping[str, Value]) -> ModelConfig:
        """Return its configuration as it is written, with settings changed."""
        return changed(self.written, self.complete.backend, values)

    def rewritten(self, values: Mapping[str, Value]) -> str:
        """Return the text of its config.pbtxt with settings changed, and all else as it stands there."""
        return edited(self.text, self.written, self.config(values))


@dataclass(frozen=True)
class Subjects:
    """Models whose settings are varied together."""

    all: tuple[Subject, ...]
    prefixed: bool = False
    """Settings are known as MODEL.SETTING."""

    def key(self, subject: Subject, setting: str) -> str:
        """Return how a setting of a model is called."""
        return f"{subject.name}.{setting}" if self.prefixed else setting

    def values(self, changes: Mapping[str, Value]) -> Iterator[tuple[Subject, dict[str, Value]]]:
        """Yield for each model what is changed of it."""
        parts = [(*key.rpartition(".")[::2], value) for key, value in changes.items()]
        for subject in self.all:
            yield subject, {setting: value for model, setting, value in parts if model in ("", subject.name)}

    def identity(self, changes: Mapping[str, Value]) -> str:
        """Return what tells configurations apart, whatever the present one is and however their texts are laid out."""
        return "".join(to_text(subject.config(values)) for subject, values in self.values(changes))

    def texts(self, changes: Mapping[str, Value]) -> dict[str, str]:
        """Return the config.pbtxt of each model."""
        return {subject.name: subject.rewritten(values) for subject, values in self.values(changes)}


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

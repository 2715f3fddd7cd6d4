"""The space of configurations to search: the settings that can vary, their values, and the models they belong to."""

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
from nerite.config.text import edited, to_text
from nerite.core.errors import InvalidArgument

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

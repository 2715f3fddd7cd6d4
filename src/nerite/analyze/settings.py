"""What may be varied: how each setting is read from a configuration, and what it changes there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from nerite.config.model_config import ModelConfig, ModelInstanceGroup, ModelParameter
from nerite.config.scheduling_choice import ModelDynamicBatching

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

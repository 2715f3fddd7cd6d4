"""Loading a model for a test: from its directory, or from a class."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.python import PythonBackend
from nerite.backends.python.completion import completed
from nerite.backends.python.instance import PythonInstance
from nerite.config.completion import apply_completion
from nerite.config.gpus import NO_GPUS
from nerite.config.json_form import from_json, to_json
from nerite.config.loading import finish_config, poll_model_directory
from nerite.config.model_config import ModelConfig
from nerite.config.normalise import normalise_instances
from nerite.config.signature import signature_of
from nerite.core import host
from nerite.execution.scheduling_choice import roster
from nerite.testing.model_under_test import ModelUnderTest
from nerite.testing.own_error import own_error
from nerite.testing.stand_in import OtherModel, StandIn
from triton_python_backend_utils import model_directory

_BACKEND = PythonBackend()


def load_model(
    path_or_class: str | Path | type,
    config: Mapping[str, Any] | None = None,
    version: int = 1,
    calls: Mapping[str, OtherModel] | None = None,
) -> ModelUnderTest:
    """Load a model as the server does, and initialize it.

    ``path_or_class`` is the model's directory, with ``1/model.py`` in it, or a class like ``TritonPythonModel``.
    ``config`` stands for config.pbtxt, in JSON form: ``{"max_batch_size": 8, "input": [...]}``. The model's own
    ``auto_complete_config`` has its say in any case. ``calls`` are the models that the model may call, by name:
    functions that take inputs and return outputs. Raises what the model raises, and ``ValueError`` with everything that
    is wrong with the configuration.
    """
    __tracebackhide__ = True
    stand_in = StandIn(calls or {})
    before, host.current = host.current, stand_in

    def leave() -> None:
        if host.current is stand_in:
            host.current = before

    try:
        if isinstance(path_or_class, type):
            model = _from_class(path_or_class, config or {}, version)
        else:
            model = _from_directory(Path(path_or_class).resolve(), config, version)
    except BaseException:  # whatever it was: the next test begins as this one did
        leave()
        raise
    stand_in.allowed = True
    model.on_close.append(leave)
    return model


def _from_directory(directory: Path, config: Mapping[str, Any] | None, version: int) -> ModelUnderTest:
    __tracebackhide__ = True

    def complete(config: ModelConfig, version: int) -> Mapping[str, Any]:
        return own_error(_BACKEND.complete, _context(config, directory, version))

    polled = poll_model_directory(directory, override=None if config is None else json.dumps(config))
    finished = finish_config(polled, version, complete=complete)
    mistakes = dict.fromkeys((*polled.mistakes, *finished.mistakes))
    if mistakes:
        raise ValueError("\n".join(map(str, mistakes)))
    context = _context(finished.config, directory, version)
    model = own_error(_BACKEND.open, context)
    try:
        instance = own_error(model.instance, _first_instance(finished.config))
    except BaseException:
        model.close()
        raise
    return _under_test(finished.config, context, instance, model.close)


def _from_class(model_class: type, given: Mapping[str, Any], version: int) -> ModelUnderTest:
    __tracebackhide__ = True
    folder = _folder(model_class)
    name = given.get("name") or folder.name
    config = normalise_instances(from_json({"name": name, "backend": "python", **given}), NO_GPUS)
    config = apply_completion(config, own_error(completed, name, to_json(config), model_class))
    context = _context(config, folder, version)
    model_directory.opened(folder, folder)
    try:
        instance = own_error(PythonInstance, context, model_class, _first_instance(config))
    except BaseException:
        model_directory.closed(folder, folder)
        raise

    def release() -> None:
        model_directory.closed(folder, folder)

    return _under_test(config, context, instance, release)


def _under_test(
    config: ModelConfig, context: ModelContext, instance: PythonInstance, release: Callable[[], None]
) -> ModelUnderTest:
    sequences = None if config.sequence_batching is None else roster(config, context.directory)
    return ModelUnderTest(context.config, signature_of(config, context.directory), instance, release, sequences)


def _folder(model_class: type) -> Path:
    """Return where the class is written; for one that is in no file (a notebook, a prompt), the working directory."""
    try:
        return Path(inspect.getfile(model_class)).resolve().parent
    except (OSError, TypeError):
        return Path.cwd()


def _context(config: ModelConfig, directory: Path, version: int) -> ModelContext:
    return ModelContext(config.name, version, directory, to_json(config))


def _first_instance(config: ModelConfig) -> InstanceContext:
    group = config.instance_group[0]
    return InstanceContext(f"{group.name}_0", group.kind.removeprefix("KIND_"), next(iter(group.gpus), 0))

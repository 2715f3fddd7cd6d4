"""The Python backend and its open models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.python.instance import PythonInstance, model_file
from nerite.backends.python.module import CAUSES, ModelModule, failure_refusal
from nerite.core.errors import Internal
from triton_python_backend_utils import ModelConfig

_SCHEDULERS = frozenset({"dynamic_batching", "sequence_batching", "ensemble_scheduling"})
_COMPLETABLE = frozenset({"max_batch_size", "input", "output", "model_transaction_policy"})
"""Fields that a model's ``auto_complete_config`` may always change."""


def completed(context: ModelContext, model_class: type) -> Mapping[str, Any]:
    """Return the configuration as completed by the model's ``auto_complete_config``; unchanged if it has none.

    Only the fields that a model may change are used: max_batch_size, inputs, outputs, decoupled, and the scheduler if
    none was configured. Raises ``Internal`` with the model's error.
    """
    config, name = context.config, context.name
    hook = getattr(model_class, "auto_complete_config", None)
    if hook is None:
        return config
    try:
        answer = hook(ModelConfig(json.dumps(config)))
        result = json.loads(json.dumps(answer.as_dict())) if isinstance(answer, ModelConfig) else None
    except CAUSES as error:
        raise failure_refusal(error, context.directory) from error
    if result is None:
        raise Internal(f"auto_complete_config function in model '{name}' must return a valid pb.ModelConfig object.")
    changeable = _COMPLETABLE if _SCHEDULERS & config.keys() else _COMPLETABLE | _SCHEDULERS
    kept = {key: value for key, value in config.items() if key not in changeable}
    return kept | {key: value for key, value in result.items() if key in changeable}


_CLASS: Final = "TritonPythonModel"
_BINDING: Final = frozenset({_CLASS, "*", "__getattr__", "globals", "setattr", "exec"})
"""Names of which at least one occurs in any program that defines the class."""


class PythonBackend:
    """Backend for models written in Python."""

    isolated = True

    def __init__(self, name: str = "python", code: Path | None = None) -> None:
        """``code``: the file of a Python-based backend, which serves all its models; else each model has its own."""
        self.name = name
        self._code = code

    def complete(self, context: ModelContext) -> Mapping[str, Any]:
        """Return the configuration as completed by the model's ``auto_complete_config``.

        Imports the model's code and unloads it again. Raises ``Internal`` with what the code raises.
        """
        module = self._import(context)
        try:
            return completed(context, _model_class(module))
        finally:
            module.close()

    def open(self, context: ModelContext) -> PythonModel:
        """Import the model's code. Raises ``Internal`` with what is wrong with it."""
        module = self._import(context)
        try:
            return PythonModel(context, module, _model_class(module))
        except Internal:
            module.close()
            raise

    def check(self, context: ModelContext) -> None:
        """Check the model's code statically, without running it. Raises ``Internal`` as ``open`` does."""
        import ast  # not needed to serve models

        file = self._file(context)
        try:
            source = file.read_bytes()
            compile(source, file, "exec", dont_inherit=True)
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError) as error:
            raise failure_refusal(error, context.directory) from None
        if not any(map(_may_bind, ast.walk(tree))):
            module = f"{context.version}.{file.stem}" if self._code is None else file.stem
            raise Internal(f"AttributeError: module '{module}' has no attribute '{_CLASS}'")

    def _file(self, context: ModelContext) -> Path:
        file = self._code or model_file(context)
        if file.suffix != ".py":
            raise Internal(f"Model name must end with '.py'. Model name is \"{file.name}\".")
        if not file.exists():
            raise Internal(f"Python model file not found in '{file}'")
        return file

    def _import(self, context: ModelContext) -> ModelModule:
        file = self._file(context)
        serves = None if self._code is None else context.version_directory
        try:
            return ModelModule(context.directory, file, serves)
        except CAUSES as error:
            raise failure_refusal(error, context.directory) from error


class PythonModel:
    """Model version whose code is imported."""

    def __init__(self, context: ModelContext, module: ModelModule, model_class: type) -> None:
        self._context = context
        self._module = module
        self._class = model_class

    def instance(self, context: InstanceContext) -> PythonInstance:
        """Create and initialize an object of the model's class. Raises ``Internal`` with what the model raises."""
        return PythonInstance(self._context, self._class, context, self._module.file)

    def close(self) -> None:
        """Unload the model's code from the process."""
        self._module.close()


def _model_class(module: ModelModule) -> type:
    try:
        model_class: type = module.module.TritonPythonModel
    except AttributeError as error:
        raise failure_refusal(error, module.directory) from error
    return model_class


def _may_bind(node: Any) -> bool:
    """Return whether a node of the syntax tree may define ``TritonPythonModel`` in the module."""
    names = {getattr(node, key, None) for key in ("id", "name", "asname")}
    return not names.isdisjoint(_BINDING)

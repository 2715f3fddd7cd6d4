"""Modules that are written in Python: a class in ``model.py``, and its weights beside it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nerite.backends.interface import ModelContext
from nerite.backends.python.module import ModelModule
from nerite.backends.pytorch.framework import quiet, unloadable
from nerite.backends.pytorch.plan import Plan
from nerite.backends.pytorch.program import Call, Program, Slot
from nerite.core.errors import Internal, NotHere

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)


def import_code(context: ModelContext, plan: Plan) -> ModelModule:
    """Import a model's code. Raises ``Internal`` with what the code raises."""
    try:
        return ModelModule(context.directory, plan.artifact.path)
    except Exception as error:  # It is the user's code.
        raise unloadable(context.name, error, f"It was raised by '{plan.artifact.path}'") from error


def make_program(model: str, plan: Plan, code: ModelModule, device: str) -> Program:
    """Make a module of a model's class, and give it its weights. Raises ``NeriteError``."""
    module_class = _class(model, plan, code)
    try:
        module = module_class()
        place = device or next((str(each.device) for each in module.parameters()), "cpu")
        if plan.artifact.weights is not None:
            module.load_state_dict(_read(plan.artifact.weights, place))
        if device:
            module.to(device)
        module.eval()
    except Exception as error:  # It is the user's code.
        raise unloadable(model, error, f"The class is '{module_class.__name__}' of '{plan.artifact.path}'") from error
    inputs = _inputs(module.forward)
    call = torch.compile(module, **json.loads(plan.compile)) if plan.compile is not None else module
    return Program(
        inputs=inputs,
        outputs=None,
        bind=lambda names: _bound(call, inputs, names),
        device=place,
        # It is Python, and may do what it likes.
        writes_inputs=True,
        keeps_state=True,
    )


def _class(model: str, plan: Plan, code: ModelModule) -> type[Any]:
    """Return the class that is served: the named one, or the first by name that the file defines."""
    everything = vars(code.module)
    found = {
        name: each
        for name, each in sorted(everything.items())
        if isinstance(each, type) and issubclass(each, torch.nn.Module)
    }
    own = {name: each for name, each in found.items() if each.__module__ == code.module.__name__} or found
    if plan.model_class:
        if plan.model_class not in found:
            raise Internal(
                f"failed to load model '{model}': there is no class '{plan.model_class}', which parameter "
                f"'MODEL_CLASS' asks for, in '{plan.artifact.path}'. There are: {', '.join(own) or 'none'}"
            )
        return found[plan.model_class]
    if not own:
        raise Internal(
            f"Cannot find a subclass of torch.nn.Module in '{plan.artifact.path}', which model '{model}' needs"
        )
    return next(iter(own.values()))


def _read(weights: Path, device: str) -> Any:
    if weights.suffix == ".safetensors":
        try:
            from safetensors.torch import load_file
        except ImportError as error:
            raise NotHere(f"'{weights}' needs the package 'safetensors': pip install 'nerite[torch]'") from error
        return load_file(weights, device)
    with quiet:
        return torch.load(weights, map_location=device, weights_only=True)


def _inputs(forward: Any) -> tuple[Slot, ...] | None:
    """Return the inputs by the names that ``forward`` has for them; None where it takes what it gets."""
    parameters = inspect.signature(forward).parameters.values()
    if any(each.kind in _BY_POSITION for each in parameters):
        return None
    return tuple(
        Slot(each.name, (f"ARGS[{position}]",), text=None, optional=each.default is not each.empty)
        for position, each in enumerate(parameters)
        if each.kind is not each.VAR_KEYWORD
    )


def _bound(call: Any, inputs: Sequence[Slot] | None, names: Sequence[str]) -> Call:
    if inputs is None:
        return lambda values: call(*values)
    return lambda values: call(**dict(zip(names, values, strict=True)))

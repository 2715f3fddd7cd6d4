"""Opens modules in Python (a class in ``model.py`` with its weights beside it), and TorchScript."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from nerite.backends.interface import ModelContext
from nerite.backends.python.module import ModelModule
from nerite.core.errors import Internal, NotInstalled
from nerite.frameworks.pytorch.artifact import TorchPlan
from nerite.frameworks.pytorch.program import Call, Program, TensorSlot, loading, program_output, quiet

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)


def import_code(context: ModelContext, plan: TorchPlan) -> ModelModule:
    """Import a model's code. Raises ``Internal`` with the exception of that code."""
    with loading(context.name, f"It was raised by '{plan.artifact.path}'"):
        return ModelModule(context.directory, plan.artifact.path)


def make_eager_program(model: str, plan: TorchPlan, code: ModelModule, device: str) -> Program:
    """Create a module of the model's class, and load its weights. Raises ``NeriteError``."""
    module_class = _class(model, plan, code)
    with loading(model, f"The class is '{module_class.__name__}' of '{plan.artifact.path}'"):
        module = module_class()
        place = device or next((str(each.device) for each in module.parameters()), "cpu")
        if plan.artifact.weights is not None:
            module.load_state_dict(_read(plan.artifact.weights, place))
        if device:
            module.to(device)
        module.eval()
    inputs = _inputs(module.forward)
    call = torch.compile(module, **json.loads(plan.compile)) if plan.compile is not None else module
    return Program(
        inputs=inputs,
        outputs=None,
        bind=lambda names: _bound(call, inputs, names),
        device=place,
        # Python code may do anything.
        writes_inputs=True,
        keeps_state=True,
    )


def _class(model: str, plan: TorchPlan, code: ModelModule) -> type[Any]:
    """Return the class to serve: the configured one, or the first one by name that the file defines."""
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
            raise NotInstalled(f"'{weights}' needs the package 'safetensors': pip install 'nerite[torch]'") from error
        return load_file(weights, device)
    with quiet:
        return torch.load(weights, map_location=device, weights_only=True)


def _inputs(forward: Any) -> tuple[TensorSlot, ...] | None:
    """Return the inputs by the parameters of ``forward``; None if it takes any number."""
    parameters = inspect.signature(forward).parameters.values()
    if any(each.kind in _BY_POSITION for each in parameters):
        return None
    return tuple(
        TensorSlot(each.name, (f"ARGS[{position}]",), text=None, optional=each.default is not each.empty)
        for position, each in enumerate(parameters)
        if each.kind is not each.VAR_KEYWORD
    )


def _bound(call: Any, inputs: Sequence[TensorSlot] | None, names: Sequence[str]) -> Call:
    if inputs is None:
        return lambda values: call(*values)
    return lambda values: call(**dict(zip(names, values, strict=True)))


# TorchScript: programs of ``torch.jit.script`` and ``torch.jit.trace``.

_log = logging.getLogger("nerite.frameworks.pytorch")

_TEXTS: Final = "List[str]"
_TENSORS: Final = ("Tensor", "Optional[Tensor]")


def open_torchscript(model: str, plan: TorchPlan, device: str) -> Program:
    """Load a program. Raises ``NeriteError``."""
    with loading(model), quiet:
        module = torch.jit.load(str(plan.artifact.path), map_location=device or None)
    _log.info(
        "model '%s' is TorchScript, which PyTorch has deprecated: torch.export writes programs that last, and that say "
        "what their tensors are",
        model,
    )
    if getattr(module, "training", False):
        _log.warning("model '%s' was saved in training mode, and is served in evaluation mode", model)
        module.eval()
    writes = _written(module)
    schema = module.forward.schema
    arguments = schema.arguments[1:]
    return Program(
        inputs=_torchscript_inputs(arguments),
        outputs=_outputs([each.type for each in schema.returns]),
        bind=lambda names: _torchscript_bound(module.forward, arguments, names),
        device=device,
        writes_inputs=any(writes[1:]),
        keeps_state=writes[0],
    )


def _written(module: Any) -> list[bool]:
    """Return for the module, and for each argument of its ``forward``, whether ``forward`` may write into it."""
    graph = module.inlined_graph
    aliases = graph.alias_db()
    return [bool(aliases.has_writers(each)) for each in graph.inputs()]


def _torchscript_inputs(arguments: Sequence[Any]) -> tuple[TensorSlot, ...] | None:
    """Return the inputs; None for a dictionary of them. Raises ``Internal`` for types that the protocol lacks."""
    if len(arguments) == 1 and arguments[0].type.kind() == "DictType":
        return None
    slots = []
    for position, argument in enumerate(arguments):
        kind = str(argument.type)
        if argument.type.kind() == "DictType":
            raise Internal(
                "Multiple inputs of kind DictType were detected. Only a single input of type Dict(str, Tensor) is "
                f"supported: '{argument.name}' is one of {len(arguments)}"
            )
        if kind in _TENSORS or kind == _TEXTS:
            optional = argument.has_default_value() or kind == "Optional[Tensor]"
            slots.append(TensorSlot(argument.name, (f"ARGS[{position}]",), text=kind == _TEXTS, optional=optional))
        elif not argument.has_default_value():
            raise Internal(
                f"An input of type '{kind}' was detected in the model. Only a single input of type Dict(str, Tensor) "
                f"or input(s) of type Tensor are supported. Give '{argument.name}' a default, or make it a Tensor"
            )
    return tuple(slots)


def _outputs(types: Sequence[Any]) -> tuple[TensorSlot, ...] | None:
    """Return the outputs; None if their number does not follow from the type."""
    [result] = types
    if str(result) in ("Tensor", _TEXTS):
        return (program_output(0, (), text=str(result) == _TEXTS),)
    if result.kind() != "TupleType":
        return None
    elements = [str(each) for each in result.elements()]
    if not all(each in ("Tensor", _TEXTS) for each in elements):
        return None
    return tuple(program_output(at, (at,), text=each == _TEXTS) for at, each in enumerate(elements))


def _torchscript_bound(forward: Any, arguments: Sequence[Any], names: Sequence[str]) -> Call:
    if len(arguments) == 1 and arguments[0].type.kind() == "DictType":
        return lambda values: forward(dict(zip(names, values, strict=True)))
    absent = {each.name: None for each in arguments if each.name not in names and not each.has_default_value()}
    if not absent and [each.name for each in arguments[: len(names)]] == list(names):
        return lambda values: forward(*values)
    return lambda values: forward(**dict(zip(names, values, strict=True)), **absent)

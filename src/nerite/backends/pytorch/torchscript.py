"""TorchScript: programs that ``torch.jit.script`` or ``torch.jit.trace`` have made."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

import torch

from nerite.backends.pytorch.framework import quiet, unloadable
from nerite.backends.pytorch.plan import Plan
from nerite.backends.pytorch.program import Call, Program, Slot, output
from nerite.core.errors import Internal

_log = logging.getLogger("nerite.backends.pytorch")

_TEXTS: Final = "List[str]"
_TENSORS: Final = ("Tensor", "Optional[Tensor]")


def open_program(model: str, plan: Plan, device: str) -> Program:
    """Load a program. Raises ``NeriteError``."""
    try:
        with quiet:
            module = torch.jit.load(str(plan.artifact.path), map_location=device or None)
    except Exception as error:  # Whatever PyTorch raises says what is wrong with the file.
        raise unloadable(model, error) from error
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
        inputs=_inputs(arguments),
        outputs=_outputs([each.type for each in schema.returns]),
        bind=lambda names: _bound(module.forward, arguments, names),
        device=device,
        writes_inputs=any(writes[1:]),
        keeps_state=writes[0],
    )


def _written(module: Any) -> list[bool]:
    """Return for the module and for each argument of its ``forward`` whether that may write there."""
    graph = module.inlined_graph
    aliases = graph.alias_db()
    return [bool(aliases.has_writers(each)) for each in graph.inputs()]


def _inputs(arguments: Sequence[Any]) -> tuple[Slot, ...] | None:
    """Return the inputs; None for a dictionary of them. Raises ``Internal`` for what the protocol cannot bring."""
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
            slots.append(Slot(argument.name, (f"ARGS[{position}]",), text=kind == _TEXTS, optional=optional))
        elif not argument.has_default_value():
            raise Internal(
                f"An input of type '{kind}' was detected in the model. Only a single input of type Dict(str, Tensor) "
                f"or input(s) of type Tensor are supported. Give '{argument.name}' a default, or make it a Tensor"
            )
    return tuple(slots)


def _outputs(types: Sequence[Any]) -> tuple[Slot, ...] | None:
    """Return the outputs; None where the type does not say how many there are."""
    [result] = types
    if str(result) in ("Tensor", _TEXTS):
        return (output(0, (), text=str(result) == _TEXTS),)
    if result.kind() != "TupleType":
        return None
    elements = [str(each) for each in result.elements()]
    if not all(each in ("Tensor", _TEXTS) for each in elements):
        return None
    return tuple(output(at, (at,), text=each == _TEXTS) for at, each in enumerate(elements))


def _bound(forward: Any, arguments: Sequence[Any], names: Sequence[str]) -> Call:
    if len(arguments) == 1 and arguments[0].type.kind() == "DictType":
        return lambda values: forward(dict(zip(names, values, strict=True)))
    absent = {each.name: None for each in arguments if each.name not in names and not each.has_default_value()}
    if not absent and [each.name for each in arguments[: len(names)]] == list(names):
        return lambda values: forward(*values)
    return lambda values: forward(**dict(zip(names, values, strict=True)), **absent)

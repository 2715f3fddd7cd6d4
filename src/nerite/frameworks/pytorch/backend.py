"""The PyTorch backend: completes configurations, opens programs, and runs them for instances."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from nerite.backends.arrays.backend import ArrayBackend, ArrayModel
from nerite.backends.arrays.graph import ModelGraph, complete_from_graph
from nerite.backends.arrays.instance import Compute
from nerite.backends.configuration import TensorPort, made_inputs, state_outputs
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.python.module import ModelModule
from nerite.core.errors import Internal, InvalidArgument, NeriteError, NotInstalled
from nerite.frameworks.pytorch import artifact
from nerite.frameworks.pytorch.artifact import Binding, ProgramKind, TorchArtifact, TorchPlan
from nerite.frameworks.pytorch.program import (
    Call,
    Program,
    TensorSlot,
    load_torch,
    loading,
    program_output,
    quiet,
    run_error,
    use_inter_op_threads,
)

_UNKNOWN: Final = {
    ProgramKind.TORCHSCRIPT: "TorchScript does not say",
    ProgramKind.COMPILED: "a compiled package does not say",
    ProgramKind.PYTHON: "a module in Python does not say",
    ProgramKind.EXPORTED: "the program has tensors of a type that the protocol does not have, or does not say",
}


class ProgramKey(NamedTuple):
    """Program of one artifact on one device."""

    artifact: TorchArtifact
    device: str


class PyTorchModel(ArrayModel[ProgramKey]):
    """Open model: its programs, and what its instances share.

    Instances on a CPU share one program, and with it the weights, if it cannot change itself: PyTorch allows that, and
    they answer as many requests as with one each. Instances on a GPU get one each. ``ENABLE_WEIGHT_SHARING`` overrides
    this.
    """

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        self._plan: TorchPlan = artifact.make_plan(context)
        self._binding: Binding | None = None
        load_torch()
        use_inter_op_threads(context.name, self._plan.inter_op_threads)
        self._code: ModelModule | None = None
        if self._plan.artifact.kind is ProgramKind.PYTHON:
            self._code = import_code(context, self._plan)

    def key(self, instance: InstanceContext) -> ProgramKey:
        """Return the artifact and the device of an instance."""
        return ProgramKey(self._plan.artifact, artifact.device_name(instance))

    def load(self, key: ProgramKey) -> Program:
        """Open a program on a device. Slow. Raises ``NeriteError``."""
        import torch

        from nerite.frameworks.pytorch import exported

        name, device = self.context.name, key.device
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise NotInstalled(
                f"unable to load model '{name}': an instance is to run on '{device}', and PyTorch {torch.__version__} "
                "sees no GPU. Set kind: KIND_CPU, or install a build of torch for the driver of this machine"
            )
        if self._code is not None:
            return make_eager_program(name, self._plan, self._code, device)
        if key.artifact.kind is ProgramKind.TORCHSCRIPT:
            return open_torchscript(name, self._plan, device)
        if key.artifact.kind is ProgramKind.EXPORTED:
            return exported.open_exported(name, self._plan, device)
        return exported.open_inductor(name, self._plan, device)

    def shares(self, key: ProgramKey, copy: Program) -> bool:
        """Return True for a program on the CPU that cannot change itself, unless the configuration decides."""
        if self._plan.share is not None:
            return self._plan.share
        return key.device == "cpu" and not copy.keeps_state

    def graph(self, copy: Program) -> ModelGraph:
        """Return the inputs and outputs; controls and states under the configuration's names.

        Raises ``InvalidArgument`` with what is missing if the program does not know all shapes and types.
        """
        made = {entry["name"] for entry in made_inputs(self.context.config)}
        kept = {entry["name"] for entry in state_outputs(self.context.config)}
        sides = []
        for slots, names in ((copy.inputs, made), (copy.outputs, kept)):
            tensors = [
                slot.as_tensor(next((name for name in (slot.name, *slot.aliases) if name in names), slot.name))
                for slot in slots or ()
            ]
            if slots is None or not all(tensors):
                raise InvalidArgument(self._undeclared(copy))
            sides.append({tensor.name: tensor for tensor in tensors if tensor is not None})
        return ModelGraph(sides[0], sides[1], {})

    def completed(self, copy: Program) -> dict[str, Any]:
        """Return the configuration, completed from an exported program. Other kinds do not know enough."""
        return complete_from_graph(self.context, self.graph(copy), copy.highest_batch)

    def ports(self, copy: Program) -> tuple[Sequence[TensorPort], Sequence[TensorPort]]:
        """Return the declared inputs and outputs, after binding them to those of the program."""
        context = self.context
        self._binding, inputs, outputs = artifact.bind_configuration(context.name, context.config, copy)
        scalars = [{name for name, slot in side.items() if slot.dims == ()} for side in (inputs, outputs)]
        return self.declared(*scalars)

    def computation(self, copy: Program, instance: InstanceContext) -> Compute:
        """Return a computation with its own threads and stream."""
        from nerite.frameworks.pytorch.run import ProgramRun

        assert self._binding is not None, "not open"
        threads = artifact.threads(self._plan, self.context, instance)
        return ProgramRun(self.context.name, copy, self._binding, self._plan, threads)

    def failure(self, error: Exception) -> NeriteError:
        """Translate an exception from PyTorch or from the model's code."""
        return run_error(error)

    def close(self) -> None:
        """Drop the programs, and remove the model's code from the process."""
        super().close()
        if self._code is not None:
            self._code.close()
            self._code = None

    def _undeclared(self, program: Program) -> str:
        """Return the error for a configuration without inputs or outputs, with what to write."""
        lines = []
        for side, slots in (("input", program.inputs), ("output", program.outputs)):
            for slot in slots or (TensorSlot(f"{side.upper()}__0"),):
                datatype = "TYPE_STRING" if slot.text else slot.datatype.config_name if slot.datatype else "TYPE_FP32"
                lines.append(f'{side} {{ name: "{slot.name}" data_type: {datatype} dims: [ -1 ] }}')
        return (
            f"model '{self.context.name}' needs its inputs and outputs in '{self.context.directory / 'config.pbtxt'}': "
            f"{_UNKNOWN[self._plan.artifact.kind]} what shapes and types its tensors have. Write, with the right ones: "
            f"{' '.join(lines)}"
        )


class PyTorchBackend(ArrayBackend):
    """Backend for TorchScript, exported programs, compiled packages and modules in Python, on PyTorch."""

    name = "pytorch"
    model = PyTorchModel

    def isolates(self, context: ModelContext) -> bool:
        """Return True for models that need their own processes.

        A process cannot unload a compiled package. Python code holds the GIL, which the server needs, and may do
        anything to its process: it runs in the server only if its instances are to share their weights.
        """
        kind = artifact.find_artifact(context).kind
        return kind is ProgramKind.COMPILED or (kind is ProgramKind.PYTHON and not artifact.weight_sharing(context))


# Opens modules in Python (a class in ``model.py`` with its weights beside it), and TorchScript.

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

"""The backend: completes configurations, opens models, makes their instances."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from nerite.backends.arrays.graph import ModelGraph, complete_from_graph, needs_completion
from nerite.backends.arrays.instance import ArrayInstance, ModelFace
from nerite.backends.configuration import (
    Entry,
    TensorPort,
    all_inputs,
    all_outputs,
    batching,
    made_inputs,
    of_entry,
    state_outputs,
)
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.python.module import ModelModule
from nerite.core import tensor as dtypes
from nerite.core.errors import InvalidArgument, NotInstalled
from nerite.frameworks.pytorch import artifact
from nerite.frameworks.pytorch import artifact as plans
from nerite.frameworks.pytorch.artifact import (
    ProgramKind,
    TorchPlan,
    given_names,
    input_names,
    output_names,
    taken_names,
)
from nerite.frameworks.pytorch.program import Program, TensorSlot, load_torch, use_inter_op_threads

if TYPE_CHECKING:
    from nerite.frameworks.pytorch.run import Ends

_log = logging.getLogger("nerite.frameworks.pytorch")


class PyTorchBackend:
    """TorchScript, exported programs, compiled packages and modules in Python, on PyTorch."""

    name = "pytorch"
    isolated = False

    def isolates(self, context: ModelContext) -> bool:
        """Return whether a model is to have processes of its own.

        No process that has loaded a compiled package gets rid of it again. Code in Python holds the lock that the
        server needs for everybody, and may do what it likes to the process that it is in: only where its instances are
        to share their weights, it is in the server's.
        """
        kind = artifact.find_artifact(context).kind
        return kind is ProgramKind.COMPILED or (kind is ProgramKind.PYTHON and not plans.plan_shares(context))

    def complete(self, context: ModelContext) -> Mapping[str, Any]:
        """Return the configuration with batch size, scheduler, inputs and outputs from an exported program.

        The program is left in the context for ``open``. The other kinds do not say enough of themselves: raises
        ``InvalidArgument`` with what is lacking and what is known of it.
        """
        if not needs_completion(context):
            return context.config
        opener = TorchOpener(context)
        device = plans.first_device(context.config)
        program = opener.open(device)
        try:
            graph = _graph(context.config, program)
            if graph is None:
                raise InvalidArgument(_lacking(context, program, opener.plan.artifact.kind))
        finally:
            opener.close()
        context.memo[opener.plan.artifact] = program
        return complete_from_graph(context, graph, program.highest_batch)

    def open(self, context: ModelContext) -> PyTorchModel:
        """Open a model whose configuration is complete. Raises ``NeriteError`` where model and configuration differ."""
        return PyTorchModel(context)


class TorchOpener:
    """Opens the programs of one model."""

    def __init__(self, context: ModelContext) -> None:
        self.plan: TorchPlan = plans.make_plan(context)
        self._context = context
        load_torch()
        use_inter_op_threads(context.name, self.plan.inter_op_threads)
        self._code: ModelModule | None = None
        if self.plan.artifact.kind is ProgramKind.PYTHON:
            from nerite.frameworks.pytorch.modules import import_code

            self._code = import_code(context, self.plan)

    def open(self, device: str) -> Program:
        """Return a program on ``device``. Slow. Raises ``NeriteError``."""
        import torch

        from nerite.frameworks.pytorch import exported, modules

        name, kind = self._context.name, self.plan.artifact.kind
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise NotInstalled(
                f"unable to load model '{name}': an instance is to run on '{device}', and PyTorch {torch.__version__} "
                "sees no GPU. Set kind: KIND_CPU, or install a build of torch for the driver of this machine"
            )
        if self._code is not None:
            return modules.make_eager_program(name, self.plan, self._code, device)
        if kind is ProgramKind.TORCHSCRIPT:
            return modules.open_torchscript(name, self.plan, device)
        if kind is ProgramKind.EXPORTED:
            return exported.open_exported(name, self.plan, device)
        return exported.open_inductor(name, self.plan, device)

    def close(self) -> None:
        """Take the model's code out of the process, if it has any."""
        if self._code is not None:
            self._code.close()
            self._code = None


class PyTorchModel:
    """An open model: its programs, and what its instances have in common.

    Instances on a CPU share one program, and with it the weights, if it cannot change itself: PyTorch allows that, and
    they answer as many requests as with one each. Instances on a GPU get one each. ``ENABLE_WEIGHT_SHARING`` decides
    otherwise.
    """

    def __init__(self, context: ModelContext) -> None:
        config = context.config
        self._context = context
        self._opener = TorchOpener(context)
        self._lock = threading.Lock()
        try:
            first = plans.first_device(config)
            program = context.memo.pop(self._opener.plan.artifact, None) or self._opener.open(first)
            self._spare = {first: program}
            self._ends, inputs, outputs = _ends(context.name, config, program)
        except BaseException:
            self._opener.close()
            raise
        taken, given = _ports(config, all_inputs(config), inputs), _ports(config, all_outputs(config), outputs)
        self._face = ModelFace(context, taken, given)

    def instance(self, context: InstanceContext) -> ArrayInstance:
        """Make an instance, with a program of its own or a shared one. Raises ``NeriteError``."""
        from nerite.frameworks.pytorch.run import ProgramRun

        plan = self._opener.plan
        program = self._program(plans.plan_device(context))
        return self._face.instance(
            ProgramRun(self._context.name, program, self._ends, plan, plans.threads(plan, context))
        )

    def close(self) -> None:
        """Let go of the programs; they end with the last response that holds a tensor of theirs."""
        self._spare.clear()
        self._opener.close()

    def _program(self, device: str) -> Program:
        with self._lock:
            program = self._spare.get(device) or self._opener.open(device)
            share = self._opener.plan.share
            if share is None:
                share = device == "cpu" and not program.keeps_state
            if share:
                self._spare[device] = program
            else:
                self._spare.pop(device, None)
            return program


def _ends(
    name: str, config: Mapping[str, Any], program: Program
) -> tuple[Ends, Mapping[str, TensorSlot], Mapping[str, TensorSlot]]:
    """Return where configuration and program meet, and the slots by the configuration's names, after comparing them."""
    from nerite.frameworks.pytorch.run import Ends

    given, taken = given_names(config), taken_names(config)
    inputs = input_names(name, given, program.inputs) if program.inputs is not None else {}
    outputs = output_names(name, taken, program.outputs) if program.outputs is not None else {}
    artifact.check_against_program(name, config, program, inputs, outputs)
    datatypes = {str(entry["name"]): str(entry["data_type"]) for entry in all_inputs(config)}
    for made in config.get("batch_input", ()):
        datatypes.update(dict.fromkeys(map(str, made["target_name"]), str(made["data_type"])))
    ends = Ends(
        inputs={each: slot.name for each, slot in inputs.items()} or {each: each for each in given},
        datatypes={each: dtypes.BY_CONFIG_NAME[datatype] for each, datatype in datatypes.items()},
        outputs=taken,
        paths={each: slot.path for each, slot in outputs.items()} if program.outputs is not None else None,
    )
    return ends, inputs, outputs


def _ports(config: Mapping[str, Any], entries: Iterable[Entry], slots: Mapping[str, TensorSlot]) -> list[TensorPort]:
    scalars = {name for name, slot in slots.items() if slot.dims == ()}
    return [of_entry(entry, batching=batching(config), scalar=entry["name"] in scalars) for entry in entries]


def _graph(config: Mapping[str, Any], program: Program) -> ModelGraph | None:
    """Return what a program says of itself, if that is enough; controls and states by the configuration's names."""
    made = {entry["name"] for entry in made_inputs(config)}
    kept = {entry["name"] for entry in state_outputs(config)}
    sides = []
    for slots, names in ((program.inputs, made), (program.outputs, kept)):
        tensors = [
            slot.as_tensor(next((n for n in (slot.name, *slot.aliases) if n in names), slot.name))
            for slot in slots or ()
        ]
        if slots is None or not all(tensors):
            return None
        sides.append({tensor.name: tensor for tensor in tensors if tensor is not None})
    return ModelGraph(sides[0], sides[1], {})


def _lacking(context: ModelContext, program: Program, kind: ProgramKind) -> str:
    """Return what to write into a configuration that lacks inputs or outputs."""
    what = {
        ProgramKind.TORCHSCRIPT: "TorchScript does not say",
        ProgramKind.COMPILED: "a compiled package does not say",
        ProgramKind.PYTHON: "a module in Python does not say",
        ProgramKind.EXPORTED: "the program has tensors of a type that the protocol does not have, or does not say",
    }[kind]
    lines = []
    for side, slots in (("input", program.inputs), ("output", program.outputs)):
        for slot in slots or (TensorSlot(f"{side.upper()}__0"),):
            datatype = "TYPE_STRING" if slot.text else slot.datatype.config_name if slot.datatype else "TYPE_FP32"
            lines.append(f'{side} {{ name: "{slot.name}" data_type: {datatype} dims: [ -1 ] }}')
    return (
        f"model '{context.name}' needs its inputs and outputs in '{context.directory / 'config.pbtxt'}': {what} what "
        f"shapes and types its tensors have. Write, with the right ones: {' '.join(lines)}"
    )

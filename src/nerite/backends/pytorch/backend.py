"""The backend: completes configurations, opens models, makes their instances."""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from nerite.backends.arrays import completion
from nerite.backends.arrays.face import Face
from nerite.backends.arrays.graph import Graph
from nerite.backends.arrays.instance import ArrayInstance
from nerite.backends.configuration import Entry, all_inputs, all_outputs, batching, made_inputs
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.ports import Port, of_entry
from nerite.backends.pytorch import agreement, artifact, framework, naming
from nerite.backends.pytorch import plan as plans
from nerite.backends.pytorch.artifact import Kind
from nerite.backends.pytorch.plan import Plan
from nerite.backends.pytorch.program import Program, Slot
from nerite.backends.sequence_tensors import state_outputs
from nerite.core import dtype as dtypes
from nerite.core.errors import InvalidArgument, NotHere

if TYPE_CHECKING:
    from nerite.backends.pytorch.run import Ends

_log = logging.getLogger("nerite.backends.pytorch")


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
        kind = artifact.find(context).kind
        return kind is Kind.COMPILED or (kind is Kind.PYTHON and not plans.shares(context))

    def complete(self, context: ModelContext) -> Mapping[str, Any]:
        """Return the configuration with batch size, scheduler, inputs and outputs from an exported program.

        The program is left in the context for ``open``. The other kinds do not say enough of themselves: raises
        ``InvalidArgument`` with what is lacking and what is known of it.
        """
        if not completion.is_needed(context):
            return context.config
        opener = Opener(context)
        device = plans.first_device(context.config)
        program = opener.open(device)
        try:
            graph = _graph(context.config, program)
            if graph is None:
                raise InvalidArgument(_lacking(context, program, opener.plan.artifact.kind))
        finally:
            opener.close()
        context.memo[opener.plan.artifact] = program
        return completion.complete(context, graph, program.highest_batch)

    def open(self, context: ModelContext) -> PyTorchModel:
        """Open a model whose configuration is complete. Raises ``NeriteError`` where model and configuration differ."""
        return PyTorchModel(context)


class Opener:
    """Opens the programs of one model."""

    def __init__(self, context: ModelContext) -> None:
        self.plan: Plan = plans.make(context)
        self._context = context
        framework.load()
        self._module = importlib.import_module(f"nerite.backends.pytorch.{self.plan.artifact.kind.value}")
        framework.use_inter_op_threads(context.name, self.plan.inter_op_threads)
        self._code = self._module.import_code(context, self.plan) if self.plan.artifact.kind is Kind.PYTHON else None

    def open(self, device: str) -> Program:
        """Return a program on ``device``. Slow. Raises ``NeriteError``."""
        import torch

        name = self._context.name
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise NotHere(
                f"unable to load model '{name}': an instance is to run on '{device}', and PyTorch {torch.__version__} "
                "sees no GPU. Set kind: KIND_CPU, or install a build of torch for the driver of this machine"
            )
        if self._code is not None:
            program: Program = self._module.make_program(name, self.plan, self._code, device)
        else:
            program = self._module.open_program(name, self.plan, device)
        return program

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
        self._opener = Opener(context)
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
        self._face = Face(context, taken, given)

    def instance(self, context: InstanceContext) -> ArrayInstance:
        """Make an instance, with a program of its own or a shared one. Raises ``NeriteError``."""
        from nerite.backends.pytorch.run import Run

        plan = self._opener.plan
        program = self._program(plans.device(context))
        return self._face.instance(Run(self._context.name, program, self._ends, plan, plans.threads(plan, context)))

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
) -> tuple[Ends, Mapping[str, Slot], Mapping[str, Slot]]:
    """Return where configuration and program meet, and the slots by the configuration's names, after comparing them."""
    from nerite.backends.pytorch.run import Ends

    given, taken = naming.given(config), naming.taken(config)
    inputs = naming.inputs(name, given, program.inputs) if program.inputs is not None else {}
    outputs = naming.outputs(name, taken, program.outputs) if program.outputs is not None else {}
    agreement.check(name, config, program, inputs, outputs)
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


def _ports(config: Mapping[str, Any], entries: Iterable[Entry], slots: Mapping[str, Slot]) -> list[Port]:
    scalars = {name for name, slot in slots.items() if slot.dims == ()}
    return [of_entry(entry, batching=batching(config), scalar=entry["name"] in scalars) for entry in entries]


def _graph(config: Mapping[str, Any], program: Program) -> Graph | None:
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
    return Graph(sides[0], sides[1], {})


def _lacking(context: ModelContext, program: Program, kind: Kind) -> str:
    """Return what to write into a configuration that lacks inputs or outputs."""
    what = {
        Kind.TORCHSCRIPT: "TorchScript does not say",
        Kind.COMPILED: "a compiled package does not say",
        Kind.PYTHON: "a module in Python does not say",
        Kind.EXPORTED: "the program has tensors of a type that the protocol does not have, or does not say",
    }[kind]
    lines = []
    for side, slots in (("input", program.inputs), ("output", program.outputs)):
        for slot in slots or (Slot(f"{side.upper()}__0"),):
            datatype = "TYPE_STRING" if slot.text else slot.datatype.config_name if slot.datatype else "TYPE_FP32"
            lines.append(f'{side} {{ name: "{slot.name}" data_type: {datatype} dims: [ -1 ] }}')
    return (
        f"model '{context.name}' needs its inputs and outputs in '{context.directory / 'config.pbtxt'}': {what} what "
        f"shapes and types its tensors have. Write, with the right ones: {' '.join(lines)}"
    )

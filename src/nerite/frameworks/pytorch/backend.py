"""The PyTorch backend: completes configurations, opens programs, and runs them for instances."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from nerite.backends import gpu_builds
from nerite.backends.arrays.backend import ArrayBackend, ArrayModel
from nerite.backends.arrays.graph import ModelGraph, complete_from_graph
from nerite.backends.arrays.instance import Compute
from nerite.backends.configuration import TensorPort, made_inputs, state_outputs
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.python.module import ModelModule
from nerite.core.errors import InvalidArgument, NeriteError, NotInstalled
from nerite.devices import cuda
from nerite.frameworks.pytorch import artifact
from nerite.frameworks.pytorch.artifact import Binding, ProgramKind, TorchArtifact, TorchPlan
from nerite.frameworks.pytorch.program import Program, TensorSlot, load_torch, run_error, use_inter_op_threads

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
            from nerite.frameworks.pytorch.modules import import_code

            self._code = import_code(context, self._plan)

    def key(self, instance: InstanceContext) -> ProgramKey:
        """Return the artifact and the device of an instance."""
        return ProgramKey(self._plan.artifact, artifact.device_name(instance))

    def load(self, key: ProgramKey) -> Program:
        """Open a program on a device. Slow. Raises ``NeriteError``."""
        import torch

        from nerite.frameworks.pytorch import exported, modules

        name, device = self.context.name, key.device
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise NotInstalled(
                f"unable to load model '{name}': an instance is to run on '{device}', and PyTorch {torch.__version__} "
                f"sees no GPU. Set kind: KIND_CPU, or {gpu_builds.remedy_here('pytorch')}"
            )
        if self._code is not None:
            return modules.make_eager_program(name, self._plan, self._code, device)
        if key.artifact.kind is ProgramKind.TORCHSCRIPT:
            return modules.open_torchscript(name, self._plan, device)
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
        if instance.kind == "GPU" and cuda.installed():
            from nerite.frameworks.pytorch.device_run import DeviceProgramRun

            return DeviceProgramRun(self.context.name, copy, self._binding, self._plan, threads, instance.device)
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

"""Programs that ``torch.export`` has made: they know their inputs and outputs, with shapes and types."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument
from torch.utils import _pytree as pytree

from nerite.backends.pytorch.framework import quiet, unloadable
from nerite.backends.pytorch.plan import Plan
from nerite.backends.pytorch.program import Call, Path, Program, Slot, described, output
from nerite.backends.pytorch.tensors import DATATYPES
from nerite.backends.pytorch.writes import written
from nerite.core.dtype import DataType
from nerite.core.errors import Unsupported

_one_at_a_time = threading.Lock()
"""Reading programs is Python, with state of its own; to read two at once would not be faster."""
_MOST_SHAPES: Final = 256
_FREE: Final = 1 << 30
"""A maximum of this size and more means that there is none."""


def open_program(model: str, plan: Plan, device: str) -> Program:
    """Load a program. Raises ``NeriteError``."""
    try:
        with _one_at_a_time, quiet:
            exported = torch.export.load(str(plan.artifact.path))
            if device.startswith("cuda"):
                exported = torch.export.passes.move_to_device_pass(exported, device)
            module = exported.module()
            compute = _Lean(module, exported.call_spec.in_spec, plan.compile)
    except Exception as error:  # Whatever PyTorch raises says what is wrong with the file.
        remedy = "A program can be read by the version of PyTorch that wrote it, and mostly by later ones"
        raise unloadable(model, error, f"{remedy}; this is {torch.__version__}") from error
    signature = exported.graph_signature
    nodes = {node.name: node for node in exported.graph.nodes}
    taken = [spec.arg for spec in signature.input_specs if spec.kind is InputKind.USER_INPUT]
    given = [spec.arg for spec in signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    kinds = {spec.kind for spec in signature.output_specs}
    roots = {
        spec.arg.name: "input" if spec.kind is InputKind.USER_INPUT else "state"
        for spec in signature.input_specs
        if isinstance(spec.arg, TensorArgument)
    }
    writes = written(exported.graph, roots)
    names = exported.module_call_graph[0].signature.forward_arg_names or ()
    inputs = tuple(_inputs(model, taken, _paths(exported.call_spec.in_spec), nodes, names))
    outputs = tuple(_outputs(given, _paths(exported.call_spec.out_spec), nodes))
    fixed = {position: arg.value for position, arg in enumerate(taken) if isinstance(arg, ConstantArgument)}
    return Program(
        inputs=inputs,
        outputs=outputs,
        bind=lambda names: _bound(compute, fixed),
        device=device,
        writes_inputs="input" in writes or OutputKind.USER_INPUT_MUTATION in kinds,
        keeps_state="state" in writes or OutputKind.BUFFER_MUTATION in kinds,
        highest_batch=_highest_batch(exported, inputs, nodes, taken),
    )


class _Lean:
    """The operations of a program, without the checks around them: those take longer than many a small model.

    They depend on shapes alone; so the first call with shapes that have not been seen goes through them.
    """

    def __init__(self, module: Any, in_spec: Any, options: str | None) -> None:
        self._checked = module
        self._in_spec = in_spec
        graph = copy.deepcopy(module.graph)
        # Takes and gives flat tuples.
        graph.set_codegen(torch.fx.graph.CodeGen())
        for node in reversed(graph.nodes):
            if node.target in ("_guards_fn", torch.ops.aten._assert_tensor_metadata.default):
                graph.erase_node(node)
        lean = torch.fx.GraphModule(module, graph)
        self._forward: Callable[..., Any] = lean.forward
        if options is not None:
            self._forward = torch.compile(lean, **json.loads(options))
        self._seen: set[tuple[Any, ...]] = set()

    def __call__(self, values: Sequence[Any]) -> Sequence[Any]:
        shapes = tuple([each.shape if isinstance(each, torch.Tensor) else None for each in values])
        if shapes in self._seen:
            return self._forward(*values)  # type: ignore[no-any-return]
        args, kwargs = pytree.tree_unflatten(list(values), self._in_spec)
        result: list[Any] = pytree.tree_leaves(self._checked(*args, **kwargs))
        if len(self._seen) >= _MOST_SHAPES:
            self._seen.clear()
        self._seen.add(shapes)
        return result


def _bound(compute: _Lean, fixed: Mapping[int, Any]) -> Call:
    if not fixed:
        return compute

    def call(values: list[Any]) -> Sequence[Any]:
        rest = iter(values)
        return compute([fixed[at] if at in fixed else next(rest) for at in range(len(values) + len(fixed))])

    return call


def _inputs(
    model: str, taken: Sequence[Any], paths: Sequence[Path], nodes: Mapping[str, Any], names: Sequence[str]
) -> Sequence[Slot]:
    """Return the inputs; ``names`` are those of the arguments of ``forward``."""
    slots: list[Slot] = []
    for argument, path in zip(taken, paths, strict=True):
        if isinstance(argument, ConstantArgument):
            continue
        if not isinstance(argument, TensorArgument):
            raise Unsupported(
                f"failed to load model '{model}': input '{argument.name}' is no tensor, but a number of the caller's "
                "choice. Export the program with a constant in its place, or with a tensor"
            )
        side, inner = ("KWARGS" if path[0] else "ARGS"), path[1:]
        datatype, dims = _seen(nodes[argument.name])
        # The graph has names of its own, in small letters.
        name = _argument(inner[0], names) if len(inner) == 1 else argument.name
        slots.append(Slot(name or argument.name, (argument.name, f"{side}{described(inner)}"), datatype, dims))
    return slots


def _argument(step: str | int, names: Sequence[str]) -> str:
    """Return the name of an argument that is passed by name or by position; empty where it is not known."""
    if isinstance(step, str):
        return step
    return names[step] if step < len(names) else ""


def _outputs(given: Sequence[Any], paths: Sequence[Path], nodes: Mapping[str, Any]) -> Sequence[Slot]:
    slots: list[Slot] = []
    for position, (argument, path) in enumerate(zip(given, paths, strict=True)):
        if isinstance(argument, TensorArgument):
            datatype, dims = _seen(nodes[argument.name])
            slot = output(len(slots), path, datatype=datatype, dims=dims)
            slots.append(slot._replace(path=(position,)))
    return slots


def _seen(node: Any) -> tuple[DataType | None, tuple[int, ...]]:
    value = node.meta["val"]
    return DATATYPES.get(value.dtype), tuple(size if isinstance(size, int) else -1 for size in value.shape)


def _paths(spec: Any) -> list[Path]:
    """Return the way to each leaf of a nest of tuples and dictionaries."""
    tree = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    return [tuple(_step(step) for step in steps) for steps, _ in pytree.tree_flatten_with_path(tree)[0]]


def _step(step: Any) -> str | int:
    for attribute in ("idx", "key", "name"):
        if hasattr(step, attribute):
            found: str | int = getattr(step, attribute)
            return found
    return str(step)


def _highest_batch(exported: Any, inputs: Sequence[Slot], nodes: Mapping[str, Any], taken: Sequence[Any]) -> int | None:
    """Return what the first dimension of all inputs may be at most; None where there is no such limit."""
    highest = None
    for argument in taken:
        value = nodes[argument.name].meta["val"] if isinstance(argument, TensorArgument) else None
        if value is None or not value.shape or isinstance(value.shape[0], int):
            continue
        bounds = exported.range_constraints.get(value.shape[0].node.expr)
        if bounds is not None and bounds.upper.is_Integer and bounds.upper < _FREE:
            highest = min(highest or _FREE, int(bounds.upper))
    return highest

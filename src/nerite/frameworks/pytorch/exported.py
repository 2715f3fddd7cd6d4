"""Opens programs of ``torch.export``, which know their inputs and outputs, and packages of AOTInductor."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path as FilePath
from typing import Any, Final

import torch
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument
from torch.export.passes import move_to_device_pass
from torch.utils import _pytree as pytree

from nerite.core.errors import Unsupported
from nerite.core.tensor import DataType
from nerite.frameworks.pytorch.artifact import TorchPlan
from nerite.frameworks.pytorch.program import (
    Call,
    Program,
    TensorPath,
    TensorSlot,
    loading,
    path_text,
    program_output,
    quiet,
)
from nerite.frameworks.pytorch.run import DATATYPES

# Packages of AOTInductor: machine code that knows how its inputs nest, but not their types and shapes.
#
# The way PyTorch builds it, a loaded library stays in the process until that ends. So these models run in workers,
# which end with them.

_CHECKS: Final = "AOTI_RUNTIME_CHECK_INPUTS"
"""Unless this is set, a compiled program takes inputs of any shape for its own, and reads beyond their end. The check
takes less than a microsecond. Set it to 0 in the server's environment to disable it."""
_TOO_FEW: Final = "too small at 0, expected it to be >= 2, but got: 1"
_unpacking = threading.Lock()
_folders: dict[str, FilePath] = {}
"""Directories into which packages were unpacked, by their digest."""


def open_inductor(model: str, plan: TorchPlan, device: str) -> Program:
    """Load a package. Raises ``NeriteError``."""
    os.environ.setdefault(_CHECKS, "1")
    path = plan.artifact.path
    count = plan.instances if plan.share else 1
    load = torch._C._aoti.AOTIModelPackageLoader
    remedy = f"A package runs with the version of PyTorch that compiled it; this is {torch.__version__}"
    with loading(model, remedy), quiet, zipfile.ZipFile(path) as archive:
        name = _model_name(archive)
        if device == "cpu":
            with _unpacked(archive, path) as folder:
                loader = load(str(folder), name, False, count, -1)
        else:
            # Code for GPUs is read when it first runs. So PyTorch unpacks it, and deletes the files at the end.
            loader = load(str(path), name, False, count, torch.device(device).index if device else -1)
    compiled_for = loader.get_metadata().get("AOTI_DEVICE_KEY", "cpu")
    if device and torch.device(device).type != compiled_for:
        raise Unsupported(
            f"failed to load model '{model}': its package was compiled for '{compiled_for}', and its instances are to "
            f"run on '{device}'. Compile it for that, or set kind: KIND_{'CPU' if compiled_for == 'cpu' else 'GPU'}"
        )
    taken, given = (list(_leaves(json.loads(spec)[1])) for spec in loader.get_call_spec())
    return Program(
        inputs=tuple(_input(position, path) for position, path in enumerate(taken)),
        outputs=tuple(program_output(position, path)._replace(path=(position,)) for position, path in enumerate(given)),
        bind=lambda names: _Pairs(loader.run) if plan.batching else loader.run,
        device=device,
        # Unknown, so it has to be assumed.
        keeps_state=True,
    )


class _Pairs:
    """Runs a program; a single row is run in a batch of two if the program rejects it.

    Programs that are compiled for a dynamic number of rows assume at least two, although mostly one would work.
    """

    def __init__(self, run: Callable[[list[Any]], list[Any]]) -> None:
        self._run = run
        self._alone = True

    def __call__(self, values: list[Any]) -> Any:
        single = all(each.shape[:1] == (1,) for each in values)
        if self._alone or not single:
            try:
                return self._run(values)
            except RuntimeError as error:
                if not single or _TOO_FEW not in str(error):
                    raise
                self._alone = False
        return [each[:1] for each in self._run([torch.cat((each, each)) for each in values])]


def _input(position: int, path: TensorPath) -> TensorSlot:
    side, inner = ("KWARGS" if path[0] else "ARGS"), path[1:]
    aliases = (f"{side}{path_text(inner)}", *([str(inner[0])] if path[0] and len(inner) == 1 else []))
    return TensorSlot(f"INPUT__{position}", aliases)


def _leaves(spec: Any, path: TensorPath = ()) -> Iterator[TensorPath]:
    """Yield the path to each tensor of a call specification."""
    if spec["type"] is None:
        yield path
        return
    context = json.loads(spec["context"] or "null")
    keys = context if isinstance(context, list) else range(len(spec["children_spec"]))
    for key, child in zip(keys, spec["children_spec"], strict=True):
        yield from _leaves(child, (*path, key))


def _model_name(archive: zipfile.ZipFile) -> str:
    names = {name.partition("data/aotinductor/")[2].partition("/")[0] for name in archive.namelist()} - {""}
    return "model" if "model" in names else min(names)


@contextmanager
def _unpacked(archive: zipfile.ZipFile, path: FilePath) -> Iterator[FilePath]:
    """Unpack a package into a directory that exists while it is loaded: the same path for the same content.

    A library with the path of a loaded one is not loaded again, even if the file is another. With a new path each time,
    as PyTorch does it, each load of a model takes memory again. The files are deleted at once, because a worker may be
    killed at any time.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    with _unpacking:
        if digest in _folders:
            _folders[digest].mkdir(mode=0o700)
        else:
            _folders[digest] = FilePath(tempfile.mkdtemp(prefix="nerite_aoti_"))
        try:
            archive.extractall(_folders[digest])
            yield _folders[digest]
        finally:
            shutil.rmtree(_folders[digest])


# Finding out whether an exported program writes into its inputs or its state.
#
# Signatures say so only of programs without in-place operations. So the graph is followed from each operation that
# writes, back through views, to the origin of the memory.


def written_tensors(graph: Any, roots: Mapping[str, str]) -> set[str]:
    """Return what a graph may write into; ``roots`` maps names of placeholders to what they stand for."""
    origins: dict[Any, frozenset[str]] = {}
    found: set[str] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            origins[node] = frozenset([roots[node.name]] if node.name in roots else [])
            continue
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            # An item of several results, or an operation with its own graphs.
            origins[node] = _of(origins, node.all_input_nodes)
            continue
        arguments = list(_arguments(node, schema))
        for argument, values in arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                found |= _of(origins, values)
        origins[node] = _of(origins, _sources(node, schema, arguments))
    return found


def _sources(node: Any, schema: Any, arguments: Iterable[tuple[Any, list[Any]]]) -> list[Any]:
    """Return the nodes whose memory the result of ``node`` may be in."""
    given = [values for argument, values in arguments if argument.alias_info is not None]
    if any(each.alias_info is not None for each in schema.returns):
        return [value for values in given for value in values]
    if torch._C._dispatch_has_kernel_for_dispatch_key(node.target.name(), "CompositeImplicitAutograd"):
        # Composite operations do not declare aliases: reshape and dropout may return their argument.
        return list(node.all_input_nodes[:1])
    return []


def _arguments(node: Any, schema: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Yield the declared arguments of a call, each with the nodes that are passed for it."""
    for position, argument in enumerate(schema.arguments):
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        yield argument, [each for each in _flat(value) if isinstance(each, torch.fx.Node)]


def _flat(value: Any) -> Iterable[Any]:
    return value if isinstance(value, (list, tuple)) else (value,)


def _of(origins: Mapping[Any, frozenset[str]], nodes: Iterable[Any]) -> frozenset[str]:
    return frozenset().union(*(origins.get(node, frozenset()) for node in nodes))


_one_at_a_time = threading.Lock()
"""Reading a program is Python code with global state; reading two at once would not be faster."""
_MAX_SHAPES: Final = 256
_FREE: Final = 1 << 30
"""A maximum of at least this means that there is none."""


def open_exported(model: str, plan: TorchPlan, device: str) -> Program:
    """Load a program. Raises ``NeriteError``."""
    remedy = "A program can be read by the version of PyTorch that wrote it, and mostly by later ones"
    with loading(model, f"{remedy}; this is {torch.__version__}"), _one_at_a_time, quiet:
        exported = torch.export.load(str(plan.artifact.path))
        if device.startswith("cuda"):
            exported = move_to_device_pass(exported, device)
        module = exported.module()
        compute = _Lean(module, exported.call_spec.in_spec, plan.compile)
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
    writes = written_tensors(exported.graph, roots)
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
    """Operations of a program without the checks around them, which take longer than many a small model.

    The checks depend on shapes alone, so only the first call with new shapes runs them.
    """

    def __init__(self, module: Any, in_spec: Any, options: str | None) -> None:
        self._checked = module
        self._in_spec = in_spec
        graph = copy.deepcopy(module.graph)
        # Takes and returns flat tuples.
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
        if len(self._seen) >= _MAX_SHAPES:
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
    model: str, taken: Sequence[Any], paths: Sequence[TensorPath], nodes: Mapping[str, Any], names: Sequence[str]
) -> Sequence[TensorSlot]:
    """Return the inputs; ``names`` are the parameters of ``forward``."""
    slots: list[TensorSlot] = []
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
        # The graph has its own names, in lower case.
        name = _argument(inner[0], names) if len(inner) == 1 else argument.name
        slots.append(TensorSlot(name or argument.name, (argument.name, f"{side}{path_text(inner)}"), datatype, dims))
    return slots


def _argument(step: str | int, names: Sequence[str]) -> str:
    """Return the name of an argument that is passed by name or by position; empty if it is unknown."""
    if isinstance(step, str):
        return step
    return names[step] if step < len(names) else ""


def _outputs(given: Sequence[Any], paths: Sequence[TensorPath], nodes: Mapping[str, Any]) -> Sequence[TensorSlot]:
    slots: list[TensorSlot] = []
    for position, (argument, path) in enumerate(zip(given, paths, strict=True)):
        if isinstance(argument, TensorArgument):
            datatype, dims = _seen(nodes[argument.name])
            slot = program_output(len(slots), path, datatype=datatype, dims=dims)
            slots.append(slot._replace(path=(position,)))
    return slots


def _seen(node: Any) -> tuple[DataType | None, tuple[int, ...]]:
    value = node.meta["val"]
    return DATATYPES.get(value.dtype), tuple(size if isinstance(size, int) else -1 for size in value.shape)


def _paths(spec: Any) -> list[TensorPath]:
    """Return the path to each leaf of nested tuples and dictionaries."""
    tree = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    return [tuple(_step(step) for step in steps) for steps, _ in pytree.tree_flatten_with_path(tree)[0]]


def _step(step: Any) -> str | int:
    for attribute in ("idx", "key", "name"):
        if hasattr(step, attribute):
            found: str | int = getattr(step, attribute)
            return found
    return str(step)


def _highest_batch(
    exported: Any, inputs: Sequence[TensorSlot], nodes: Mapping[str, Any], taken: Sequence[Any]
) -> int | None:
    """Return the maximum of the first dimension of all inputs; None without a limit."""
    highest = None
    for argument in taken:
        value = nodes[argument.name].meta["val"] if isinstance(argument, TensorArgument) else None
        if value is None or not value.shape or isinstance(value.shape[0], int):
            continue
        bounds = exported.range_constraints.get(value.shape[0].node.expr)
        if bounds is not None and bounds.upper.is_Integer and bounds.upper < _FREE:
            highest = min(highest or _FREE, int(bounds.upper))
    return highest

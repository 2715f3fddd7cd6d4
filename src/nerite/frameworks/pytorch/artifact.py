"""Finds the model of a version, derives its plan from the configuration, and compares that with the program.

The kind of a model follows from the content of its file, not from its name: all four kinds are zip archives or
pickles, and PyTorch's own errors for a file that is opened as the wrong kind do not help.
"""

from __future__ import annotations

import enum
import json
import logging
import os
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final, NamedTuple

from nerite.backends.arrays.graph import GraphTensor, check_datatype, check_dims, check_optional, scattered_outputs
from nerite.backends.configuration import (
    all_inputs,
    all_outputs,
    batching,
    control_inputs,
    flag,
    instance_cores,
    instance_count,
    model_dims,
    placed,
    state_inputs,
    state_outputs,
    thread_count,
)
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.core import tensor as dtypes
from nerite.core.errors import Internal, InvalidArgument, Unavailable
from nerite.core.tensor import DataType
from nerite.devices import cuda
from nerite.frameworks.pytorch.program import Program, TensorPath, TensorSlot

_EXPORT: Final = "torch.export.save(torch.export.export(model.eval(), (example,)), 'model.pt2')"
_ZIP: Final = b"PK"
"""First bytes of a zip archive."""
_PICKLE: Final = b"\x80"
PYTHON: Final = "model.py"
_SAFETENSORS: Final = ".safetensors"


class ProgramKind(Enum):
    """Kind of model that a file holds."""

    TORCHSCRIPT = enum.auto()
    EXPORTED = enum.auto()
    COMPILED = enum.auto()
    PYTHON = enum.auto()


_KIND_NAMES: Final = {
    ProgramKind.TORCHSCRIPT: "TorchScript",
    ProgramKind.EXPORTED: "an exported program",
    ProgramKind.COMPILED: "a compiled package",
}


class TorchArtifact(NamedTuple):
    """Model file of a version."""

    kind: ProgramKind
    path: Path
    modified_ns: int
    """Modification time, so that programs read from an older file differ."""
    weights: Path | None = None
    """Weights of a module in Python."""


def find_artifact(context: ModelContext) -> TorchArtifact:
    """Return the model file of a version.

    Raises ``Unavailable`` if it is missing and ``Internal`` for a file that cannot be a model, with what it is instead.
    """
    directory = context.version_directory
    wanted = str(context.config.get("default_model_filename") or "model.pt")
    code = directory / PYTHON
    if wanted.endswith(".py"):
        code = directory / wanted
    elif context.config.get("runtime") != PYTHON or not code.exists():
        path = _existing(directory, wanted)
        if path is not None and (kind := _kind(context.name, path, code)) is not ProgramKind.PYTHON:
            return TorchArtifact(kind, path, path.stat().st_mtime_ns)
    if not code.exists():
        raise Unavailable(
            f"unable to find '{directory / wanted}' for model instance '{context.name}'. There may be model.pt "
            "(TorchScript), model.pt2 (torch.export, AOTInductor), or model.py with its weights in model.safetensors "
            "or model.pt"
        )
    named = directory / wanted
    weights = named if named.suffix == _SAFETENSORS else _weights(code)
    if weights is not None and (kind := _kind(context.name, weights, code)) is not ProgramKind.PYTHON:
        raise Internal(
            f"failed to load model '{context.name}': '{weights}' is {_KIND_NAMES[kind]}, and stands where the weights "
            f"of '{code}' belong. Write them with torch.save(model.state_dict(), '{weights.name}')"
        )
    return TorchArtifact(ProgramKind.PYTHON, code, code.stat().st_mtime_ns, weights)


def _existing(directory: Path, wanted: str) -> Path | None:
    # A configuration without a file name is completed with model.pt, whichever of the two exists.
    names = [wanted, "model.pt2"] if wanted == "model.pt" else [wanted]
    return next((path for name in names if (path := directory / name).is_file()), None)


def _weights(code: Path) -> Path | None:
    """Return the file with the weights of a module: the one with its name."""
    return next((path for suffix in (_SAFETENSORS, ".pt") if (path := code.with_suffix(suffix)).is_file()), None)


def _kind(model: str, path: Path, code: Path) -> ProgramKind:
    """Return the kind of ``path``: PYTHON for weights if ``code`` exists. Raises ``Internal``."""
    head = f"failed to load model '{model}': '{path}'"
    if path.suffix == _SAFETENSORS:
        return _only_weights(head, code)
    with path.open("rb") as file:
        magic = file.read(2)
    if magic.startswith(_PICKLE):
        return _only_weights(head, code)
    if magic != _ZIP:
        raise Internal(
            f"{head} is no file of PyTorch's: TorchScript and exported programs are zip archives. Write one with "
            f"{_EXPORT}"
        )
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError) as error:
        raise Internal(f"{head} is damaged or was cut off ({error}). Copy it once more") from error
    kind = _by_content(names)
    if kind is None:
        raise Internal(f"{head} is a zip archive, but not one of PyTorch's. Write it with {_EXPORT}")
    return _only_weights(head, code) if kind is ProgramKind.PYTHON else kind


def _by_content(names: Sequence[str]) -> ProgramKind | None:
    """Return the kind of an archive by the names of its files, which are in one folder of any name."""
    inner = [name.partition("/")[2] if "/" in name else name for name in names]
    if any(name.startswith("data/aotinductor/") for name in inner):
        return ProgramKind.COMPILED
    if any(name.startswith("models/") for name in inner) or "serialized_exported_program.json" in names:
        return ProgramKind.EXPORTED
    if "constants.pkl" in inner and any(name.startswith("code/") for name in inner):
        return ProgramKind.TORCHSCRIPT
    return ProgramKind.PYTHON if "data.pkl" in inner else None


def _only_weights(head: str, code: Path) -> ProgramKind:
    if code.exists():
        return ProgramKind.PYTHON
    raise Internal(
        f"{head} holds weights or a pickled module, and no program that could be run without its Python code. Write a "
        f"program with {_EXPORT}, or put the module's class into '{code}'"
    )


# Comparing a configuration with a program. Pure.


def check_against_program(
    name: str,
    config: Mapping[str, Any],
    program: Program,
    inputs: Mapping[str, TensorSlot],
    outputs: Mapping[str, TensorSlot],
) -> None:
    """Raise ``NeriteError`` for the first difference between ``config`` and the program.

    ``inputs`` and ``outputs`` are by the configuration's names; empty if the program does not know them.
    """
    max_batch_size = int(config.get("max_batch_size", 0))
    if program.highest_batch is not None and max_batch_size > program.highest_batch:
        raise InvalidArgument(
            f"unable to load model '{name}', max_batch_size is {max_batch_size}, and the program was exported for "
            f"batches of up to {program.highest_batch}. Set max_batch_size: {program.highest_batch}, or export it with "
            "a larger maximum"
        )
    for entry in config.get("input", ()):
        check_optional(name, entry, max_batch_size)
        _check_entry(name, entry, inputs.get(entry["name"]), "input", max_batch_size)
    for entry in control_inputs(config):
        if (slot := inputs.get(entry["name"])) and (tensor := slot.as_tensor(entry["name"])):
            check_datatype(name, entry, tensor, "sequence control")
    for entry in state_inputs(config):
        _check_entry(name, entry, inputs.get(entry["name"]), "input state", max_batch_size)
    scattered = scattered_outputs(config)
    for entry in config.get("output", ()):
        if entry["name"] not in scattered:
            _check_entry(name, entry, outputs.get(entry["name"]), "output", max_batch_size)
    for entry in state_outputs(config):
        _check_entry(name, entry, outputs.get(entry["name"]), "output state", max_batch_size)


def _check_entry(name: str, entry: Mapping[str, Any], slot: TensorSlot | None, side: str, max_batch_size: int) -> None:
    if entry["data_type"] == "TYPE_STRING":
        _check_text(name, entry, slot, side, max_batch_size)
        return
    if slot is None:
        return
    if slot.text:
        raise InvalidArgument(
            f"unable to load model '{name}', configuration expects datatype {entry['data_type']} for {side} "
            f"'{entry['name']}', model provides a list of strings. Set data_type: TYPE_STRING"
        )
    tensor = slot.as_tensor(entry["name"])
    if tensor is not None:
        check_datatype(name, entry, tensor, side)
        if not entry.get("allow_ragged_batch"):
            exact = side == "output"
            check_dims(name, entry, _as_free(tensor, entry) if exact else tensor, max_batch_size, exact=exact)


def _as_free(tensor: GraphTensor, entry: Mapping[str, Any]) -> GraphTensor:
    """Return an output whose dimensions are free where the configuration declares them free, which is harmless."""
    declared = model_dims(entry)
    fixed = len(tensor.dims) - len(declared)
    loose = [-1 if want == -1 else have for have, want in zip(tensor.dims[fixed:], declared, strict=False)]
    return tensor._replace(dims=(*tensor.dims[:fixed], *loose)) if fixed in (0, 1) else tensor


def _check_text(name: str, entry: Mapping[str, Any], slot: TensorSlot | None, side: str, max_batch_size: int) -> None:
    if slot is not None and slot.text is False:
        provided = slot.datatype.config_name if slot.datatype else "a tensor"
        raise InvalidArgument(
            f"unable to load model '{name}', configuration expects datatype TYPE_STRING for {side} '{entry['name']}', "
            f"model provides {provided}. Set data_type: {provided if slot.datatype else 'that of its elements'}"
        )
    dims = model_dims(entry)
    # A configuration declares [1] for a scalar; each row of a batch is one string.
    if len(dims) + (max_batch_size > 0) > 1 and not (max_batch_size > 0 and dims == (1,)):
        raise Internal(
            f"Triton only supports 1 dimensional List of String as {side} for '{entry['name']}' for model '{name}'. "
            f"Set dims: {'[ 1 ], for one string in each row' if max_batch_size > 0 else '[ -1 ]'}"
        )


# Finding the tensor of a program for each name in the configuration. Pure.
#
# A program's own names come first, then ``<any name>__<position>``. If a name is neither, the order in the
# configuration decides for all of them, as in Triton; but never against names that the program knows, which Triton
# would swap silently.

_log = logging.getLogger("nerite.frameworks.pytorch")

_POSITION: Final = re.compile(r".*__(\d+)", re.DOTALL)


class Binding(NamedTuple):
    """Connects the names of a configuration with the tensors of a program."""

    inputs: Mapping[str, str]
    """The program's name of each input, by the configuration's, in the program's order."""
    datatypes: Mapping[str, DataType]
    """Data type of each input, by the configuration's name."""
    outputs: Sequence[str]
    """The configuration's names of the outputs."""
    paths: Mapping[str, TensorPath] | None
    """Path to each output; None if it is not known before the program has run."""


def bind_configuration(
    name: str, config: Mapping[str, Any], program: Program
) -> tuple[Binding, Mapping[str, TensorSlot], Mapping[str, TensorSlot]]:
    """Compare a configuration with a program; return the binding, and the slots of inputs and outputs.

    Raises ``NeriteError`` if they contradict each other.
    """
    datatypes = {str(entry["name"]): str(entry["data_type"]) for entry in all_inputs(config)}
    for made in config.get("batch_input", ()):
        datatypes.update(dict.fromkeys(map(str, made["target_name"]), str(made["data_type"])))
    given, returned = list(datatypes), [str(entry["name"]) for entry in all_outputs(config)]
    inputs = input_names(name, given, program.inputs) if program.inputs is not None else {}
    outputs = output_names(name, returned, program.outputs) if program.outputs is not None else {}
    check_against_program(name, config, program, inputs, outputs)
    binding = Binding(
        inputs={each: slot.name for each, slot in inputs.items()} or {each: each for each in given},
        datatypes={each: dtypes.BY_CONFIG_NAME[datatype] for each, datatype in datatypes.items()},
        outputs=returned,
        paths={each: slot.path for each, slot in outputs.items()} if program.outputs is not None else None,
    )
    return binding, inputs, outputs


def input_names(model: str, names: Sequence[str], slots: Sequence[TensorSlot]) -> dict[str, TensorSlot]:
    """Return the slot of each name, in the order of ``slots``. Raises ``InvalidArgument`` for a wrong name."""
    found = _found(model, names, slots, "input")
    used = set(found.values())
    missing = [slot.name for at, slot in enumerate(slots) if at not in used and not slot.optional]
    if missing:
        raise InvalidArgument(
            f"unable to load model '{model}', configuration expects {len(names)} inputs, model provides {len(slots)}. "
            f"The configuration lacks: {', '.join(missing)}"
        )
    return {name: slots[at] for name, at in sorted(found.items(), key=lambda item: item[1])}


def output_names(model: str, names: Sequence[str], slots: Sequence[TensorSlot]) -> dict[str, TensorSlot]:
    """Return the slot of each name. Raises ``InvalidArgument`` for a wrong one."""
    return {name: slots[at] for name, at in _found(model, names, slots, "output").items()}


def _found(model: str, names: Sequence[str], slots: Sequence[TensorSlot], side: str) -> dict[str, int]:
    known = {alias: at for at, slot in reversed(list(enumerate(slots))) for alias in (*slot.aliases, slot.name)}
    found = {name: at for name in names if (at := _position(name, known)) is not None}
    for name, at in found.items():
        if at >= len(slots):
            raise InvalidArgument(
                f"The {side} {name} in the model configuration refers to an {side} index which doesn't exist. This "
                f"model has {len(slots)} {side}s: {_listed(slots)}"
            )
    unknown = [name for name in names if name not in found]
    if unknown:
        if len(names) > len(slots) or any(found.get(name, at) != at for at, name in enumerate(names)):
            raise InvalidArgument(
                f"unexpected inference {side} '{unknown[0]}', allowed {side}s are: {_listed(slots)}, or "
                f"{side.upper()}__0 and so on"
            )
        _log.warning(
            "%s '%s' or previous %s(s) of the model '%s' are neither among its names nor do they follow the "
            "<name>__<index> naming convention. Falling back to enforcing strict ordering from model configuration.",
            side,
            unknown[0],
            side,
            model,
        )
        return {name: at for at, name in enumerate(names)}
    first: dict[int, str] = {}
    for name, at in found.items():
        if (other := first.setdefault(at, name)) != name:
            raise InvalidArgument(f"model '{model}': {side}s '{other}' and '{name}' are the same: '{slots[at].name}'")
    return found


def _position(name: str, known: Mapping[str, int]) -> int | None:
    if name in known:
        return known[name]
    matched = _POSITION.fullmatch(name)
    return int(matched[1]) if matched else None


def _listed(slots: Sequence[TensorSlot]) -> str:
    return ", ".join(slot.name for slot in slots)


# Plans, derived from the configuration.
#
# Threads: by default PyTorch uses every core for each operation, and its threads spin while they wait. In a server they
# share the cores with other instances and with the event loop, so an instance gets its share of the cores, and threads
# do not spin (``program``), unless the configuration says otherwise.

_OPTIONS: Final = "options of torch.compile as a JSON object"
_SWITCHES: Final = ("ENABLE_JIT_EXECUTOR", "ENABLE_JIT_PROFILING", "ENABLE_TENSOR_FUSER")


@dataclass(frozen=True)
class TorchPlan:
    """Options of a model from its configuration, and its file."""

    artifact: TorchArtifact
    inference_mode: bool
    optimized: bool
    cudnn: bool
    clean_cache: bool
    share: bool | None
    """Whether instances on one device share a program; None: if that is safe and pays."""
    threads: int
    """Threads within an operation; 0: the instance's share of the cores."""
    inter_op_threads: int
    """Threads between operations of TorchScript; 0: PyTorch's default."""
    switches: tuple[tuple[str, bool], ...]
    """Parameters that enable or disable parts of TorchScript's executor."""
    compile: str | None
    """Options of ``torch.compile``, as JSON; None to run uncompiled."""
    model_class: str
    """Class of a module in Python; empty for the only one."""
    batching: bool
    instances: int
    """Number of instances on all devices."""


def make_plan(context: ModelContext) -> TorchPlan:
    """Return the plan of a model. Raises ``InvalidArgument`` for an invalid parameter, and as ``find_artifact``."""
    return TorchPlan(
        artifact=find_artifact(context),
        inference_mode=flag(context, "INFERENCE_MODE", default=True),
        optimized=not flag(context, "DISABLE_OPTIMIZED_EXECUTION", default=False),
        cudnn=not flag(context, "DISABLE_CUDNN", default=False),
        clean_cache=flag(context, "ENABLE_CACHE_CLEANING", default=False),
        share=weight_sharing(context),
        threads=_count(context, "INTRA_OP_THREAD_COUNT", "NUM_THREADS"),
        inter_op_threads=_count(context, "INTER_OP_THREAD_COUNT", "NUM_INTEROP_THREADS"),
        switches=tuple((key, flag(context, key, default=True)) for key in _SWITCHES if context.parameter(key)),
        compile=_compile_options(context),
        model_class=context.parameter("MODEL_CLASS"),
        batching=batching(context.config),
        instances=instance_count(context.config),
    )


def weight_sharing(context: ModelContext) -> bool | None:
    """Return the parameter for sharing weights between instances; None if it is not set."""
    key = "ENABLE_WEIGHT_SHARING"
    return flag(context, key, default=False) if context.parameter(key) else None


def threads(plan: TorchPlan, context: ModelContext, instance: InstanceContext) -> int:
    """Return the number of threads of an instance: the model's, the environment's, or its share of the cores."""
    if plan.threads > 0:
        return plan.threads
    if (wanted := os.environ.get("OMP_NUM_THREADS", "")).isdecimal():
        return max(1, int(wanted))
    return instance_cores(context, instance)


def device_name(instance: InstanceContext) -> str:
    """Return PyTorch's name of an instance's device; empty if the model chooses its own."""
    if instance.kind == "GPU":
        return f"cuda:{instance.device}" if cuda.FRAMEWORK_DEVICE == "cuda" else cuda.FRAMEWORK_DEVICE
    return "" if instance.kind == "MODEL" else "cpu"


def _count(context: ModelContext, key: str, other: str) -> int:
    """Return a number of threads; ``other`` is Triton's name of the parameter for models in Python."""
    key = other if context.parameter(other) and not context.parameter(key) else key
    return max(0, thread_count(context, key))


def _compile_options(context: ModelContext) -> str | None:
    key = "TORCH_COMPILE_OPTIONAL_PARAMETERS"
    text = context.parameter(key)
    if not text:
        return None
    try:
        options = json.loads(text)
    except ValueError as error:
        raise placed(InvalidArgument(str(error)), context, key, _OPTIONS) from None
    if not isinstance(options, dict):
        raise placed(InvalidArgument(f"{text} is no object"), context, key, _OPTIONS)
    if "model" in options:
        raise InvalidArgument("'model' is not an optional parameter for 'torch.compile'")
    return None if options.get("disable") is True else json.dumps(options, sort_keys=True)

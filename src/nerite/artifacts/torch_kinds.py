"""Recognisers for PyTorch: torch.export and AOTInductor archives, checkpoints, TorchScript and safetensors."""

from __future__ import annotations

import ast
import struct
from pathlib import Path
from typing import Any, NoReturn

from nerite.artifacts import readers
from nerite.artifacts.artifact import Artifact, Candidate, Unusable, cut_off
from nerite.config.model_config import ModelConfig, ModelParameter
from nerite.core.bounded_files import json_of

_GRAPHS = ("models/model.json", "serialized_exported_program.json")
"""Member that holds the graph: in current archives, and in those of torch before 2.8."""


def recognise_exported_program(candidate: Candidate) -> Artifact | None:
    """Recognise an archive of ``torch.export`` (a graph) or AOTInductor (compiled code)."""
    members = candidate.members
    compiled = any(name.startswith("data/aotinductor/") and name.endswith(".so") for name in members)
    exported = any(name in members for name in _GRAPHS) or (
        "archive_format" in members and any(name.startswith("models/") for name in members)
    )
    if not compiled and not exported:
        return None
    kind = "AOTInductor package" if compiled else "exported PyTorch program"
    remarks = ("It runs only on machines like the one that it was compiled on.",) if compiled else ()
    config = ModelConfig(backend="pytorch", platform="torch_aoti")
    return candidate.artifact(kind, config, {"model.pt2": candidate.path}, *remarks)


# ``torch.save`` writes weights, or a whole module as a pickle. Neither is a program; the error says how to export one.

_OLD = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""First bytes of files written by torch before 1.6."""
_BUILDING_BLOCKS = ("collections.", "torch.", "numpy.", "builtins.", "__builtin__.", "_codecs.")
_MODULES = "torch.nn.modules."
_EXPORT = "torch.export.save(torch.export.export(module.eval(), (example_input,)), 'model.pt2')"


def recognise_torch_checkpoint(candidate: Candidate) -> Artifact | None:
    """Reject files written by ``torch.save``."""
    if "data.pkl" in candidate.members and not any(name.startswith("code/") for name in candidate.members):
        _refuse(candidate, readers.pickle_names(candidate.member("data.pkl")))
    if candidate.head.startswith(_OLD):
        _refuse(candidate, readers.pickle_names(candidate.head[len(_OLD) :]))
    return None


def _refuse(candidate: Candidate, names: list[str]) -> NoReturn:
    own = [name for name in names if name.startswith(_MODULES) or not name.startswith(_BUILDING_BLOCKS)]
    if own:
        raise Unusable(
            candidate.path,
            f"this is a pickled module (of the class {own[0]}), which only the program that made it can load",
            f"Load it there, and export a program: {_EXPORT}",
        )
    raise Unusable(
        candidate.path,
        "these are weights (a state_dict), without their module",
        f"Load them into their module, and export a program: {_EXPORT}",
    )


def recognise_torchscript(candidate: Candidate) -> Artifact | None:
    """Recognise a TorchScript archive, which contains its code and runs without the original Python program."""
    members = candidate.members
    if "data.pkl" not in members or not any(name.startswith("code/") for name in members):
        return None
    config = ModelConfig(backend="pytorch", platform="pytorch_libtorch")
    return candidate.artifact("TorchScript program", config, {"model.pt": candidate.path})


_LENGTH = struct.Struct("<Q")
_LONGEST_HEADER = 100_000_000


def recognise_safetensors(candidate: Candidate) -> Artifact | None:
    """Recognise safetensors weights with the Python class that they belong to. Rejects weights without a class."""
    path = candidate.path
    header = _header(candidate)
    if header is None:
        if candidate.suffix == ".safetensors":
            remedy = "Write it again: safetensors.torch.save_file(module.state_dict(), 'model.safetensors')"
            raise Unusable(path, "this is not a safetensors file: its header is invalid", remedy)
        return None
    end = max((tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"), default=0)
    missing = _LENGTH.size + _LENGTH.unpack_from(candidate.head)[0] + end - candidate.size
    if missing > 0:
        raise cut_off(path, f"{missing:,} bytes are missing")
    if not candidate.class_place:
        raise Unusable(
            path,
            "these are weights, without their module",
            "Specify its class: --class module.py:ClassName. Or export a program: "
            "torch.export.save(torch.export.export(module.eval(), (example_input,)), 'model.pt2')",
        )
    code = _code(candidate.class_place)
    files = {"model.py": code, "model.safetensors": path}
    own = ModelParameter(string_value=candidate.class_place.rpartition(":")[2])
    config = ModelConfig(backend="pytorch", parameters={"MODEL_CLASS": own})
    return candidate.artifact("PyTorch module with its weights", config, files)


def _header(candidate: Candidate) -> dict[str, Any] | None:
    head = candidate.head
    if len(head) < _LENGTH.size + 2 or head[_LENGTH.size : _LENGTH.size + 1] != b"{":
        return None
    (length,) = _LENGTH.unpack_from(head)
    if length > _LONGEST_HEADER:
        return None
    with candidate.path.open("rb") as file:
        text = file.read(_LENGTH.size + length)[_LENGTH.size :]
    if len(text) < length:
        raise cut_off(candidate.path, f"{length - len(text):,} bytes of its header are missing")
    try:
        header = json_of(text)
    except ValueError:
        return None
    whole = isinstance(header, dict) and all(
        name == "__metadata__" or (isinstance(tensor, dict) and len(tensor.get("data_offsets", ())) == 2)
        for name, tensor in header.items()
    )
    return header if whole else None


def _code(place: str) -> Path:
    """Return the file of the class that ``FILE.py:CLASS`` names. Raises ``Unusable`` if the class does not exist."""
    file, _, name = place.rpartition(":")
    path = Path(file)
    if not path.is_file() or not name:
        raise Unusable(Path(place), "no such class", "Write --class FILE.py:CLASS, with an existing file.")
    classes = [node.name for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.ClassDef)]
    if name not in classes:
        raise Unusable(path, f"the file has no class {name}", f"Classes in it: {', '.join(classes) or 'none'}.")
    return path

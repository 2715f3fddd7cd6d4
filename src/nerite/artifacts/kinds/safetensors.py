"""Weights in safetensors, with the Python class that they belong to."""

from __future__ import annotations

import ast
import json
import struct
from pathlib import Path
from typing import Any

from nerite.artifacts.artifact import Artifact, Unusable
from nerite.artifacts.candidate import Candidate, cut_off
from nerite.config.model_config import ModelConfig, ModelParameter

_LENGTH = struct.Struct("<Q")
_LONGEST_HEADER = 100_000_000


def recognise(candidate: Candidate) -> Artifact | None:
    """Return weights with their class. Refuses weights alone."""
    path = candidate.path
    header = _header(candidate)
    if header is None:
        if candidate.suffix == ".safetensors":
            remedy = "Write it again: safetensors.torch.save_file(module.state_dict(), 'model.safetensors')"
            raise Unusable(path, "this is no safetensors file: its header is not what it should be", remedy)
        return None
    end = max((tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"), default=0)
    missing = _LENGTH.size + _LENGTH.unpack_from(candidate.head)[0] + end - candidate.size
    if missing > 0:
        raise cut_off(path, f"{missing:,} bytes are missing")
    if not candidate.class_place:
        raise Unusable(
            path,
            "these are weights, without the module that they belong to",
            "Name its class: --class module.py:ClassName. Or export a program: "
            "torch.export.save(torch.export.export(module.eval(), (example_input,)), 'model.pt2')",
        )
    code = _code(candidate.class_place)
    files = {"model.py": code, "model.safetensors": path}
    own = ModelParameter(string_value=candidate.class_place.rpartition(":")[2])
    config = ModelConfig(backend="pytorch", parameters={"MODEL_CLASS": own})
    return Artifact("PyTorch module with its weights", path, candidate.name, config, files)


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
        header = json.loads(text)
    except ValueError:
        return None
    whole = isinstance(header, dict) and all(
        name == "__metadata__" or (isinstance(tensor, dict) and len(tensor.get("data_offsets", ())) == 2)
        for name, tensor in header.items()
    )
    return header if whole else None


def _code(place: str) -> Path:
    """Return the file of the class that ``FILE.py:CLASS`` names. Raises ``Unusable``."""
    file, _, name = place.rpartition(":")
    path = Path(file)
    if not path.is_file() or not name:
        raise Unusable(Path(place), "there is no such class", "Write --class FILE.py:CLASS, with a file that is there.")
    classes = [node.name for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.ClassDef)]
    if name not in classes:
        raise Unusable(path, f"there is no class {name} in it", f"The classes in it: {', '.join(classes) or 'none'}.")
    return path

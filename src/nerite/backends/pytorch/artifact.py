"""Which file of a version is its model, and what kind of model that is: the content decides, not the name.

PyTorch has one way to write files and four kinds of content: an archive that is not a program looks like one from
outside, and what PyTorch says when it is opened as the wrong kind helps nobody.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Final, NamedTuple

from nerite.backends.interface import ModelContext
from nerite.core.errors import Internal, Unavailable

_EXPORT: Final = "torch.export.save(torch.export.export(model.eval(), (example,)), 'model.pt2')"
_MAGIC: Final = b"PK"
"""Of a zip archive."""
_PICKLE: Final = b"\x80"
PYTHON: Final = "model.py"
_SAFETENSORS: Final = ".safetensors"


class Kind(Enum):
    """What a file holds; the value says where it is opened."""

    TORCHSCRIPT = "torchscript"
    EXPORTED = "exported"
    COMPILED = "inductor"
    PYTHON = "eager"


_SPOKEN: Final = {
    Kind.TORCHSCRIPT: "TorchScript",
    Kind.EXPORTED: "an exported program",
    Kind.COMPILED: "a compiled package",
}


class Artifact(NamedTuple):
    """The model of a version."""

    kind: Kind
    path: Path
    modified_ns: int
    """Of the file, so that what was read from an older one is not taken for this one."""
    weights: Path | None = None
    """Of a module that is written in Python."""


def find(context: ModelContext) -> Artifact:
    """Return the model of a version.

    Raises ``Unavailable`` where there is none and ``Internal`` for a file that cannot be one, with what it is instead.
    """
    directory = context.version_directory
    wanted = str(context.config.get("default_model_filename") or "model.pt")
    code = directory / PYTHON
    if wanted.endswith(".py"):
        code = directory / wanted
    elif context.config.get("runtime") != PYTHON or not code.exists():
        path = _existing(directory, wanted)
        if path is not None and (kind := _kind(context.name, path, code)) is not Kind.PYTHON:
            return Artifact(kind, path, path.stat().st_mtime_ns)
    if not code.exists():
        raise Unavailable(
            f"unable to find '{directory / wanted}' for model instance '{context.name}'. There may be model.pt "
            "(TorchScript), model.pt2 (torch.export, AOTInductor), or model.py with its weights in model.safetensors "
            "or model.pt"
        )
    named = directory / wanted
    weights = named if named.suffix == _SAFETENSORS else _weights(code)
    if weights is not None and (kind := _kind(context.name, weights, code)) is not Kind.PYTHON:
        raise Internal(
            f"failed to load model '{context.name}': '{weights}' is {_SPOKEN[kind]}, and stands where the weights of "
            f"'{code}' belong. Write them with torch.save(model.state_dict(), '{weights.name}')"
        )
    return Artifact(Kind.PYTHON, code, code.stat().st_mtime_ns, weights)


def _existing(directory: Path, wanted: str) -> Path | None:
    # A configuration that names the backend alone is completed with model.pt, whichever of the two is there.
    names = [wanted, "model.pt2"] if wanted == "model.pt" else [wanted]
    return next((path for name in names if (path := directory / name).is_file()), None)


def _weights(code: Path) -> Path | None:
    """Return the weights beside a module: those of its name."""
    return next((path for suffix in (_SAFETENSORS, ".pt") if (path := code.with_suffix(suffix)).is_file()), None)


def _kind(model: str, path: Path, code: Path) -> Kind:
    """Return what ``path`` holds; PYTHON for weights with ``code`` beside them."""
    head = f"failed to load model '{model}': '{path}'"
    if path.suffix == _SAFETENSORS:
        return _only_weights(head, code)
    with path.open("rb") as file:
        magic = file.read(2)
    if magic.startswith(_PICKLE):
        return _only_weights(head, code)
    if magic != _MAGIC:
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
    return _only_weights(head, code) if kind is Kind.PYTHON else kind


def _by_content(names: Sequence[str]) -> Kind | None:
    """Return the kind of an archive with these files, which lie in one folder of any name."""
    inner = [name.partition("/")[2] if "/" in name else name for name in names]
    if any(name.startswith("data/aotinductor/") for name in inner):
        return Kind.COMPILED
    if any(name.startswith("models/") for name in inner) or "serialized_exported_program.json" in names:
        return Kind.EXPORTED
    if "constants.pkl" in inner and any(name.startswith("code/") for name in inner):
        return Kind.TORCHSCRIPT
    return Kind.PYTHON if "data.pkl" in inner else None


def _only_weights(head: str, code: Path) -> Kind:
    if code.exists():
        return Kind.PYTHON
    raise Internal(
        f"{head} holds weights or a pickled module, and no program that could be run without its Python code. Write a "
        f"program with {_EXPORT}, or put the module's class into '{code}'"
    )

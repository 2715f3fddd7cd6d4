"""The model repositories of the scenes. Each module is one: ``MODELS`` maps the name of a model to its files.

Repositories are written where a server needs them. ``models/`` has the programs of the Python models, each of which
several models may run; ``archives/`` has what is loaded through SageMaker's port.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from pathlib import Path

Files = Mapping[str, str | bytes]
"""Contents by path below the model's directory. A path that ends with a slash is an empty directory."""

HERE = Path(__file__).parent
ARCHIVES = HERE / "archives"
_TENSOR = re.compile(r"(\S+) (\S+)((?: -?\d+)+) ?(.*)")


def repository(name: str) -> Mapping[str, Files]:
    """Return the models of a repository by name; of one that a test has made, ``name`` is its path."""
    if Path(name).is_absolute():
        return {model.name: _files(model) for model in Path(name).iterdir()}
    models: Mapping[str, Files] = importlib.import_module(f"conformance.repositories.{name}").MODELS
    return models


def _files(model: Path) -> Files:
    return {str(path.relative_to(model)): path.read_bytes() for path in model.rglob("*") if path.is_file()}


def write(files: Files, directory: Path) -> None:
    """Write the files of a model, or of one of its versions, below ``directory``."""
    for name, content in files.items():
        path = directory / name
        if name.endswith("/"):
            path.mkdir(parents=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def source(name: str) -> str:
    """Return the text of a program in ``models/``."""
    return (HERE / "models" / f"{name}.py").read_text()


def python(program: str, inputs: str, outputs: str, more: str = "", batch: int = 0) -> dict[str, str | bytes]:
    """Return the files of a Python model that runs a program of ``models/``; ``more`` is added to its configuration.

    A tensor is described as ``NAME TYPE DIMENSIONS``, with further fields after that; semicolons separate tensors.
    """
    return {"config.pbtxt": config('backend: "python"', inputs, outputs, more, batch), "1/model.py": source(program)}


def ensemble(inputs: str, outputs: str, *steps: str, batch: int = 0) -> Files:
    """Return the files of an ensemble; for the tensors see ``python``."""
    scheduling = f"ensemble_scheduling {{ step [ {', '.join(steps)} ] }}"
    return {"config.pbtxt": config('platform: "ensemble"', inputs, outputs, scheduling, batch), "1/": ""}


def step(model: str, inputs: Mapping[str, str], outputs: Mapping[str, str], version: int = -1) -> str:
    """Return a step of an ensemble: names of the model's tensors, each with its name in the ensemble."""
    maps = [
        f'{kind}_map {{ key: "{name}" value: "{of_ensemble}" }}'
        for kind, tensors in (("input", inputs), ("output", outputs))
        for name, of_ensemble in tensors.items()
    ]
    return f'{{ model_name: "{model}" model_version: {version} {" ".join(maps)} }}'


def config(head: str, inputs: str, outputs: str, more: str, batch: int) -> str:
    """Return the text of a ``config.pbtxt``."""
    lines = [head, f"max_batch_size: {batch}", f"input [ {tensors(inputs)} ]", f"output [ {tensors(outputs)} ]", more]
    return "\n".join(lines) + "\n"


def tensors(described: str) -> str:
    """Return the tensors of a description as they stand in a configuration."""
    found = []
    for each in described.split("; "):
        parts = _TENSOR.fullmatch(each)
        assert parts is not None, each
        name, datatype, dims, more = parts.groups()
        found.append(f'{{ name: "{name}" data_type: TYPE_{datatype} dims: [ {", ".join(dims.split())} ] {more} }}')
    return ", ".join(found)

"""Small models for PyTorch, of each kind, opened without a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import opened
from configs import as_backends_get_it
from nerite.backends.interface import ModelContext
from nerite.frameworks.pytorch import PyTorchBackend
from nerite.frameworks.pytorch.program import load_torch, quiet

load_torch()


class AddSub(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a + b, a - b


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((4,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def script(directory: Path, module: nn.Module, name: str = "model.pt", version: int = 1) -> Path:
    """Write TorchScript."""
    path = _place(directory, name, version)
    with quiet:
        torch.jit.script(module).save(str(path))
    return path


def export(
    directory: Path,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Any = None,
    *,
    decomposed: bool = False,
    **how: Any,
) -> Path:
    """Write an exported program. ``decomposed``: without operations in place."""
    path = _place(directory, "model.pt2", 1)
    with quiet:
        program = torch.export.export(module.eval(), args, kwargs, **how)
        torch.export.save(program.run_decompositions() if decomposed else program, path)
    return path


def export_scaled(directory: Path, **batch: int) -> Path:
    size = torch.export.Dim("batch", **batch)
    return export(directory, Scaled(), (torch.zeros(2, 4),), dynamic_shapes=({0: size},))


def python(directory: Path, code: str, name: str = "model.py") -> Path:
    """Write a module in Python."""
    path = _place(directory, name, 1)
    path.write_text(f"import torch\nfrom torch import nn\n{code}")
    return path


def _place(directory: Path, name: str, version: int) -> Path:
    path = directory / str(version) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def context(directory: Path, config: Mapping[str, Any] | None = None, **settings: str) -> ModelContext:
    return ModelContext("m", 1, directory, as_backends_get_it(config or {}), settings)


def entry(name: str, dims: Sequence[int] = (4,), datatype: str = "TYPE_FP32", **more: Any) -> dict[str, Any]:
    return {"name": name, "data_type": datatype, "dims": list(dims), **more}


def declared(inputs: Sequence[Any], outputs: Sequence[Any], batch: int = 0, **parameters: str) -> dict[str, Any]:
    """Return a configuration; inputs and outputs are entries, or names of rows of four."""
    return {
        "name": "m",
        "max_batch_size": batch,
        "input": [entry(each) if isinstance(each, str) else each for each in inputs],
        "output": [entry(each) if isinstance(each, str) else each for each in outputs],
        "parameters": {key: {"string_value": value} for key, value in parameters.items()},
    }


class Opened(opened.Opened):
    """Opened from the files in a directory."""

    def __init__(self, directory: Path, config: Mapping[str, Any] | None = None) -> None:
        super().__init__(PyTorchBackend(), context(directory, config))

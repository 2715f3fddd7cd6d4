"""What models need in an image: extras, packages, environments, and the files themselves in layers."""

from __future__ import annotations

import ast
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from nerite.artifacts.artifact import size_of
from nerite.backends import registry
from nerite.backends.python.environments import is_requirements
from nerite.config.loading import PolledModel, poll_model_directory
from nerite.config.model_config import ModelConfig
from nerite.core.errors import InvalidArgument
from nerite.repository.repositories import LocalRepository
from nerite.tools.image.dockerfile import CopyStep
from nerite.tools.image.entry import MODELS

BACKENDS: Final = "/opt/tritonserver/backends"
"""Backend directory in the image, as the server's default has it."""
LARGE: Final = 16_000_000
"""A version directory of this many bytes becomes a layer of its own, so that a new configuration does not ship it."""
MAX_LAYERS: Final = 100
"""Container engines accept 127 layers, and the image below has some."""
_ENVIRONMENT: Final = "EXECUTION_ENV_PATH"
_PROVIDED: Final = frozenset({"numpy", "triton_python_backend_utils", "c_python_backend_utils", "nerite", "orjson"})


@dataclass(slots=True)
class ImageNeeds:
    """What the models in some repositories need."""

    extras: set[str] = field(default_factory=set)
    packages: set[str] = field(default_factory=set)
    environments: bool = False
    uv: bool = False
    large: list[CopyStep] = field(default_factory=list)
    small: list[CopyStep] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def copies(self) -> tuple[CopyStep, ...]:
        """All layers, the large ones first."""
        return (*self.large, *self.small)


def needs_of(repositories: Sequence[Path], context: Path, backends: str) -> ImageNeeds:
    """Return what the models in local repositories need. ``backends`` is the directory of backends in Python.

    Raises ``InvalidArgument`` with all places that the image could not have or read.
    """
    needs = ImageNeeds()
    wrong: list[str] = []
    for repository in repositories:
        for name in LocalRepository(str(repository)).models():
            directory = repository / name
            wrong += _unusable(directory, repository)
            _add_layers(needs, directory, context)
            _add_needs(needs, poll_model_directory(directory), context, backends)
    if wrong:
        raise InvalidArgument("\n".join(wrong))
    if len(needs.copies) > MAX_LAYERS:
        raise InvalidArgument(
            f"the image would have {len(needs.copies)} layers with models, and container engines accept about "
            f"{MAX_LAYERS}. Make several images, each with a part of the repository."
        )
    return needs


def path_in(context: Path, path: Path) -> str:
    """Return the path of a file as ``COPY`` has it. Raises ``InvalidArgument`` if it is outside the build context."""
    try:
        return path.resolve().relative_to(context.resolve()).as_posix()
    except ValueError:
        raise InvalidArgument(
            f"'{path}' is outside of the build context '{context}', so COPY cannot reach it. Run this in a directory "
            "that contains it, or name that directory: --context DIRECTORY"
        ) from None


def _add_needs(needs: ImageNeeds, polled: PolledModel, context: Path, backends: str) -> None:
    config = registry.filled_in(polled.config, backends)
    entry = registry.ENTRIES.get(config.backend)
    if entry is None and config.backend:
        _add_custom_backend(needs, config.backend, context, backends)
    parameter = config.parameters.get(_ENVIRONMENT)
    if parameter is not None and parameter.string_value:
        needs.environments = True
        path = Path(parameter.string_value)
        needs.uv |= is_requirements(path) and path.name == "uv.lock"
        return
    if entry is not None and entry.extra:
        needs.extras.add(entry.extra)
    if config.backend in registry.GENERATING:
        needs.extras.add("openai")  # chat templates
        needs.environments = True  # of the engine, and of converted checkpoints
    if config.backend == "python":
        needs.remarks += _unknown_imports(polled, config)


def _add_custom_backend(needs: ImageNeeds, name: str, context: Path, backends: str) -> None:
    if (code := registry.backend_code(backends, name)) is not None:
        step = CopyStep((path_in(context, code.parent),), f"{BACKENDS}/{name}")
        if step not in needs.small:
            needs.small.append(step)
    elif package := registry.package_of(name):
        needs.packages.add(package)


def _unknown_imports(polled: PolledModel, config: ModelConfig) -> Iterator[str]:
    """Yield a remark for each package that a Python model imports and that the image may not have."""
    for version in polled.versions:
        file = polled.directory / str(version) / (config.default_model_filename or "model.py")
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue  # reported by nerite check
        beside = {path.stem for folder in (file.parent, polled.directory) for path in folder.iterdir()}
        for node in tree.body:
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom) and not node.level
                else []
            )
            for package in {name.partition(".")[0] for name in names} - {""}:
                if package not in _PROVIDED and package not in sys.stdlib_module_names and package not in beside:
                    yield (
                        f"{file}:{node.lineno}: imports '{package}'. If the image does not have it, install it with "
                        "--package, or give the model a requirements.txt (docs/environments.md)."
                    )


def _add_layers(needs: ImageNeeds, directory: Path, context: Path) -> None:
    """Add the layers of a model: its large versions one by one, and the rest of it."""
    source, target = path_in(context, directory), f"{MODELS}/{directory.name}"
    entries = sorted(directory.iterdir())
    large = [entry for entry in entries if entry.is_dir() and entry.name.isdecimal() and size_of(entry) >= LARGE]
    if not large:
        needs.small.append(CopyStep((source,), target))
        return
    for entry in entries:
        if entry.is_dir():
            layers = needs.large if entry in large else needs.small
            layers.append(CopyStep((f"{source}/{entry.name}",), f"{target}/{entry.name}"))
    if files := tuple(f"{source}/{entry.name}" for entry in entries if not entry.is_dir()):
        needs.small.append(CopyStep(files, f"{target}/"))


def _unusable(directory: Path, repository: Path) -> Iterator[str]:
    """Yield what is wrong with files of a model: links that lead out of the repository, and missing permissions."""
    root = repository.resolve()
    for folder, folders, files in os.walk(directory):
        for name in (*folders, *files):
            path = Path(folder, name)
            if path.is_symlink():
                if os.path.isabs(os.readlink(path)) or not path.resolve().is_relative_to(root):
                    yield (
                        f"{path}: a symbolic link to '{os.readlink(path)}', which the image does not have. Put the "
                        "file itself there, or link to a file in the repository by a relative path."
                    )
                continue
            mode = path.stat().st_mode
            wanted = stat.S_IROTH | (stat.S_IXOTH if path.is_dir() else 0)
            if mode & wanted != wanted:
                yield (
                    f"{path}: the server in the image runs as another user, who cannot read it (mode "
                    f"{stat.S_IMODE(mode):04o}). Allow it: chmod -R a+rX '{repository}'"
                )

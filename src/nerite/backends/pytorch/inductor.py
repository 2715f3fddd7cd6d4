"""Packages that AOTInductor has compiled: machine code that knows how its inputs nest, and nothing else of them.

A library that was loaded stays in the process until that ends, as PyTorch has it built. So these models live in
workers, which end with them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path as FilePath
from typing import Any, Final

import torch

from nerite.backends.pytorch.framework import quiet, unloadable
from nerite.backends.pytorch.plan import Plan
from nerite.backends.pytorch.program import Path, Program, Slot, described, output
from nerite.core.errors import Unsupported

_CHECKS: Final = "AOTI_RUNTIME_CHECK_INPUTS"
"""Where it is not set, a compiled program computes with inputs of any shape as if they had its own, and reads beyond
their end. Checking takes less than a microsecond. Whoever wants to go without sets it to 0 for the server."""
_TOO_FEW: Final = "too small at 0, expected it to be >= 2, but got: 1"
_unpacking = threading.Lock()
_folders: dict[str, FilePath] = {}
"""Where packages were unpacked, by their content."""


def open_program(model: str, plan: Plan, device: str) -> Program:
    """Load a package. Raises ``NeriteError``."""
    os.environ.setdefault(_CHECKS, "1")
    path = plan.artifact.path
    count = plan.instances if plan.share else 1
    load = torch._C._aoti.AOTIModelPackageLoader
    try:
        with quiet, zipfile.ZipFile(path) as archive:
            name = _model_name(archive)
            if device == "cpu":
                with _unpacked(archive, path) as folder:
                    loader = load(str(folder), name, False, count, -1)
            else:
                # Code for GPUs is read when it first runs. So PyTorch unpacks it, and takes the files along at the end.
                loader = load(str(path), name, False, count, torch.device(device).index if device else -1)
    except Exception as error:  # Whatever PyTorch raises says what is wrong with the file.
        remedy = f"A package runs with the version of PyTorch that compiled it; this is {torch.__version__}"
        raise unloadable(model, error, remedy) from error
    compiled_for = loader.get_metadata().get("AOTI_DEVICE_KEY", "cpu")
    if device and torch.device(device).type != compiled_for:
        raise Unsupported(
            f"failed to load model '{model}': its package was compiled for '{compiled_for}', and its instances are to "
            f"run on '{device}'. Compile it for that, or set kind: KIND_{'CPU' if compiled_for == 'cpu' else 'GPU'}"
        )
    taken, given = (list(_leaves(json.loads(spec)[1])) for spec in loader.get_call_spec())
    return Program(
        inputs=tuple(_input(position, path) for position, path in enumerate(taken)),
        outputs=tuple(output(position, path)._replace(path=(position,)) for position, path in enumerate(given)),
        bind=lambda names: _Pairs(loader.run) if plan.batching else loader.run,
        device=device,
        # It does not say whether it does.
        keeps_state=True,
    )


class _Pairs:
    """Runs a program; a single row, which most dynamic programs refuse, in a batch of two.

    What is compiled for any number of rows takes two or more for granted. Mostly one would do, but nobody knows.
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


def _input(position: int, path: Path) -> Slot:
    side, inner = ("KWARGS" if path[0] else "ARGS"), path[1:]
    aliases = (f"{side}{described(inner)}", *([str(inner[0])] if path[0] and len(inner) == 1 else []))
    return Slot(f"INPUT__{position}", aliases)


def _leaves(spec: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the way to each tensor of a call specification."""
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
    """Give a folder with what is in a package while that is loaded: the same for the same content.

    A library that is loaded again by the same name is the one that is there, though its file is another. By other
    names, as PyTorch would have it, each load of a model takes its size in memory. The files are gone as soon as they
    are not needed any more: a worker may end without notice.
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

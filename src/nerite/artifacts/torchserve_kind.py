"""Recognises TorchServe's archives (``.mar``): their handler runs in a Python model, with all its files beside it."""

from __future__ import annotations

import ast
import importlib.util
import shutil
import stat
import zipfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from nerite.artifacts.artifact import Artifact, Candidate, Unusable, opened_archive
from nerite.config.model_config import ModelConfig, ModelDynamicBatching, ModelInput, ModelOutput
from nerite.core.bounded_files import json_of
from nerite.core.client_text import is_file_path

MANIFEST: Final = "MAR-INF/MANIFEST.json"
_PROGRAM: Final = Path(__file__).resolve().with_name("programs") / "torchserve_handler.py"
_ARCHIVE: Final = "archive"
_MAX_BATCH: Final = 8
_MOST_FILES: Final = 10_000
_LARGEST_MANIFEST: Final = 1 << 20
_LARGEST_HANDLER: Final = 4 << 20
_LARGEST: Final = 1 << 40
_RATIO: Final = 200
"""A member that unpacks to more times its size is not a model."""


def recognise_torchserve(candidate: Candidate) -> Artifact | None:
    """Recognise an archive of TorchServe. Rejects handlers that cannot run here."""
    if MANIFEST not in [candidate.member_root + name for name in candidate.members]:
        return None
    path = candidate.path
    with opened_archive(path) as archive:
        members = _checked(path, archive)
        manifest = _manifest(path, archive)
        model = manifest["model"]
        handler = str(model.get("handler") or "")
        runtime = str(manifest.get("runtime") or "python").lower()
        if not runtime.startswith("python"):
            raise Unusable(path, f"its handler needs the runtime '{runtime}'", "Only handlers in Python can be served.")
        if not handler:
            raise Unusable(path, "its manifest names no handler", "Archive it again, with --handler.")
        if not candidate.trusted:
            raise Unusable(
                path,
                f"it contains code, the handler '{handler}', which runs when the model is loaded",
                "If you trust its origin, pass --trust.",
            )
        _check_handler(path, archive, handler)
    config = ModelConfig(
        backend="python",
        max_batch_size=_MAX_BATCH,
        input=(ModelInput(name="body", data_type="TYPE_STRING", dims=(1,)),),
        output=(ModelOutput(name="prediction", data_type="TYPE_STRING", dims=(1,)),),
        dynamic_batching=ModelDynamicBatching(),
    )
    remarks = [
        f"Its handler '{handler}' runs in model.py: 'body' is what a client of TorchServe sent as the body, "
        "'prediction' what it got. Metrics that the handler records are dropped."
    ]
    if requirements := str(model.get("requirementsFile") or ""):
        remarks.append(
            f"It lists packages in {_ARCHIVE}/{requirements}: install them for the server, or name a list with "
            "EXECUTION_ENV_PATH."
        )
    return Artifact(
        "TorchServe archive",
        path,
        str(model.get("modelName") or candidate.name),
        config,
        {"model.py": _PROGRAM},
        make=partial(_unpack, path, members),
        remarks=tuple(remarks),
    )


def _manifest(path: Path, archive: zipfile.ZipFile) -> Mapping[str, Any]:
    try:
        if archive.getinfo(MANIFEST).file_size > _LARGEST_MANIFEST:
            raise ValueError("it is too long")
        manifest = json_of(archive.read(MANIFEST))
        if not isinstance(manifest, dict) or not isinstance(manifest.get("model"), dict):
            raise ValueError("it describes no model")
    except (KeyError, ValueError) as error:
        raise Unusable(path, f"its {MANIFEST} cannot be read: {error}", "Archive the model again.") from None
    return manifest


def _checked(path: Path, archive: zipfile.ZipFile) -> list[str]:
    """Return the names of the files. Raises ``Unusable`` for names that lead out, links, and what unpacks endlessly."""

    def refusal(what: str) -> Unusable:
        return Unusable(path, f"it is not unpacked: {what}", "Archive the model again with torch-model-archiver.")

    found = [member for member in archive.infolist() if not member.is_dir()]
    if len(found) > _MOST_FILES or sum(member.file_size for member in found) > _LARGEST:
        raise refusal(f"it has {len(found)} files")
    for member in found:
        name = member.filename
        if not is_file_path(name):
            raise refusal(f"'{name}' leads out of it")
        if stat.S_ISLNK(member.external_attr >> 16):
            raise refusal(f"'{name}' is a link")
        if member.file_size > _RATIO * max(member.compress_size, 4096):
            raise refusal(f"'{name}' is packed more densely than weights can be")
    return [member.filename for member in found]


def _check_handler(path: Path, archive: zipfile.ZipFile, handler: str) -> None:
    """Raise ``Unusable`` if the handler is missing, or needs TorchServe's package, which is not installed."""
    file = handler.partition(":")[0]
    needs = not file.endswith(".py")
    if not needs:
        try:
            if archive.getinfo(file).file_size > _LARGEST_HANDLER:
                raise Unusable(path, f"its handler '{file}' is too long to be a program", "Archive the model again.")
            tree = ast.parse(archive.read(file))
        except KeyError:
            raise Unusable(path, f"its handler '{file}' is not in it", "Archive the model again.") from None
        except (SyntaxError, ValueError) as error:
            raise Unusable(path, f"its handler '{file}' is not valid Python: {error}", "Correct it.") from None
        needs = any(_names_ts(node) for node in ast.walk(tree))
    if needs and importlib.util.find_spec("ts") is None:
        raise Unusable(
            path,
            f"its handler '{handler}' needs TorchServe's Python package",
            "Install it (its server is not started): pip install torchserve. Or unpack the archive, and add the "
            "TorchScript program in it: what its handler does before and after is then up to the client.",
        )


def _names_ts(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return not node.level and (node.module or "").partition(".")[0] == "ts"
    return isinstance(node, ast.Import) and any(alias.name.partition(".")[0] == "ts" for alias in node.names)


def _unpack(path: Path, members: list[str], directory: Path) -> None:
    with opened_archive(path) as archive:
        for name in members:
            target = directory / _ARCHIVE / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(name) as source, target.open("xb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)

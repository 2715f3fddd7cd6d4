"""Chooses the files of a model on the hub that are needed and safe, by their names. No I/O.

Formats that are only data come first: OpenVINO, safetensors, GGUF, ONNX. Pickles run code when they are read, and are
taken only from a publisher whom the user trusts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from typing import Final, NamedTuple

from nerite.core.client_text import is_file_path
from nerite.core.errors import InvalidArgument, NotFound
from nerite.core.transfer import readable_size
from nerite.sources.name import is_commit

_MOST: Final = 10_000
"""Files of a model. A repository with more holds data."""
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_SHA1: Final = re.compile(r"[0-9a-f]{40}")
_SETTINGS: Final = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".vocab", ".yaml")
"""Suffixes of configurations, tokenizers and templates."""
_LARGEST_SETTING: Final = 1 << 28
_SHARD: Final = re.compile(r"model-\d+-of-\d+\.safetensors")
_PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib")
_OPENVINO: Final = re.compile(r"openvino_[a-z_]+\.xml")
_NETWORKS: Final = ("openvino_model.xml", "openvino_language_model.xml", "openvino_encoder_model.xml")
_PIPELINE: Final = "model_index.json"
"""The list of the parts of a diffusion pipeline, each of which has a folder."""
_PART: Final = re.compile(r"[^/]+/openvino_[a-z_]+\.xml")
_QUANTIZATION: Final = re.compile(r"q4_k_m\.gguf$", re.IGNORECASE)
"""The usual one of several."""
_FOLDERS: Final = ("1_Pooling",)


class HubFile(NamedTuple):
    """A file of a model, and its content by its hash."""

    path: str
    size: int
    identity: str
    """SHA-256 of a large file (Git LFS); for others Git's hash of a blob, a SHA-1."""

    @property
    def is_large(self) -> bool:
        """True if the identity is the SHA-256 of the content."""
        return len(self.identity) == 64


class HubRevision(NamedTuple):
    """The state of a model on the hub at a commit."""

    repository: str
    commit: str
    files: tuple[HubFile, ...]
    licence: str = ""
    """As the publisher names it; empty if it does not."""


class HubChoice(NamedTuple):
    """The files to fetch, and what the user should know about the choice."""

    files: tuple[HubFile, ...]
    remarks: tuple[str, ...] = ()
    model: str = ""
    """Path of the file that is the model; empty if all files together are."""

    @property
    def size(self) -> int:
        """Total bytes."""
        return sum(file.size for file in self.files)


def check_revision(revision: HubRevision) -> HubRevision:
    """Return a revision whose names, sizes and hashes are plausible. Raises ``InvalidArgument``."""
    repository = revision.repository

    def refusal(what: str) -> InvalidArgument:
        return InvalidArgument(f"'{repository}' is not fetched: the hub describes {what}")

    if not is_commit(revision.commit):
        raise refusal("it without the hash of a commit")
    if len(revision.files) > _MOST:
        raise refusal(f"{len(revision.files)} files, more than the {_MOST} that are allowed")
    paths = {file.path for file in revision.files}
    for file in revision.files:
        if not is_file_path(file.path) or any(part in paths for part in _parents(file.path)):
            raise refusal(f"a file with a path that leads elsewhere: '{file.path}'")
        if file.size < 0 or not (_SHA256.fullmatch(file.identity) or _SHA1.fullmatch(file.identity)):
            raise refusal(f"the file '{file.path}' without its size and hash")
    return revision


def _parents(path: str) -> list[str]:
    return [str(parent) for parent in PurePosixPath(path).parents][:-1]


def choose_files(revision: HubRevision, wanted: str = "", *, trusted: bool = False) -> HubChoice:
    """Return the files to fetch: ``wanted`` alone, or all of the best format.

    ``trusted``: the publisher may run code on this machine, so pickles and programs are taken. Raises ``NotFound`` for
    a file that does not exist, ``InvalidArgument`` if nothing can be taken.
    """
    if wanted:
        return _one_file(revision, wanted, trusted=trusted)
    for take in (_pipeline, _openvino, _safetensors, _gguf, _onnx, _litert):
        choice = take(revision)
        if choice is not None:
            return _with_programs(revision, choice) if trusted else choice
    return _pickles(revision, trusted=trusted)


def _one_file(revision: HubRevision, wanted: str, *, trusted: bool) -> HubChoice:
    found = [file for file in revision.files if file.path == wanted]
    if not found:
        alike = [file.path for file in revision.files if file.path.endswith(PurePosixPath(wanted).suffix or "\0")]
        listed = f"It has {', '.join(alike[:20])}." if alike else "Its page lists its files."
        raise NotFound(f"'{revision.repository}' has no file '{wanted}'.\n    {listed}")
    if wanted.lower().endswith(_PICKLES) and not trusted:
        raise _refused_pickles(revision, [wanted])
    stem = wanted.rpartition(".")[0]
    companions = [
        file
        for file in revision.files
        if (wanted.endswith(".xml") and file.path == f"{stem}.bin")
        or (wanted.endswith(".onnx") and file.path in (f"{wanted}_data", f"{wanted}.data", f"{stem}.data"))
    ]
    return HubChoice((*found, *companions), (), wanted)


def _settings(revision: HubRevision, but: Callable[[str], bool] = lambda _: False) -> list[HubFile]:
    return [
        file
        for file in revision.files
        if file.path.endswith(_SETTINGS)
        and ("/" not in file.path or file.path.partition("/")[0] in _FOLDERS)
        and not file.path.startswith(".")
        and file.size <= _LARGEST_SETTING
        and not but(file.path)
    ]


def _with_programs(revision: HubRevision, choice: HubChoice) -> HubChoice:
    programs = [file for file in revision.files if file.path.endswith(".py") and "/" not in file.path]
    return choice._replace(files=(*choice.files, *programs))


def _at_top(revision: HubRevision, suffix: str) -> list[HubFile]:
    return [file for file in revision.files if file.path.lower().endswith(suffix) and "/" not in file.path]


def _openvino(revision: HubRevision) -> HubChoice | None:
    graphs = [file for file in revision.files if _OPENVINO.fullmatch(file.path)]
    if not any(file.path in _NETWORKS for file in graphs):
        return None
    weights = {f"{file.path.removesuffix('.xml')}.bin" for file in graphs}
    data = [file for file in revision.files if file.path in weights]
    return HubChoice((*graphs, *data, *_settings(revision)))


def _pipeline(revision: HubRevision) -> HubChoice | None:
    """Choose a diffusion pipeline for OpenVINO. Raises ``InvalidArgument`` for one that has to be exported."""
    if not any(file.path == _PIPELINE for file in revision.files):
        return None
    graphs = {file.path for file in revision.files if _PART.fullmatch(file.path)}
    if not graphs:
        raise InvalidArgument(
            f"'{revision.repository}' is a diffusion pipeline for PyTorch, which has to be exported.\n"
            f"    optimum-cli export openvino --model {revision.repository} exported; nerite add exported"
        )
    folders = {path.partition("/")[0] for path in graphs} | {"scheduler", "feature_extractor"}
    wanted = graphs | {f"{path.removesuffix('.xml')}.bin" for path in graphs} | {_PIPELINE}
    return HubChoice(
        tuple(
            file
            for file in revision.files
            if file.path in wanted
            or (
                file.path.partition("/")[0] in folders
                and file.path.endswith(_SETTINGS)
                and file.path.count("/") == 1
                and file.size <= _LARGEST_SETTING
            )
        )
    )


def _safetensors(revision: HubRevision) -> HubChoice | None:
    found = _at_top(revision, ".safetensors")
    if not found:
        return None
    names = {file.path for file in revision.files}
    if "model.safetensors" in names:
        taken = [file for file in found if file.path == "model.safetensors"]
    elif "model.safetensors.index.json" in names:
        taken = [file for file in found if _SHARD.fullmatch(file.path)]
    else:
        taken = found
    left = len(found) - len(taken)
    remarks = (f"Left out: {left} files with the weights in another form.",) if left else ()
    return HubChoice((*taken, *_settings(revision, lambda path: path.endswith(".bin.index.json"))), remarks)


def _gguf(revision: HubRevision) -> HubChoice | None:
    found = [file for file in revision.files if file.path.lower().endswith(".gguf")]
    found = [file for file in found if not PurePosixPath(file.path).name.startswith("mmproj")]
    if not found:
        return None
    if len(found) == 1:
        return HubChoice(tuple(found), (), found[0].path)
    usual = [file for file in found if _QUANTIZATION.search(file.path)]
    if len(usual) == 1:
        others = f"{len(found) - 1} others; choose one with hf:{revision.repository}/FILE"
        return HubChoice(tuple(usual), (f"Taken: {usual[0].path}, of {others}.",), usual[0].path)
    listed = "\n    ".join(f"hf:{revision.repository}/{file.path}  {readable_size(file.size)}" for file in found[:30])
    raise InvalidArgument(f"'{revision.repository}' has {len(found)} GGUF files. Name one:\n    {listed}")


def _onnx(revision: HubRevision) -> HubChoice | None:
    for path in ("model.onnx", "onnx/model.onnx"):
        if any(file.path == path for file in revision.files):
            return _one_file(revision, path, trusted=False)
    found = _at_top(revision, ".onnx")
    if not found:
        return None
    if len(found) == 1:
        return _one_file(revision, found[0].path, trusted=False)
    listed = ", ".join(file.path for file in found[:20])
    raise InvalidArgument(
        f"'{revision.repository}' has {len(found)} ONNX files: {listed}.\n"
        f"    Name one: hf:{revision.repository}/{found[0].path}"
    )


def _litert(revision: HubRevision) -> HubChoice | None:
    found = _at_top(revision, ".tflite")
    return HubChoice(tuple(found), (), found[0].path) if len(found) == 1 else None


def _pickles(revision: HubRevision, *, trusted: bool) -> HubChoice:
    found = [file for suffix in _PICKLES for file in _at_top(revision, suffix)]
    if not found:
        raise InvalidArgument(
            f"'{revision.repository}' has no weights in a form that can be served (OpenVINO, safetensors, GGUF, ONNX, "
            f"LiteRT) at the top of its files.\n    Name a file of it: hf:{revision.repository}/FILE"
        )
    if not trusted:
        raise _refused_pickles(revision, [file.path for file in found])
    first = [file for file in found if file.path.startswith("pytorch_model")] or found[:1]
    return _with_programs(revision, HubChoice((*first, *_settings(revision))))


def _refused_pickles(revision: HubRevision, paths: Sequence[str]) -> InvalidArgument:
    return InvalidArgument(
        f"'{revision.repository}' has its weights only as pickles ({', '.join(paths[:3])}), which run any code that "
        "they contain when they are read.\n    Look for a conversion to safetensors, GGUF or ONNX; or, if you trust "
        "the publisher, pass --trust."
    )

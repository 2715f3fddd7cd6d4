"""From a checkpoint to the files that OpenVINO runs: once for its content, and kept with the environments of models.

The exporter has an environment of its own (``installation.py``), and is a process of its own in any case. The model
repository is only read.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
from pathlib import Path
from typing import Final

from nerite.backends.interface import ModelContext
from nerite.backends.llm import checkpoint, installation, tasks
from nerite.backends.llm.checkpoint import Content
from nerite.backends.python import environment_store, installer
from nerite.config.near import nearest
from nerite.core.errors import InvalidArgument, Unavailable

_log = logging.getLogger("nerite.backends.llm")

PARAMETER: Final = "WEIGHT_FORMAT"
"""Of the configuration: how weights are kept."""
_FORMATS: Final = ("fp16", "fp32", "int8", "int4")
_TASKS: Final = {
    tasks.GENERATE: "text-generation-with-past",
    tasks.EMBED: "feature-extraction",
    tasks.RERANK: "text-classification",
}
_WRITERS: Final = ("ForCausalLM", "LMHeadModel")
"""Ends of the names of architectures that write text."""
_TOKENIZER: Final = "openvino_tokenizer.xml"
_OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
"""Nothing is asked of a hub: what is not in the directory is not there."""


def converted(context: ModelContext) -> Path:
    """Return the directory with OpenVINO's files of a model: that of its version, or the one with what was made of it.

    Making it takes minutes, the first time. Raises ``NeriteError``, with what the exporter said.
    """
    directory = context.version_directory.absolute()  # the exporter runs elsewhere
    if checkpoint.content(directory) is not Content.CHECKPOINT:
        return directory
    weights, task = _weights(context), _task(context)
    if not task:
        raise Unavailable(
            f"model '{context.name}': '{directory}/{checkpoint.CONFIG}' does not say what the model does: write its "
            'class to "architectures", such as ["LlamaForCausalLM"]'
        )
    place = environment_store.folder(context.settings.get(environment_store.SETTING, ""))
    exporter = installation.EXPORTER
    wanted = repr((_digest(directory, place), weights, task, exporter.file.read_text()))
    key = hashlib.sha256(wanted.encode()).hexdigest()

    def make(target: Path, lock: int) -> None:
        python = installation.made(exporter, place)
        _log.info("converting '%s' for OpenVINO (%s, %s)", directory, task, weights)
        _export(python, directory, target, task, weights, lock)

    return environment_store.kept(place, key, directory, make, "a conversion")


def _export(python: Path, directory: Path, target: Path, task: str, weights: str, lock: int) -> None:
    program: list[str | Path] = [python.with_name("optimum-cli"), "export", "openvino", "--model", directory, target]
    product = f"the conversion of '{directory}'"
    installer.run([*program, "--task", task, "--weight-format", weights], product, target, lock, _OFFLINE)
    if not (target / _TOKENIZER).is_file():
        raise InvalidArgument(
            f"{product} made no tokenizer: its tokenizer is none that OpenVINO can run. What the exporter said is in "
            "the log"
        )


def _task(context: ModelContext) -> str:
    """Return what the model of a checkpoint does, in the words of the exporter; empty where nothing tells."""
    directory = context.version_directory
    task = tasks.task(context)
    if task == tasks.GENERATE and "vision_config" in checkpoint.described(directory):
        return "image-text-to-text"
    if task == tasks.GENERATE and not context.parameter(tasks.PARAMETER):
        architecture = next(iter(tasks.architectures(directory)), "")
        return _TASKS[task] if architecture.endswith(_WRITERS) else ""
    return _TASKS[task]


def _weights(context: ModelContext) -> str:
    weights = context.parameter(PARAMETER, _FORMATS[0]).lower()
    if weights not in _FORMATS:
        meant = nearest(weights, _FORMATS)
        hint = f" Did you mean {meant}?" if meant else ""
        raise InvalidArgument(
            f"parameter '{PARAMETER}' of model '{context.name}' is '{weights}'; it may be {', '.join(_FORMATS)}.{hint}"
        )
    return weights


def _digest(directory: Path, place: Path) -> str:
    """Return the digest of a checkpoint. It takes seconds, so it is remembered while the files are as old."""
    files = list(checkpoint.files(directory))
    states = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    known = hashlib.sha256(repr((str(directory.resolve()), states)).encode()).hexdigest()
    memory = place / f"{known}.digest"
    if memory.is_file():
        return memory.read_text()
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            digest.update(f"{file.name}:{hashlib.file_digest(content, 'sha256').hexdigest()}\n".encode())
    # Whole or not there: others may read it at any moment. Without it, the digest is made again.
    with contextlib.suppress(OSError):
        place.mkdir(parents=True, exist_ok=True)
        fresh = memory.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        try:
            fresh.write_text(digest.hexdigest())
            fresh.rename(memory)
        except OSError:
            fresh.unlink(missing_ok=True)
    return digest.hexdigest()

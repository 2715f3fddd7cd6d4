"""A part of the exam while it runs: where it may write, the servers that it starts, and what it reports."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import runpy
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from contestants import ROOT, Contestant

from gpu_parts.environment import Kit
from gpu_parts.result import Figure, Gap, PartResult

sys.path.insert(0, str(ROOT / "tests"))

from serving import Serving, serving  # the path has to be set first

PACKAGES = (
    *("cuda-bindings", "numpy", "onnx", "onnxruntime", "onnxruntime-gpu", "tensorrt", "torch", "torchvision"),
    *("transformers", "tritonclient"),
)
"""Packages whose versions figures may depend on."""


class Skipped(Exception):
    """Raised by what cannot be tried here, with why."""


def need(program: str) -> None:
    """Raise ``Skipped`` unless a load generator is on the path."""
    if shutil.which(program) is None:
        raise Skipped(f"{program} is not on the path: make gpu-kit has it")


class Program:
    """A program of this folder that runs beside the part, and what it says."""

    def __init__(self, words: Sequence[object], log: Path) -> None:
        self._log = log
        self._words = [*map(str, words)]
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                self._words, stdout=sink, stderr=subprocess.STDOUT, cwd=ROOT / "benchmarks"
            )

    def wait(self) -> None:
        """Wait until it has ended. Raises what ``check`` raises."""
        self._process.wait()
        self.check()

    def check(self) -> None:
        """Raise ``RuntimeError``, with the end of what it said, if it has failed."""
        if self._process.poll():
            raise RuntimeError(f"{' '.join(self._words)}: {self._log.read_text(errors='replace')[-1000:]}")


class Part:
    """What a part is given."""

    def __init__(self, result: PartResult, file: Path, folder: Path, kit: Kit | None = None) -> None:
        self.result = result
        self.kit = kit
        self.folder = folder
        """An empty folder for its files."""
        self.gpu = result.kind == "KIND_GPU"
        self._file = file
        self._until = time.monotonic() + result.limit
        self._logs = 0
        self._describe()

    @property
    def left(self) -> float:
        """Seconds until it is cut."""
        return self._until - time.monotonic()

    def instances(self, count: int = 1, more: str = "") -> str:
        """Return the instance group of a model on the card, or on processors in a rehearsal."""
        where = "kind: KIND_GPU gpus: 0" if self.gpu else "kind: KIND_CPU"
        return f"instance_group {{ count: {count} {where} {more} }}\n"

    @property
    def logs(self) -> Path:
        """Folder for logs, which are kept beside the results."""
        return self._file.parent

    def figure(self, name: str, value: float, unit: str = "", wanted: str | None = None) -> None:
        """Report a figure. It is in the file when this returns."""
        figure = Figure(name, float(f"{value:.6g}"), unit, wanted)
        self.result.figures.append(figure)
        print(f"  {figure}", flush=True)
        self.result.save(self._file)

    def gpu_figure(self, name: str, value: float, unit: str, wanted: str | None = None) -> None:
        """Report a figure of which nothing is wanted in a rehearsal."""
        self.figure(name, value, unit, wanted if self.gpu else None)

    def skip(self, what: str, why: str) -> None:
        """Report that something was not tried."""
        self.result.skipped.append(Gap(what, why))
        print(f"  {what}: skipped: {why}", flush=True)
        self.result.save(self._file)

    def error(self, what: str, why: str) -> None:
        """Report that something did not work."""
        self.result.errors.append(Gap(what, why))
        print(f"  {what}: FAILED: {why}", flush=True)
        self.result.save(self._file)

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Report an exception of the block as an error, or what it skips, and go on."""
        try:
            yield
        except Skipped as reason:
            self.skip(what, str(reason))
        except Exception as error:
            traceback.print_exc()
            self.error(what, f"{type(error).__name__}: {error}"[:2000])

    def program(self, *words: object) -> Program:
        """Start a program that is imported from the folder of the benchmarks."""
        return Program(words, self._log("program"))

    @contextmanager
    def server(self, models: Path, *flags: str, environment: dict[str, str] | None = None) -> Iterator[Serving]:
        """Run a server. Its log is kept beside the results."""
        with serving(models, self._log("server"), *flags, environment=environment) as running:
            yield running

    def _log(self, of: str) -> Path:
        self._logs += 1
        return self._file.with_name(f"{self.result.part}-{self._logs}-{of}.log")

    def _describe(self) -> None:
        from nerite.observability.gpus import find_library

        result = self.result
        library, _ = find_library()
        visible = library.gpus(os.environ.get("CUDA_VISIBLE_DEVICES")) if self.gpu else []
        result.cards = [gpu.name for gpu in visible]
        if visible and (driver := library.driver()) is not None:
            result.driver, result.cuda = driver.version, "CUDA {}.{}".format(*driver.cuda)
        result.versions = {"python": platform.python_version()}
        for package in PACKAGES:
            with suppress(importlib.metadata.PackageNotFoundError):
                result.versions[package] = importlib.metadata.version(package)
        if "torch" in result.versions and (built_for := _cuda_of_torch()):
            result.cuda += f", PyTorch for CUDA {built_for}"
        result.save(self._file)


def contestant(server: Serving) -> Contestant:
    """Return a server as the loads of other benchmarks know it."""
    http, grpc, metrics = (server.ports[name] for name in ("HTTPService", "GRPCInferenceService", "Metrics"))
    return Contestant("Nerite", http, grpc, server.process, metrics)


def _cuda_of_torch() -> str:
    """Return the CUDA version that PyTorch is built for, without importing it; empty for a build for processors."""
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    return str(runpy.run_path(str(Path(found.origin).with_name("version.py")))["cuda"] or "")

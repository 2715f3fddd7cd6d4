"""``nerite.serve``, and ``nerite serve FILE.py:NAME``: functions behind ports, in worker processes where possible."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from nerite.cli.command import complain
from nerite.cli.command_line import run as run_command
from nerite.core.errors import InvalidArgument, NeriteError
from nerite.functions.annotations import FunctionMistake
from nerite.functions.execution import model_class_of
from nerite.functions.function_source import FunctionSource, files_beside
from nerite.functions.model_directory import write_imported, write_in_subprocess, write_registered
from nerite.functions.model_function import ModelFunction
from nerite.functions.program_import import EndOfImport, is_importing, source_of
from nerite.functions.registered import register
from nerite.functions.server import flags_of
from nerite.sources.serving import named_models

_RELOAD: Final = "--reload"
_INTERVAL: Final = 0.5
"""Seconds between two looks at the files of a function that is reloaded on save."""
_POLLING: Final = ("--model-control-mode=poll", "--repository-poll-secs=1")


def serve(*models: ModelFunction[..., Any] | str | Path, reload: bool = False, **flags: Any) -> None:
    """Serve functions, and the models of repositories, until a signal arrives.

    Keyword arguments are flags of ``nerite serve``: ``http_port=9000``. ``reload``: load a function again whenever its
    file is saved. A function that a worker process can import runs there; others run in threads of this process.
    Raises ``FunctionMistake``; ``SystemExit`` if the server cannot start.
    """
    if is_importing():
        raise EndOfImport
    if not models:
        raise FunctionMistake("nerite.serve() needs a function, as in nerite.serve(double)")
    _check_no_loop()
    sources: list[FunctionSource] = []
    repositories: list[str] = []
    with _folder() as folder:
        for each in models:
            if isinstance(each, str | Path):
                repositories.append(str(each))
            elif not isinstance(each, ModelFunction):
                raise FunctionMistake(f"{each!r} is not a model: decorate it with @nerite.model")
            elif (source := source_of(each)) is not None:
                sources.append(source)
                write_imported(folder, source, each, copy=False)
            elif reload:
                raise FunctionMistake(
                    f"{each.name}() is not at the top of a file, so it cannot be reloaded: move it there"
                )
            else:
                write_registered(folder, each.name, register(model_class_of(each)), each.config())
        status = _run([*flags_of(flags), *repositories, str(folder)], folder, sources if reload else [])
    if status:
        raise SystemExit(status)


def serve_named(arguments: Sequence[str]) -> int:
    """Run ``nerite serve``, whose arguments may name models and functions (``FILE.py:NAME``); return the status."""
    try:
        with named_models(arguments, os.environ) as rest:
            return _run_functions(rest)
    except NeriteError as error:
        complain("nerite serve", error.message)
        return 1
    except KeyboardInterrupt:
        complain("nerite serve", "cancelled; a download goes on where it stopped.")
        return 130


def _run_functions(arguments: Sequence[str]) -> int:
    sources = {each: source for each in arguments if (source := _source(each)) is not None}
    if not sources:
        return run_command(arguments)
    reload = _RELOAD in arguments
    rest = [each for each in arguments if each != _RELOAD and each not in sources]
    with _folder() as folder:
        try:
            found = [
                source._replace(place=str(source.path)) if source.is_file else source
                for source in sources.values()
                if write_in_subprocess(source, folder)
            ]
        except NeriteError as error:
            complain("nerite serve", error.message)
            return 1
        return _run([*rest, str(folder)], folder, found if reload else [])


def _source(argument: str) -> FunctionSource | None:
    """Return the functions that an argument names; None for flags and repositories."""
    if argument.startswith("-") or "/" in argument.rpartition(":")[2] or Path(argument).is_dir():
        return None
    return FunctionSource.parse(argument)


@contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="nerite-functions-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(arguments: Sequence[str], folder: Path, watched: Sequence[FunctionSource]) -> int:
    if not watched:
        return run_command(arguments)
    watch = SourceWatch(folder, watched)
    try:
        return run_command([*_POLLING, *arguments])
    finally:
        watch.stop()


def _check_no_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise InvalidArgument(
        "nerite.serve() cannot run inside an event loop, such as that of a notebook. Use a server in this process: "
        "with nerite.Server(double, http_port=8000) as server: …"
    )


class SourceWatch:
    """Writes the model directories again when a file of their functions is saved; the server polls the directories.

    A program that cannot be imported is told on stderr, and what was served before goes on.
    """

    def __init__(self, folder: Path, sources: Sequence[FunctionSource]) -> None:
        """Begin to watch, in a thread."""
        self._folder = folder
        self._seen = {source: _times(source) for source in sources}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reload", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(_INTERVAL):
            for source, before in self._seen.items():
                now = _times(source)
                if now == before:
                    continue
                self._seen[source] = now
                try:
                    write_in_subprocess(source, self._folder)
                except (NeriteError, OSError) as error:
                    print(f"nerite: not reloaded, and served as before: {error}", file=sys.stderr, flush=True)


def _times(source: FunctionSource) -> dict[str, int]:
    """Return when the files of a program were changed; empty for a module that is not a file."""
    if not source.is_file:
        return {}
    times = {}
    for path in files_beside(source.path):
        try:
            times[str(path)] = path.stat().st_mtime_ns
        except OSError:  # it is being replaced
            times[str(path)] = 0
    return times

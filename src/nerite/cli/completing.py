"""Has the backends of this machine look at a model, as a server would have it done."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nerite.artifacts.damage import looked_at, pointer_in, refused_pointer
from nerite.backends import registry
from nerite.backends.interface import ModelContext
from nerite.config.completion import CompletionUnavailable
from nerite.config.gpus import Gpus
from nerite.config.json_form import to_json
from nerite.config.model_config import ModelConfig
from nerite.config.options import DeviceOptions, ServerOptions
from nerite.core.errors import Internal, NotHere
from nerite.observability.gpus import of_this_machine, open_library
from nerite.repository import refusals
from nerite.repository.placement import Placement


class ModelHere:
    """A model in a directory, and what the backends of this machine say of it."""

    def __init__(self, directory: Path, backends: str) -> None:
        """``backends`` is the backend directory."""
        self._directory = directory
        self._backends = backends
        self._memos: dict[int, dict[Any, Any]] = {}
        """What was left by ``complete`` for ``open``, by version."""

    def complete(self, config: ModelConfig, version: int) -> Mapping[str, Any]:
        """Have the backend complete a configuration. Raises as ``Complete`` says."""
        context = self._context(config, version)
        if context.environment:
            raise CompletionUnavailable("not completed from the model: it has a Python environment of its own")
        with self._asked("not completed from the model", config, context):
            return registry.backend_of(context).complete(context)

    def open(self, config: ModelConfig, version: int, *, completed: bool = True) -> None:
        """Open a model with a complete configuration as a load does, and close it again.

        Code of a Python model is read, and not run; checkpoints of language models, and what could not be
        ``completed`` here, are left as they are. Raises ``NeriteError`` as a load, ``CompletionUnavailable`` where it
        cannot be told here.
        """
        from nerite.backends.python import PythonBackend
        from nerite.backends.python.environment import located
        from nerite.execution.launcher import is_isolated

        context = self._context(config, version)
        with self._asked("not opened", config, context):
            is_isolated(context)
            if context.environment:
                located(context)
            found = registry.backend_of(context)
            if isinstance(found, PythonBackend):
                found.look(context)
            elif config.backend in registry.GENERATING:
                found.complete(context)
                if (pointer := pointer_in(context.version_directory)) is not None:
                    raise refused_pointer(pointer)
            elif completed and not context.environment:
                found.open(context).close()

    def _context(self, config: ModelConfig, version: int) -> ModelContext:
        config = registry.filled_in(config, self._backends)
        settings = ServerOptions(backend_directory=self._backends).settings_of(config.backend)
        memo = self._memos.setdefault(version, {})
        return ModelContext(config.name, version, self._directory, to_json(config), settings, memo)

    @contextlib.contextmanager
    def _asked(self, unknown: str, config: ModelConfig, context: ModelContext) -> Iterator[None]:
        """Have a backend asked in a ``with`` block. ``unknown`` is what is not known if something is missing here."""
        try:
            # What a model prints must not get between the mistakes.
            with (
                contextlib.redirect_stdout(sys.stderr),
                looked_at(context.version_directory, config.default_model_filename),
            ):
                yield
        except NotHere as error:
            raise CompletionUnavailable(f"{unknown}: {error.message}") from error
        except Internal as error:
            if error.message.startswith("ModuleNotFoundError"):
                raise CompletionUnavailable(f"{unknown}: {error.message.splitlines()[0]}") from error
            raise
        except CompletionUnavailable:
            raise
        except Exception as error:  # a load would fail with it
            raise refusals.refusal(error) from error


def gpus_here() -> Callable[[str], Gpus]:
    """Return which GPUs of this machine the models of a backend may be on."""
    library, minimum = open_library(), DeviceOptions().min_compute_capability
    return Placement(library, of_this_machine(library, os.environ, minimum), minimum).gpus

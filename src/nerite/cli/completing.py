"""Has a configuration completed here, as a server would have it done."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nerite.backends import registry
from nerite.backends.interface import ModelContext
from nerite.config.completion import CompletionUnavailable
from nerite.config.gpus import Gpus
from nerite.config.json_form import to_json
from nerite.config.model_config import ModelConfig
from nerite.config.options import DeviceOptions, ServerOptions
from nerite.core.errors import Internal, Unsupported
from nerite.observability.gpus import of_this_machine, open_library
from nerite.repository.placement import Placement


def complete_here(directory: Path, backends: str, config: ModelConfig, version: int) -> Mapping[str, Any]:
    """Have the backend complete a configuration; ``backends`` is the backend directory. Raises as ``Complete`` says."""
    config = registry.filled_in(config, backends)
    if "EXECUTION_ENV_PATH" in config.parameters:
        raise CompletionUnavailable("not completed from the model: it has a Python environment of its own")
    settings = ServerOptions(backend_directory=backends).settings_of(config.backend)
    context = ModelContext(config.name, version, directory.resolve(), to_json(config), settings)
    try:
        # What a model prints must not get between the mistakes.
        with contextlib.redirect_stdout(sys.stderr):
            return registry.backend_of(context).complete(context)
    except Unsupported as error:
        raise CompletionUnavailable(f"not completed from the model: {error.message}") from error
    except Internal as error:
        if error.message.startswith("ModuleNotFoundError"):
            reason = error.message.splitlines()[0]
            raise CompletionUnavailable(f"not completed from the model: {reason}") from error
        raise


def gpus_here() -> Callable[[str], Gpus]:
    """Return which GPUs of this machine the models of a backend may be on."""
    library, minimum = open_library(), DeviceOptions().min_compute_capability
    return Placement(library, of_this_machine(library, os.environ, minimum), minimum).gpus

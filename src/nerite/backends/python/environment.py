"""The Python environment that a model brings: ``EXECUTION_ENV_PATH``.

It is a directory, an archive made by conda-pack, or a list of packages. An archive is unpacked once, and of a list an
environment is made once (``environment_store.py``), for every model and every start of the server that has the same.
Any Python that we support will do, as long as it has numpy.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
from pathlib import Path

from nerite.backends.interface import ModelContext
from nerite.backends.python import environment_store, requirements
from nerite.backends.python.archive import unpacked
from nerite.core.errors import InvalidArgument

OLDEST = (3, 11)
"""The oldest Python that can run a model."""

_MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"

_REPORT = """
import json, sys
try:
    import numpy
    found = numpy.__version__
except Exception as error:
    found = ""
print(json.dumps({"python": sys.version_info[:3], "numpy": found}))
"""


def find_interpreter(context: ModelContext) -> Path | None:
    """Return the Python that a model asks for with ``EXECUTION_ENV_PATH``, or None if it does not ask.

    May have to make the environment, and starts that Python to ask what it is, so it blocks for a while. Raises
    ``InvalidArgument`` for an environment that is not there or cannot run a model: what was found, and what to do.
    """
    if not context.environment:
        return None
    environment = located(context)
    place = _place(environment, environment_store.folder(context.settings.get(environment_store.SETTING, "")))
    interpreter = place / "bin" / "python"
    where = f"EXECUTION_ENV_PATH of model '{context.name}' is '{environment}'"
    if not interpreter.exists():
        found = ", ".join(sorted(os.listdir(place))[:8]) or "nothing"
        raise InvalidArgument(
            f"{where}, but that has no bin/python; it has: {found}. "
            "Give a virtual environment, an archive made by conda-pack, or a requirements.txt."
        )
    _check(interpreter, where)
    return interpreter


def located(context: ModelContext) -> Path:
    """Return where the environment is that a model brings. Raises ``InvalidArgument`` if it is not there."""
    environment = Path(context.environment.replace(_MODEL_DIRECTORY, str(context.directory)))
    if not environment.exists():
        raise InvalidArgument(
            f"Failed to get the canonical path for {environment}. It is the EXECUTION_ENV_PATH of model "
            f"'{context.name}', and there is no such file or directory."
        )
    return environment


def _place(environment: Path, folder: Path) -> Path:
    """Return the directory of an environment, which may be in ``folder`` then."""
    if environment.is_dir():
        return environment
    if requirements.is_list(environment):
        return requirements.made(environment, folder)
    return unpacked(environment, folder)


@functools.lru_cache(maxsize=64)
def _check(interpreter: Path, where: str) -> None:
    """Raise ``InvalidArgument`` if ``interpreter`` does not start, is too old or has no numpy.

    Starting it takes a while, and every instance of a model asks, so it is remembered that one is good.
    """
    surroundings = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    try:
        answer = subprocess.run(
            [interpreter, "-c", _REPORT], env=surroundings, capture_output=True, text=True, timeout=60, check=True
        )
        report = json.loads(answer.stdout)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or [f"exit status {error.returncode}"])[-1]
        raise InvalidArgument(f"{where}, but its Python does not run: {last}") from None
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise InvalidArgument(f"{where}, but its Python does not run: {error}") from None
    version = tuple(report["python"])
    if version < OLDEST:
        raise InvalidArgument(
            f"{where}, but its Python is {'.'.join(map(str, version))}. "
            f"Build it with Python {'.'.join(map(str, OLDEST))} or newer, and numpy."
        )
    if not report["numpy"]:
        raise InvalidArgument(f"{where}, but it has no numpy. Install it there: {interpreter} -m pip install numpy")

"""OpenVINO itself: the import, the one core of the process, the meaning of its errors."""

from __future__ import annotations

import re
import sys
import threading
from functools import cache
from types import ModuleType
from typing import Any, Final, cast

from nerite.core.errors import Internal, NeriteError, NotHere

_TELEMETRY: Final = "openvino_telemetry"
_importing = threading.Lock()

_PLACES: Final = re.compile(r"Exception from \S+:\d+:|Check '.*' failed at \S+:\d+:|FrontEnd API failed with \w+:")
"""What stands before the words that matter."""


@cache
def openvino() -> ModuleType:
    """Return the package. Raises ``Unsupported`` where it cannot be imported.

    Importing it sends its makers a note over the network, unless its telemetry is not installed. So it is not.
    """
    with _importing:
        installed = sys.modules.get(_TELEMETRY)
        sys.modules[_TELEMETRY] = cast(ModuleType, None)  # Makes the import of it fail, for which OpenVINO is prepared.
        try:
            import openvino
        except ImportError as error:
            raise NotHere(f"unable to import openvino ({error}): pip install 'nerite[openvino]'") from error
        finally:
            del sys.modules[_TELEMETRY]
            if installed is not None:
                sys.modules[_TELEMETRY] = installed
    return openvino  # type: ignore[no-any-return]  # The package has no types.


@cache
def core(extension: str = "") -> Any:
    """Return the ``Core`` of all models, or that of those with a library of custom operators.

    It is kept for ever: what it has loaded (devices, libraries) cannot be unloaded. Raises ``NeriteError``.
    """
    made = openvino().Core()
    if extension:
        try:
            made.add_extension(extension)
        except Exception as error:  # Whatever the framework raises says why it cannot be loaded.
            raise translated(error, "loading custom CPU extensions", f"Is '{extension}' built for it?") from error
    return made


def translated(error: Exception, doing: str, remedy: str = "") -> NeriteError:
    """Return what a client and the log are told of an exception from OpenVINO, less the places in its source."""
    if isinstance(error, NeriteError):
        return error
    lines = [_PLACES.sub("", line).strip() for line in str(error).splitlines()]
    text = " ".join(line for line in lines if line)
    if remedy:
        text = f"{text.rstrip('.!')}. {remedy}"
    return Internal(f"openvino error in {doing} : {text}")

"""The import of ONNX Runtime, for all backends that compute with it."""

from __future__ import annotations

import os
from functools import cache
from types import ModuleType
from typing import Final

from nerite.core.errors import NotHere

_SILENCE: Final = "ORT_DISABLE_TELEMETRY"


@cache
def onnxruntime() -> ModuleType:
    """Return the package. Raises ``Unsupported`` where it cannot be imported.

    Importing it opens a file in the user's home, in which some builds collect what they report to their makers. It is
    imported without that, unless the environment says otherwise.
    """
    unsaid = _SILENCE not in os.environ
    if unsaid:
        os.environ[_SILENCE] = "1"
    try:
        import onnxruntime
    except ImportError as error:
        raise NotHere(f"unable to import onnxruntime ({error}): pip install 'nerite[onnx]'") from error
    finally:
        if unsaid:
            del os.environ[_SILENCE]
    return onnxruntime  # type: ignore[no-any-return]  # The package has no types.

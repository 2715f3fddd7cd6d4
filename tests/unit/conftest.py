"""Every unit test leaves its process as it found it, so that they run in any order, in as many processes as there are.

What a test leaves behind is told by that test, not by the one that stumbles over it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from triton_python_backend_utils import TritonModelException, get_model_dir

_OF_LIBRARIES = ("AOTI_", "ENABLE_RUNTIME_UPTIME", "HDF5_", "KMP_", "TF2_", "TF_CPP_", "TORCH", "TPU_")
"""How variables begin that are set for good when a library is imported."""


@pytest.fixture(autouse=True)
def process_is_left_as_it_was() -> Iterator[None]:
    before = state()
    yield
    after = state()
    left = {name: (before.get(name), after.get(name)) for name in before | after}
    left = {name: each for name, each in left.items() if each[0] != each[1]}
    assert not left, "a test leaves something behind in its process: what was there before, and what is now"


def state() -> dict[str, Any]:
    """Return what tests share, and may change, in one process."""
    ours = logging.getLogger("nerite")
    return {
        "sys.path": list(sys.path),
        "directory": os.getcwd(),
        "open models": _open_models(),
        "log": (ours.level, ours.propagate, list(ours.handlers)),
        "handlers of all logs": [each for each in logging.getLogger().handlers if not _of_pytest(each)],
        "signals": [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
        **{f"${name}": value for name, value in os.environ.items() if not name.startswith(("PYTEST_", *_OF_LIBRARIES))},
    }


def _open_models() -> str:
    """Return what tells whether models are open in this process: none, which one, or several."""
    try:
        return get_model_dir()
    except TritonModelException as error:
        return str(error)


def _of_pytest(handler: logging.Handler) -> bool:
    return type(handler).__module__.startswith("_pytest.")

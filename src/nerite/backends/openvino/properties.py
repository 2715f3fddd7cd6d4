"""What the ``parameters`` of a configuration say to OpenVINO. Pure.

Triton's names come first; they are OpenVINO's own but for ``HINT_BF16``. Any other property that a device has is set
under its own name, with a value as OpenVINO writes it. Parameters that are neither, and look like no such name, belong
to somebody else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Final

from nerite.backends.interface import ModelContext
from nerite.config.near import nearest
from nerite.core.errors import InvalidArgument

_log = logging.getLogger("nerite.backends.openvino")

OWN: Final = (
    "CPU_EXTENSION_PATH",
    "ENABLE_BATCH_PADDING",
    "ENABLE_MMAP",
    "RESHAPE_IO_LAYERS",
    "SKIP_OV_DYNAMIC_BATCHSIZE",
    "TARGET_DEVICE",
)
"""Parameters that say how a model is read and made ready, and are no properties of a device."""

ANY_DEVICE: Final = ("ALLOW_AUTO_BATCHING", "AUTO_BATCH_TIMEOUT", "CACHE_DIR", "CACHE_MODE")
"""Properties that each device takes and few tell of."""

_SERVER: Final = ("EXECUTION_MODE",)
"""Known elsewhere, and too much like one of the properties."""

_CLOSE: Final = 0.8
"""A parameter that is as close to a known one as this was meant to be that."""


def chosen(context: ModelContext, device: Collection[str]) -> dict[str, str]:
    """Return the properties that the configuration sets, by OpenVINO's names; ``device`` are those the device has.

    Raises ``InvalidArgument`` for a value that makes no sense and for a name that is nearly one of ours.
    """
    found = {}
    known = {*_READERS, *OWN, *ANY_DEVICE, *device}
    for key in context.config.get("parameters", {}):
        value = context.parameter(key)
        if key in _READERS:
            name, read = _READERS[key]
            text = read(key, value)
            if name in device:
                found[name] = text
            else:
                _log.warning("model '%s': its device has no property %s, '%s' says nothing", context.name, name, key)
        elif key in (*ANY_DEVICE, *device):
            found[key] = value
        elif key not in (*OWN, *_SERVER):
            _check_foreign(key, known)
    if cache := context.settings.get("cache-dir"):
        found.setdefault("CACHE_DIR", cache)
    return found


def flag(context: ModelContext, key: str, default: str = "NO") -> bool:
    """Return a parameter that is YES or NO."""
    value = (context.parameter(key) or default).upper()
    if value not in ("YES", "NO"):
        raise InvalidArgument(f"expected the parameter '{key}' to be YES or NO, got {context.parameter(key)}")
    return value == "YES"


def _check_foreign(key: str, known: Collection[str]) -> None:
    if meant := nearest(key.upper(), sorted(known), _CLOSE):
        raise InvalidArgument(f"the parameter '{key}' is not yet supported by openvino backend. Did you mean {meant}?")


def _count(key: str, value: str) -> str:
    if not value.isdecimal():
        raise InvalidArgument(f"expected the parameter '{key}' to be a non-negative number, got {value}")
    return value


def _bfloat16(key: str, value: str) -> str:
    if value.upper() != "YES":
        raise InvalidArgument(f"expected the parameter '{key}' to be YES, got {value}")
    return "bf16"


def _streams(key: str, value: str) -> str:
    if not value.isdecimal() and value.upper() not in ("AUTO", "NUMA"):
        raise InvalidArgument(f"expected the parameter '{key}' to be either AUTO/NUMA/<int_value>, got {value}")
    return value.upper()


def _hint(key: str, value: str) -> str:
    hints = ("LATENCY", "THROUGHPUT", "CUMULATIVE_THROUGHPUT")
    if value.upper() not in hints:
        raise InvalidArgument(f"expected the parameter '{key}' to be {'/'.join(hints)}, got {value}")
    return value.upper()


_READERS: Final[Mapping[str, tuple[str, Callable[[str, str], str]]]] = {
    "INFERENCE_NUM_THREADS": ("INFERENCE_NUM_THREADS", _count),
    "COMPILATION_NUM_THREADS": ("COMPILATION_NUM_THREADS", _count),
    "HINT_BF16": ("INFERENCE_PRECISION_HINT", _bfloat16),
    "NUM_STREAMS": ("NUM_STREAMS", _streams),
    "PERFORMANCE_HINT": ("PERFORMANCE_HINT", _hint),
}
"""Triton's parameters that are properties: OpenVINO's name, and what reads the value."""

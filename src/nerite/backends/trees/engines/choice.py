"""Which engine computes a model (``docs/decisions/0006-tree-engines.md`` says why)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from nerite.backends.trees.engines import lightgbm, onnxruntime, xgboost
from nerite.backends.trees.engines.engine import Engine
from nerite.backends.trees.engines.gtil import GtilEngine
from nerite.backends.trees.forest import Description, Forest
from nerite.backends.trees.native import NativeError
from nerite.core.errors import InvalidArgument, NotHere

_log = logging.getLogger("nerite.backends.trees")

Read = Callable[[], Forest]
"""Has treelite read a model, or gives the one that it has read."""


class _Missing(Exception):
    """A library is not installed."""


def _xgboost(forest: Description, threads: int, read: Read) -> Engine:
    path = xgboost.library()
    if path is None:
        raise _Missing("xgboost")
    return xgboost.XgboostEngine(path, forest, threads)


def _lightgbm(forest: Description, threads: int, read: Read) -> Engine:
    path = lightgbm.library()
    if path is None:
        raise _Missing("lightgbm")
    return lightgbm.LightgbmEngine(path, forest, threads)


def _onnxruntime(forest: Description, threads: int, read: Read) -> Engine:
    if not onnxruntime.installed():
        raise _Missing("onnxruntime")
    return onnxruntime.OnnxruntimeEngine(read(), threads)


def _treelite(forest: Description, threads: int, read: Read) -> Engine:
    return GtilEngine(read(), threads)


_Opener = Callable[[Description, int, Read], Engine]
_OPENERS: Final[dict[str, _Opener]] = {
    "xgboost": _xgboost,
    "lightgbm": _lightgbm,
    "onnxruntime": _onnxruntime,
    "treelite": _treelite,
}


def open_engine(name: str, forest: Description, wanted: str, threads: int, read: Read) -> Engine:
    """Return an engine on the CPU. ``wanted`` is the parameter ``engine``.

    Raises ``NeriteError`` if the wanted one cannot compute this model, or is not installed.
    """
    own = explainer(forest)
    able = [*([own] if own else []), "onnxruntime", "treelite"]
    if wanted not in ("auto", *able):
        raise InvalidArgument(
            f"model '{name}' has 'engine': '{wanted}', but '{forest.artifact.path.name}' is of model_type "
            f"'{forest.artifact.model_type}'. Engines for it are: {', '.join(able)}"
        )
    reasons = []
    for engine in able if wanted == "auto" else [wanted]:
        try:
            opened = _OPENERS[engine](forest, threads, read)
        except _Missing:
            if wanted != "auto":
                raise NotHere(
                    f"model '{name}' has 'engine': '{wanted}', which is not installed: pip install {wanted}"
                ) from None
            reasons.append(f"{engine} is not installed")
        except (NativeError, OSError) as error:
            if wanted != "auto":
                raise InvalidArgument(f"unable to load model '{name}' with {wanted}: {error}") from error
            reasons.append(f"{engine} cannot: {error}")
        else:
            if reasons:
                _log.info("model '%s' is computed by %s; %s", name, engine, "; ".join(reasons))
            return opened
    raise AssertionError("treelite computes what it reads")


def explainer(forest: Description) -> str:
    """Return the name of the library that wrote a model, and explains its predictions, or an empty string."""
    if forest.artifact.of_xgboost:
        return "xgboost"
    return "lightgbm" if forest.artifact.model_type == "lightgbm" else ""

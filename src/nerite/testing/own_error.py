"""Giving a test the exception of the model, instead of the text that a server would send."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from nerite.backends.python.failure import model_traceback
from nerite.core.errors import NeriteError

P = ParamSpec("P")
R = TypeVar("R")


def own_error(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call ``call``; raise what the model raised in it, with the model's frames only."""
    __tracebackhide__ = True
    try:
        return call(*args, **kwargs)
    except NeriteError as error:
        refusal = error
    own = refusal.__cause__
    if own is None:
        raise refusal
    raise own.with_traceback(model_traceback(own))

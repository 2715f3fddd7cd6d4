"""What a model raised, as the text that callers and operators read.

The form is that of Triton, which clients and runbooks know: type and message, then the frames of the model, innermost
first. Frames of this server and of the import system are left out; they say nothing about the model.
"""

from __future__ import annotations

import asyncio
from collections import deque
from traceback import walk_tb
from types import CodeType, TracebackType
from typing import Final

import nerite
import triton_python_backend_utils
from nerite.core.errors import Internal
from nerite.core.failure_text import message_of

CAUSES: Final = (Exception, SystemExit, asyncio.CancelledError)
"""What a model's code may raise to fail a call. The rest (Ctrl-C) is no business of the model."""

_MOST_FRAMES: Final = 100
_OURS = (f"{nerite.__path__[0]}/", f"{triton_python_backend_utils.__path__[0]}/", "<frozen importlib")


def describe(error: BaseException) -> str:
    """Return type, message and the innermost frames of ``error``."""
    text = f"{type(error).__name__}: {message_of(error) or '<EMPTY MESSAGE>'}"
    frames = _frames(error.__traceback__)
    if frames:
        text += "\n\nAt:\n" + "".join(f"  {line}\n" for line in reversed(frames))
    return printable(text)


def refusal(error: BaseException) -> Internal:
    """Return what is told of a model whose code raised ``error``, with the place in that code."""
    told = Internal(describe(error))
    told.place = _place(error)
    return told


def _place(error: BaseException) -> tuple[str, int, int] | None:
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return error.filename, error.lineno, max(error.offset or 1, 1)
    frames = [frame for frame in walk_tb(error.__traceback__) if not _is_our_code(frame[0].f_code)]
    return (frames[-1][0].f_code.co_filename, frames[-1][1], 1) if frames else None


def model_traceback(error: BaseException) -> TracebackType | None:
    """Return the traceback of ``error`` from the model's first frame on, or None if the model has none in it."""
    traceback = error.__traceback__
    while traceback is not None and _is_ours(traceback):
        traceback = traceback.tb_next
    return traceback


def printable(text: str) -> str:
    """Return ``text`` with what cannot be encoded as UTF-8 (lone surrogates) escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def _frames(traceback: TracebackType | None) -> deque[str]:
    frames: deque[str] = deque(maxlen=_MOST_FRAMES)
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if not _is_ours(traceback):
            frames.append(f"{code.co_filename}({traceback.tb_lineno}): {code.co_name}")
        traceback = traceback.tb_next
    return frames


def _is_ours(traceback: TracebackType) -> bool:
    return _is_our_code(traceback.tb_frame.f_code)


def _is_our_code(code: CodeType) -> bool:
    return code.co_filename.startswith(_OURS)

"""A pipeline in a process of its own, from outside."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
from typing import Final

from nerite.core.errors import Internal, NeriteError
from nerite.llm.openvino_genai import stepping
from nerite.llm.openvino_genai.messages import (
    Compiled,
    CompileOrder,
    DropOrder,
    FramedPipe,
    GenerationOrder,
    PipelineLoaded,
    PipelineStep,
    packed_message,
)
from nerite.llm.openvino_genai.options import PipelineOptions

_PROGRAM: Final = f"from {stepping.__name__} import main; main()"
_END_SECONDS: Final = 20


class PipelineProcess:
    """The process. What is sent may come from any thread and never waits; one thread reads."""

    def __init__(self, options: PipelineOptions) -> None:
        """Start it. It loads the model by itself."""
        ours, theirs = socket.socketpair()
        turns, self._turns = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), str(turns), options.name],
            stdin=subprocess.PIPE,  # Never written to: the process ends with it.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            pass_fds=(theirs.fileno(), turns),
        )
        theirs.close()
        os.close(turns)
        self._line = FramedPipe(ours)
        self._sending = threading.Lock()
        """Of what follows."""
        self._unsent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        """What there was no room for: the process reads between two steps."""
        self._left = 0
        """How many there are of them, with the one that is being sent."""
        self._sender = threading.Thread(target=self._send_rest, name="orders", daemon=True)
        self._sender.start()
        self.send(options)
        self._ended = ""

    def loaded(self) -> PipelineLoaded:
        """Return what it says when the model is there. Raises ``NeriteError`` if it cannot be loaded."""
        try:
            said: PipelineLoaded | NeriteError = self._line.receive()
        except (EOFError, OSError):
            raise Internal(f"the process of the pipeline {self.end()} while it loaded the model") from None
        if isinstance(said, NeriteError):
            raise said
        return said

    def send(self, message: PipelineOptions | GenerationOrder | DropOrder | CompileOrder) -> None:
        """Send a message, at once if there is room for it."""
        data = packed_message(message)
        with self._sending, contextlib.suppress(OSError):  # It is gone, which ``next`` tells.
            rest = data if self._left else self._line.push(data)
            if rest:
                self._left += 1
                self._unsent.put(rest)

    def next(self) -> PipelineStep | Compiled | None:
        """Wait for what it says next; None if it is gone."""
        try:
            said: PipelineStep | Compiled = self._line.receive()
        except (EOFError, OSError):
            return None
        return said

    def looked_at(self) -> None:
        """Let it go on by one more step."""
        try:
            os.write(self._turns, b".")
        except OSError:
            return  # It is gone, which ``next`` tells.

    def kill(self) -> None:
        """End it, in the middle of whatever it does. What it has said is read as before."""
        self._process.kill()

    def end(self) -> str:
        """End it, give everything back, and return how it has ended. For the thread that reads."""
        if self._ended:
            return self._ended
        self._process.kill()
        self._unsent.put(None)
        self._sender.join()
        status = self._process.wait(_END_SECONDS)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._line.close()
        os.close(self._turns)
        self._ended = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        return self._ended

    def _send_rest(self) -> None:
        while (data := self._unsent.get()) is not None:
            with contextlib.suppress(OSError):  # It is gone, which ``next`` tells.
                self._line.write(data)
            del data  # it may have images
            with self._sending:
                self._left -= 1

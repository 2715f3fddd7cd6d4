"""The engine's handle of the pipeline process."""

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
    """Handle of a pipeline process. Any thread may send, which never blocks; one thread reads."""

    def __init__(self, options: PipelineOptions) -> None:
        """Start the process, which then loads the model."""
        ours, theirs = socket.socketpair()
        turns, self._turns = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), str(turns), options.name],
            stdin=subprocess.PIPE,  # never written to: the process ends when it is closed
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            pass_fds=(theirs.fileno(), turns),
        )
        theirs.close()
        os.close(turns)
        self._line = FramedPipe(ours)
        self._sending = threading.Lock()
        """Guards the following attributes."""
        self._unsent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        """Messages that did not fit into the socket, because the process reads only between two steps."""
        self._left = 0
        """Number of unsent messages, including the one being sent."""
        self._sender = threading.Thread(target=self._send_rest, name="orders", daemon=True)
        self._sender.start()
        self.send(options)
        self._ended = ""

    def loaded(self) -> PipelineLoaded:
        """Wait until the model is loaded. Raises ``NeriteError`` if it cannot be loaded."""
        try:
            message: PipelineLoaded | NeriteError = self._line.receive()
        except (EOFError, OSError):
            raise Internal(f"the pipeline process {self.end()} while it loaded the model") from None
        if isinstance(message, NeriteError):
            raise message
        return message

    def send(self, message: PipelineOptions | GenerationOrder | DropOrder | CompileOrder) -> None:
        """Send a message, or queue it if it cannot be sent without blocking."""
        data = packed_message(message)
        with self._sending, contextlib.suppress(OSError):  # the process is gone, which ``next`` reports
            rest = data if self._left else self._line.push(data)
            if rest:
                self._left += 1
                self._unsent.put(rest)

    def next(self) -> PipelineStep | Compiled | None:
        """Wait for the next message; return None if the process is gone."""
        try:
            message: PipelineStep | Compiled = self._line.receive()
        except (EOFError, OSError):
            return None
        return message

    def allow_step(self) -> None:
        """Allow the process one more step."""
        try:
            os.write(self._turns, b".")
        except OSError:
            return  # the process is gone, which ``next`` reports

    def kill(self) -> None:
        """Kill the process. Messages that it has sent can still be read."""
        self._process.kill()

    def end(self) -> str:
        """Kill the process, release all resources, and return how it ended. For the thread that reads."""
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
            with contextlib.suppress(OSError):  # the process is gone, which ``next`` reports
                self._line.write(data)
            del data  # release images that it may contain
            with self._sending:
                self._left -= 1

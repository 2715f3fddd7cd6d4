"""Keeps the processes of a plan running: starts them, passes on what they print, restarts and stops them."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import signal
import sys
import time
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Callable, Sequence
from http.client import HTTPConnection, HTTPException
from subprocess import SubprocessError
from typing import Final

from nerite.cluster.addresses import split_address
from nerite.tools.up.local_plan import LocalProcess

_FIRST_DELAY: Final = 0.5
_LONGEST_DELAY: Final = 30.0
"""Seconds before a process that has ended is started again: doubled each time that it ends within ``_STABLE``."""
_STABLE: Final = 30.0
_OTHERS_SECONDS: Final = 60.0
"""How long the last process waits for the others, which may never be ready."""
_POLL: Final = 0.1
_MAX_LINE: Final = 1 << 20
_PR_SET_PDEATHSIG: Final = 1

_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


class Supervisor:
    """Runs the processes of a plan until it is told to stop."""

    def __init__(self, plan: Sequence[LocalProcess], say: Callable[[str], None], stop_seconds: float) -> None:
        """``say`` gets lines for people. ``stop_seconds`` is how long a process may take to end before it is killed."""
        self._plan = {process.name: process for process in plan}
        self._last = plan[-1]
        """The process that finds the others when it starts, and is stopped first."""
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._say = say
        self._stop_seconds = stop_seconds
        self._width = max(len(process.name) for process in plan)
        self._running: dict[str, Process] = {}
        self._unready = list(plan)
        """Those that cannot serve yet, or cannot again."""
        self._others_ready = asyncio.Event()
        """All but the last are ready."""
        self._was_ready = False
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Begin to stop. A second call kills what still runs."""
        if self._stopping.is_set():
            for process in self._running.values():
                process.kill()
        self._stopping.set()

    async def run(self) -> bool:
        """Run until ``stop``; return whether everything was ready once."""
        for name in self._plan:
            self._keepers[name] = asyncio.create_task(self._keep(name))
        announcer = asyncio.create_task(self._announce())
        await self._stopping.wait()
        announcer.cancel()
        await self.remove(self._last.name)
        for name in reversed(list(self._plan)):
            await self.remove(name)
        return self._was_ready

    def add(self, process: LocalProcess) -> None:
        """Start a further process, and keep it running."""
        self._plan[process.name] = process
        self._unready.append(process)
        self._keepers[process.name] = asyncio.create_task(self._keep(process.name))

    def replace(self, process: LocalProcess) -> None:
        """Change how a process is started the next time, and how it is seen that it is ready."""
        self._unready = [each for each in self._unready if each.name != process.name]
        self._plan[process.name] = process
        self._unready.append(process)

    def restart(self, name: str) -> None:
        """Have a process end and be started again."""
        if (running := self._running.get(name)) is not None:
            running.kill()

    async def remove(self, name: str) -> None:
        """Stop a process, and start it no more; its requests in progress end first."""
        keeper = self._keepers.pop(name, None)
        self._plan.pop(name, None)
        self._unready = [each for each in self._unready if each.name != name]
        await self._end(name)
        if keeper is not None:
            keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeper

    @property
    def ready(self) -> set[str]:
        """Names of the processes that can serve."""
        return set(self._plan) - {each.name for each in self._unready}

    async def _keep(self, name: str) -> None:
        """Start a process, and start it again whenever it ends."""
        delay = _FIRST_DELAY
        if name == self._last.name:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_OTHERS_SECONDS):
                    await self._others_ready.wait()
        while not self._stopping.is_set() and (planned := self._plan.get(name)) is not None:
            began = time.monotonic()
            try:
                process = await asyncio.create_subprocess_exec(
                    *planned.command, stdout=PIPE, stderr=STDOUT, limit=_MAX_LINE, start_new_session=True,
                    preexec_fn=_end_with_parent,
                )  # fmt: skip
            except (OSError, ValueError, SubprocessError) as error:  # such as a NUL in a flag
                self._say(f"{planned.name} cannot be started: {error}")
            else:
                self._running[name] = process
                await self._pass_on(name, process)
                status = await process.wait()
                del self._running[name]
                if self._stopping.is_set() or (now := self._plan.get(name)) is None:
                    return
                if now not in self._unready:
                    self._unready.append(now)
                self._say(f"{planned.name} has ended with {_status_text(status)}; it is started again in {delay:g} s")
            await asyncio.sleep(delay)
            delay = _FIRST_DELAY if time.monotonic() - began > _STABLE else min(2 * delay, _LONGEST_DELAY)

    async def _pass_on(self, name: str, process: Process) -> None:
        """Print the lines of a process behind its name."""
        assert process.stdout is not None
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:  # longer than the limit
                continue
            if not line:
                return
            sys.stdout.write(f"{name:{self._width}} | {line.decode(errors='replace').rstrip()}\n")
            sys.stdout.flush()

    async def _announce(self) -> None:
        """Say which processes are ready, as soon as they are."""
        while True:
            for process in list(self._unready):
                # It may have been removed or replaced while it was asked.
                if (
                    process.name in self._running
                    and await asyncio.to_thread(is_ready, process)
                    and process in self._unready
                ):
                    self._unready.remove(process)
                    ready, whole = len(self._plan) - len(self._unready), len(self._plan)
                    state = "stands by" if process.standby else "is ready"
                    self._say(f"{process.name} {state} at {process.address} ({ready} of {whole})")
                    if ready == whole:
                        self._was_ready = True
                        self._say(f"everything is ready: requests go to http://{self._last.address}")
            if self._unready == [self._last]:
                self._others_ready.set()
            await asyncio.sleep(_POLL)

    async def _end(self, name: str) -> None:
        process = self._running.get(name)
        if process is None:
            return
        self._say(f"stopping {name}")
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(self._stop_seconds):
                await process.wait()
        except TimeoutError:
            self._say(f"{name} has not ended within {self._stop_seconds:g} s and is killed")
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def is_ready(process: LocalProcess) -> bool:
    """Whether a process can serve. Blocks for a second at most."""
    host, port = split_address(process.address)
    connection = HTTPConnection(host, port, timeout=1)
    try:
        connection.connect()
        if not process.ready_path:
            return True
        connection.request("GET", process.ready_path)
        return connection.getresponse().status == 200
    except (OSError, HTTPException, ValueError):
        return False
    finally:
        connection.close()


def _end_with_parent() -> None:
    """Have this process ended when the one that started it ends, on Linux."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def _status_text(status: int) -> str:
    return f"status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"

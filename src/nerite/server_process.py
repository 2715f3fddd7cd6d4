"""The server process: loads the models, opens the ports, handles signals, and shuts down gracefully."""

from __future__ import annotations

import asyncio
import atexit
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NoReturn

import uvloop

from nerite.config import open_ports as exposure
from nerite.config.options import ServerOptions
from nerite.core.background import report_unhandled, start_background
from nerite.core.errors import Internal, NeriteError
from nerite.models.loop_watchdog import LoopWatchdog
from nerite.observability.log import log
from nerite.observability.machine import raise_open_file_limit
from nerite.repository.standby import Standby, prepare_models
from nerite.rollouts.declarations import baselines_in
from nerite.server import InferenceServer
from nerite.server_components import ServerComponents
from nerite.transports.start_message import counted, model_table, welcome_lines

_GC_THRESHOLD = 10_000
"""Allocations minus deallocations that trigger the cycle collector. A batch of requests takes some thousand objects."""
_CODE_TEXTS = {
    "INVALID_ARG": "Invalid argument",
    "INTERNAL": "Internal",
    "NOT_FOUND": "Not found",
    "UNAVAILABLE": "Unavailable",
    "UNSUPPORTED": "Unsupported",
    "ALREADY_EXISTS": "Already exists",
}
"""Triton's printed forms of error codes."""
_LEFT_OUT = "    Correct the models that the lines above name, or start without them: --exit-on-error=false"


def run(options: ServerOptions) -> int:
    """Serve until a signal arrives; return the exit status."""
    gc.freeze()  # what is imported stays
    raise_open_file_limit()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            status = runner.run(ServerProcess(options).serve())
    except NeriteError as error:
        _say_why(error.message)
        status = 1
    if "obstore" in sys.modules:
        _exit_without_finalizing(status)
    return status


def _say_why(text: str) -> None:
    """Print why the server does not start: last and plain, as Triton does, and to a log that is read by programs."""
    if log.file or log.format == "json":
        log.error(text)
    print(f"error: {text}", file=sys.__stderr__, flush=True)


def _exit_without_finalizing(status: int) -> NoReturn:
    """End the process, but do not finalize Python.

    A download that was cancelled ends on a thread of obstore, which aborts the process if Python is being finalized.
    """
    atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed
            stream.flush()
    os._exit(status)


StartedServer = Callable[[InferenceServer, Mapping[str, int]], None]
"""Called on the loop when the models are loaded and the ports are open, with the numbers of the ports."""


class ServerProcess:
    """Runs a server from its start to its graceful shutdown."""

    def __init__(self, options: ServerOptions, started: StartedServer | None = None) -> None:
        """With ``started``, the server is embedded in a program.

        It leaves signals and the collector alone, and never ends the process.
        """
        self._options = options
        self._started = started
        self._components = ServerComponents(options)
        self._stop_requested = asyncio.Event()

    async def serve(self) -> int:
        """Start, wait for a signal, and stop; return the exit status. Raises ``NeriteError`` if it cannot start."""
        loop = asyncio.get_running_loop()
        try:
            await self._components.open(loop)
        except NeriteError as error:
            raise self._not_created(error) from None
        loop.set_exception_handler(report_unhandled)
        for number in (signal.SIGINT, signal.SIGTERM) if self._started is None else ():
            loop.add_signal_handler(number, self._signalled)
        server = self._components.create(loop)
        try:
            return await self._run(server, loop)
        finally:
            await self._components.close(server)

    async def _run(self, server: InferenceServer, loop: asyncio.AbstractEventLoop) -> int:
        """Load the models, serve until a stop is requested, and shut down gracefully; return the exit status."""
        start = loop.create_task(self._start(server))
        stop = loop.create_task(self._stop_requested.wait())
        await asyncio.wait((start, stop), return_when=asyncio.FIRST_COMPLETED)
        if not start.done():
            start.cancel()
            return 0
        start.result()
        watchdog = LoopWatchdog(loop, self._options.stall_seconds) if self._options.stall_seconds else None
        try:
            background = start_background(self._components.background_work(server), self._components.loops)
            await stop
            for task in background:
                task.cancel()
            await self._stop(server)
            return 0
        finally:
            if watchdog is not None:
                watchdog.stop()

    def _signalled(self) -> None:
        """Begin a graceful shutdown; on the second signal, exit immediately."""
        if self._stop_requested.is_set():
            os._exit(1)
        self.request_stop()

    def request_stop(self) -> None:
        """Begin a graceful shutdown."""
        self._stop_requested.set()

    def _not_created(self, error: NeriteError) -> NeriteError:
        """Return an error of the start: with Triton's words where it is printed."""
        if self._started is not None:
            return error
        return error.prefixed(f"creating server: {_CODE_TEXTS.get(error.code, error.code.capitalize())} - ")

    async def _start(self, server: InferenceServer) -> None:
        """Load the models and open the ports. Raises ``NeriteError``."""
        components = self._components
        await components.ports.check()
        try:
            if components.tenant_admission.shared is not None:
                await components.tenant_admission.shared.start()
            repository = self._options.repository
            components.rollouts.restore({**self._options.rollout_baselines, **baselines_in(repository.paths)})
            if self._options.repository.standby:
                await components.open_ports()
                await self._stand_by(server)
            is_open = await self._load(server)
            await components.rollouts.start()
        except NeriteError as error:
            raise self._not_created(error) from None
        if not is_open:
            await components.open_ports()
        exposed = exposure.open_ports(self._options)
        if exposed:
            log.warning(f"{exposure.rights(exposed)}. {exposure.remedy(exposed)}")
        if not (server.manager.unread and self._options.repository.control_mode == "none"):
            server.started()  # otherwise the server stays not ready: in mode "none" the repository is not read again
        if server.standby is not None:
            server.standby.ended()
        if self._options.trace.levels and not server.tracing.wants(""):
            if self._options.trace.mode == "opentelemetry":
                reason = "spans contain timestamps, not tensors. Use --trace-config=level=TIMESTAMPS"
            else:
                reason = "no trace file is set. Use --trace-config=triton,file=<path>"
            log.warning(f"nothing is traced: {reason}")
        if self._started is not None:
            self._started(server, components.ports.opened)
            return
        self._print_welcome(server)
        # Objects created so far live long, so the collector need not scan them again. Requests create no cycles.
        gc.collect()
        gc.freeze()
        gc.set_threshold(_GC_THRESHOLD)

    async def _load(self, server: InferenceServer) -> bool:
        """Load the initial models; return whether the ports are open. Raises ``NeriteError`` for errors to exit on.

        If something is made for a model that may take minutes, the ports are opened at once: the server is live and not
        ready, and the index says how far it is.
        """
        is_open = self._options.repository.standby
        loop = asyncio.get_running_loop()
        load = loop.create_task(self._load_initial_models(server))
        preparing = loop.create_task(self._components.maker.preparing.wait())
        await asyncio.wait((load, preparing), return_when=asyncio.FIRST_COMPLETED)
        preparing.cancel()
        if not (load.done() or is_open):
            await self._components.open_ports()
            is_open = True
            log.info(
                "The ports are open before the models are ready, as this may take minutes. POST /v2/repository/index "
                "tells how far it is"
            )
        await load
        return is_open

    async def _stand_by(self, server: InferenceServer) -> None:
        """Prepare the load of the models, and return when it is asked for."""
        server.standby = standby = Standby()
        options = self._options.repository
        chosen = options.control_mode in ("explicit", "demand") and options.startup_models != ("*",)
        wanted = options.startup_models if chosen else None
        loop = asyncio.get_running_loop()
        made = self._components
        preparing = loop.run_in_executor(made.loader, prepare_models, made.repositories, wanted, made.maker.prepare)
        asked = loop.create_task(standby.until_asked())
        await asyncio.wait((preparing, asked), return_when=asyncio.FIRST_COMPLETED)
        if preparing.done():
            names = preparing.result()
            log.info(f"Stands by to load {counted(len(names), 'model')}: POST /v2/repository/wake loads them")
        await asked

    async def _load_initial_models(self, server: InferenceServer) -> None:
        """Load and log the initial models. Raises ``NeriteError`` if that failed and the server must exit on errors."""
        exits = self._options.repository.exit_on_error
        try:
            failures = await self._load_models(server)
            log.table(model_table(await server.repository_index(False)))
        except NeriteError as error:  # a repository cannot be read
            if exits:
                raise
            log.error(error.message)
            server.cannot_read()
            return
        if failures and exits:
            raise failures[0][1] if self._started is not None else Internal(f"failed to load all models\n{_LEFT_OUT}")

    async def _load_models(self, server: InferenceServer) -> list[tuple[str, NeriteError]]:
        """Load the models that the control mode loads at start; return the failures."""
        options = self._options.repository
        failures = [] if server.demand is None else await server.demand.start()
        if options.control_mode == "demand":
            return failures
        names = sorted({name for offered in (await server.manager.offered()).values() for name in offered})
        if options.control_mode == "explicit" and options.startup_models != ("*",):
            names = list(options.startup_models)
        return failures + await server.manager.load_all(names)

    def _print_welcome(self, server: InferenceServer) -> None:
        """Print the start-up message: without log prefixes to a terminal, so that it can be pasted; else to the log."""
        http, opened = self._options.http, self._components.ports.opened
        lines = welcome_lines(server, opened, http.address, self._options.repository, console=http.console)
        if sys.stdout.isatty() and not log.file and log.format != "json":
            print("", *lines, "", sep="\n", file=sys.__stdout__, flush=True)
        else:
            for line in lines:
                log.info(line)

    async def _stop(self, server: InferenceServer) -> None:
        """Shut down gracefully: stop accepting connections, wait for requests in flight, and log them each second.

        Exits the process if the exit timeout expires, or fails what is in flight if it is embedded.
        """
        timeout = self._options.exit_timeout_secs
        deadline = time.monotonic() + timeout
        log.info("Waiting for in-flight requests to complete.")
        server.announce_stop()
        if self._components.batches is not None:
            self._components.batches.runner.stop()
        ports = self._components.ports
        await ports.drain(timeout)
        ports.stop_accepting()
        last_logged = timeout + 1
        while True:
            in_flight = server.in_flight
            if not in_flight and not ports.open_connections:
                break
            left = deadline - time.monotonic()
            if left <= 0:
                log.error("Exit timeout expired. Exiting immediately.")
                if self._started is not None:
                    break
                server.tracing.close()
                logging.shutdown()
                os._exit(1)
            if int(left) < last_logged:
                last_logged = int(left)
                log.info(f"Timeout {last_logged}: Found {len(in_flight)} model versions that have in-flight inferences")
                for model, version, count in in_flight:
                    log.info(f"Model '{model}' (version {version}) has {count} in-flight inferences")
            await asyncio.sleep(min(0.02, left))
        server.stop_accepting()

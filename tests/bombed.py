"""Processes that expensive bodies are sent to, as tests and the benchmark have them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import grpc

from bombs import MODEL, POSTED, Bomb, Cost, costing, send
from nerite.wire import ext_proc as wire
from nerite.wire.health import HealthCheckRequest, HealthCheckResponse
from routing import ROUTER, StandInMember, pool, response, routing
from serving import IDENTITY, NERITE, Serving, program, python_model, serving

_CONSOLE: Final = "/ui/data/state"
_UNKNOWN: Final = "/v1/none"
_LARGEST: Final = 64 << 20
_PIECE: Final = 64 * 1024


class BombTarget:
    """A process that reads bodies."""

    def __init__(self, name: str, paths: tuple[str, ...], running: Serving, *more: int) -> None:
        """``more`` are further processes that read bodies."""
        self.name = name
        self.processes = (running.process.pid, *more)
        self.paths = paths
        self.running = running

    def send(self, path: str, bomb: Bomb) -> int:
        """Send a body; return the status of the answer, 0 for none."""
        return send(self.running.ports["HTTPService"], bomb.request(path))

    def cost(self, path: str, bomb: Bomb) -> Cost:
        """Send a body, and return what it has cost."""
        with costing(*self.processes) as cost:
            self.send(path, bomb)
            return cost()

    def healthy(self) -> bool:
        """Ask whether the process lives."""
        return self.running.ask("GET", "/v2/health/live")[0] == 200


class PickerTarget(BombTarget):
    """A picker, to which a gateway sends the bodies of its clients."""

    def __init__(self, name: str, running: Serving) -> None:
        paths = tuple(path for path in POSTED if path.startswith("/v1/") or path.endswith(("/infer", "/generate")))
        super().__init__(name, paths, running)
        self._channel = grpc.insecure_channel(f"127.0.0.1:{running.ports['ExternalProcessor']}")
        self._process = self._channel.stream_stream(
            "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
            wire.ProcessingRequest.SerializeToString,
            wire.ProcessingResponse.FromString,
        )
        self._check = self._channel.unary_unary(
            "/grpc.health.v1.Health/Check", HealthCheckRequest.SerializeToString, HealthCheckResponse.FromString
        )

    def send(self, path: str, bomb: Bomb) -> int:
        """Send a body as a gateway does; return the status of a refusal, or 200."""

        def messages() -> Iterator[wire.ProcessingRequest]:
            fields = {":path": path, ":method": "POST"} | {
                name.lower(): value for name, _, value in (line.partition(": ") for line in bomb.lines)
            }
            values = [wire.HeaderValue(key=key, raw_value=value.encode()) for key, value in fields.items()]
            yield wire.ProcessingRequest(request_headers=wire.HttpHeaders(headers=wire.HeaderMap(headers=values)))
            for at in range(0, len(bomb.body), _PIECE):
                piece = wire.HttpBody(body=bomb.body[at : at + _PIECE], end_of_stream=at + _PIECE >= len(bomb.body))
                yield wire.ProcessingRequest(request_body=piece)

        status = 200
        with contextlib.suppress(grpc.RpcError):
            for answer in self._process(messages()):
                if answer.HasField("immediate_response"):
                    status = int(answer.immediate_response.status.code)
        return status

    def healthy(self) -> bool:
        """Ask whether the process lives."""
        return bool(self._check(HealthCheckRequest(service="liveness")).status)


def _repository(folder: Path) -> Path:
    python_model(folder / "models", MODEL, IDENTITY)
    return folder / "models"


@contextlib.contextmanager
def server(folder: Path) -> Iterator[BombTarget]:
    """Run a server."""
    flags = (f"--batches={folder / 'batches.db'}", f"--ledger={folder / 'ledger.db'}")
    with serving(_repository(folder), folder / "log", *flags) as running:
        yield BombTarget("server", (*POSTED, _CONSOLE, _UNKNOWN), running)


@contextlib.contextmanager
def fronts(folder: Path) -> Iterator[BombTarget]:
    """Run a server with front processes."""
    with serving(_repository(folder), folder / "log", "--front-processes=2") as running:
        yield BombTarget("fronts", (*POSTED, _CONSOLE, _UNKNOWN), running, *running.fronts().values())


@contextlib.contextmanager
def router(folder: Path) -> Iterator[BombTarget]:
    """Run a router before a member that answers anything."""
    member = StandInMember(lambda asked, connection: response(), models=(MODEL,))
    table = f'{ROUTER}batches = "batches.db"\nledger = "ledger.db"\n'
    try:
        with routing(folder, pool(member.address), router=table) as running:
            yield BombTarget("router", (*POSTED, _UNKNOWN), running)
    finally:
        member.stop()


@contextlib.contextmanager
def picker(folder: Path) -> Iterator[BombTarget]:
    """Run a picker before an endpoint."""
    member = StandInMember(models=(MODEL,))
    file = folder / "picker.toml"
    file.write_text(pool(member.address))
    command = [NERITE, "pick", file, "--port", "0", "--metrics-port", "0"]
    try:
        with program(command, folder / "picker.log") as running:
            yield PickerTarget("picker", running)
    finally:
        member.stop()


TARGETS: Final[Mapping[str, Callable[[Path], contextlib.AbstractContextManager[BombTarget]]]] = {
    "server": server,
    "fronts": fronts,
    "router": router,
    "picker": picker,
}
"""By what they are called."""

"""Ray Serve with stand-ins for engines as its replicas: run in Ray's environment by ``routers.py``.

    python benchmarks/ray_serving.py PORT FOLDER FLAGS

Each replica writes its process id into a file in the folder, whose name is the number of its flags.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import ray  # type: ignore[import-not-found]
from balancing_members import SimulatedMember, SimulatedRequest
from paced_engine import MODEL, PacedEngine, event, prompt_of, usage, whole
from ray import serve  # type: ignore[import-not-found]

Message = dict[str, Any]


class Tokens:
    """Keeps what the engine says until it is sent."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[int] = asyncio.Queue()

    def tokens(self, request: SimulatedRequest, count: int) -> None:
        """Take tokens."""
        self.queue.put_nowait(count)

    def end(self, request: SimulatedRequest) -> None:
        """Take the end."""
        self.queue.put_nowait(0)


class EngineReplica:
    """An engine behind ASGI."""

    def __init__(self, folder: str, flags: list[list[str]]) -> None:
        number = _take_number(Path(folder), len(flags))
        given = dict(each.removeprefix("--").split("=") for each in flags[number])
        self._fixed = float(given["fixed"]) if "fixed" in given else None
        self._engine = PacedEngine(SimulatedMember("m", int(given.get("cached", 1)), float(given.get("slowness", 1))))

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        if not scope["path"].startswith("/v1/") or scope["method"] != "POST":
            await _send(send, json.dumps({"model": MODEL}).encode())
            return
        parts = []
        while True:
            message = await receive()
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                break
        fields = json.loads(b"".join(parts))
        if self._fixed is not None:
            began = time.perf_counter()
            await asyncio.sleep(self._fixed)
            await _send(send, whole(True, "word " * 40, {"served_us": round((time.perf_counter() - began) * 1e6)}))
            return
        sink = Tokens()
        request = self._engine.submit(prompt_of(fields), int(fields["max_tokens"]), sink)
        try:
            if not fields.get("stream"):
                while await sink.queue.get():
                    pass
                await _send(send, whole(True, "word " * request.answer, {"usage": usage(request)}))
                return
            headers = [(b"content-type", b"text/event-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while await sink.queue.get():
                await send({"type": "http.response.body", "body": event(True, " two words"), "more_body": True})
            last = event(True, "", request) + b"data: [DONE]\n\n"
            await send({"type": "http.response.body", "body": last})
        finally:
            self._engine.withdraw(request)


async def _send(send: Any, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _take_number(folder: Path, count: int) -> int:
    """Return the number of the first replica that does not run, and be it."""
    for number in range(count):
        place = folder / str(number)
        try:
            with place.open("x") as file:
                file.write(str(os.getpid()))
            return number
        except FileExistsError:
            if not Path(f"/proc/{place.read_text()}").exists():
                place.write_text(str(os.getpid()))
                return number
    raise RuntimeError(f"there are {count} replicas already")


def main() -> None:
    """Run until SIGTERM."""
    port, folder, flags = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    ray.init(num_cpus=2 * len(flags), include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})

    def build() -> EngineReplica:
        return EngineReplica(folder, flags)

    deployment = serve.deployment(
        num_replicas=len(flags), max_ongoing_requests=1000, health_check_period_s=2, health_check_timeout_s=2
    )(serve.ingress(build)())
    serve.run(deployment.bind(), route_prefix="/", blocking=False)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    ray.shutdown()


if __name__ == "__main__":
    main()

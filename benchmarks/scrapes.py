"""What requests notice of a scrape, with more and more models that were used.

    python benchmarks/scrapes.py [--seconds S] [--rounds N] [--print]

One client asks a model again and again, one request at a time, while curl reads the metrics page: plain, and compressed
as Prometheus reads it. A wait is the longest that a request of one scrape took; without one, the longest in --seconds.
Each is the median of the rounds.
"""

from __future__ import annotations

import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from contestants import Contestant, nerite
from counting import spent
from loads import need
from page import bring_up_to_date, machine

from onnx_models import many

MODELS = (10, 100, 500, 1000)
_BODY = b'{"inputs":[{"name":"INPUT0","shape":[1,16],"datatype":"FP32","data":[%s]}]}' % b",".join([b"1"] * 16)
_WARM = 200


class Client:
    """Asks one model after another, each request when the one before is answered."""

    def __init__(self, server: Contestant) -> None:
        self._socket = socket.create_connection(("127.0.0.1", server.http))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, model: int) -> float:
        """Return the seconds that a request took."""
        head = b"POST /v2/models/m%d/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (model, len(_BODY))
        began = time.perf_counter()
        self._socket.sendall(head + _BODY)
        answer = self._socket.recv(65536)
        took = time.perf_counter() - began
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"a request failed: {answer!r}")
        return took

    def longest_while(self, goes_on: Callable[[], bool]) -> float:
        """Return the longest time that a request took."""
        longest = 0.0
        while goes_on():
            longest = max(longest, self.ask(0))
        return longest


def _curl(server: Contestant, *flags: str) -> list[str]:
    return [
        "curl",
        "-s",
        "-o",
        "/dev/null",
        "-w",
        "%{size_download}",
        *flags,
        f"http://127.0.0.1:{server.metrics}/metrics",
    ]


def _size(server: Contestant, *flags: str) -> int:
    return int(subprocess.run(_curl(server, *flags), capture_output=True, check=True).stdout)


def _row(server: Contestant, count: int, seconds: float, rounds: int) -> str:
    client = Client(server)
    for number in (*range(count), *([0] * _WARM)):
        client.ask(number)

    def scraped(*flags: str) -> float:
        reader = subprocess.Popen(_curl(server, *flags), stdout=subprocess.DEVNULL)
        return client.longest_while(lambda: reader.poll() is None)

    def left_alone() -> float:
        until = time.perf_counter() + seconds
        return client.longest_while(lambda: time.perf_counter() < until)

    ways = (left_alone, scraped, lambda: scraped("--compressed"))
    waits = zip(*([way() for way in ways] for _ in range(rounds)), strict=True)
    costs = []
    for flags in ((), ("--compressed",)):
        before = spent(server)
        sizes = [_size(server, *flags) for _ in range(rounds)]
        costs.append(f"{sizes[0] / 1e6:.2f} MB, {(spent(server) - before) / rounds / 1e6:.0f} ms")
    longest = [f"**{statistics.median(each) * 1000:.1f} ms**" for each in waits]
    return f"| {count:,} | {' | '.join(costs)} | {' | '.join(longest)} |"


def report(seconds: float, rounds: int) -> str:
    """Measure everything; return the section of the page."""
    need("curl")
    lines = [
        f"Measured on {machine()}; {rounds} rounds.",
        "",
        "| models | a plain page | a compressed page | longest wait without a scrape | with a plain one | compressed |",
        "|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for count in MODELS:
            with nerite(f"models-{count}", many(folder / f"models-{count}", count), folder) as server:
                lines.append(_row(server, count, seconds, rounds))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    bring_up_to_date("scrapes", __doc__, report, 0.2)

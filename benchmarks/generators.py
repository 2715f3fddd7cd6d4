"""What `nerite bench` can do beside wrk, and whether it says the same as perf_analyzer.

wrk and the generator of `nerite bench` ask nginx, in turn, for an answer that stands in its configuration.
perf_analyzer and `nerite bench` measure two models, in turn: one takes 4 ms for a batch of up to 4 requests, without a
processor, and is all that the figures depend on; the other gives back what it gets, at once and in the server's own
process, where the client decides.

    python benchmarks/generators.py [--beside wrk|steady|identity] [--seconds S] [--rounds N] [--print]

``--beside`` measures a part of it: beside wrk, or beside perf_analyzer on one of the models.

Needs wrk and nginx (Debian: wrk, nginx-light), and libb64-0d for perf_analyzer, which is installed on first use.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from contestants import ROOT, Contestant, free_ports, identity_repository, nerite, stopped, wait_ready
from loads import SMALL, need
from overload import write_model
from page import command_line, machine, publish

sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from conformance import perf_analyzer  # noqa: E402  the installer that the conformance tests use
from nerite.client.connection import Address  # noqa: E402
from nerite.tools.bench.forms import RoundRobin  # noqa: E402
from nerite.tools.bench.measurement import BenchPlan, BenchTarget, LoadLevel  # noqa: E402
from nerite.tools.bench.session import Fleet  # noqa: E402

_WARM_UP = 0.5
_CONNECTIONS = (1, 32)
_CONCURRENCIES = (1, 8, 32)
_NGINX = """
worker_processes 1; daemon off; pid {folder}/pid; error_log {folder}/log;
events {{ worker_connections 1024; }}
http {{
  access_log off; keepalive_requests 1000000000;
  client_body_temp_path {folder}/1; proxy_temp_path {folder}/2; fastcgi_temp_path {folder}/3;
  uwsgi_temp_path {folder}/4; scgi_temp_path {folder}/5;
  server {{ listen 127.0.0.1:{port}; location / {{ return 200 "hello"; }} }}
}}
"""


@contextmanager
def trivial(folder: Path) -> Iterator[int]:
    """Run nginx; yield its port."""
    port = free_ports()[0]
    (folder / "nginx.conf").write_text(_NGINX.format(folder=folder, port=port))
    log = folder / "log"
    with log.open("wb") as sink:
        process = subprocess.Popen(["nginx", "-p", folder, "-c", folder / "nginx.conf"], stderr=sink)
    with stopped(process):
        wait_ready(port, process, log, "")
        yield port


def wrk(port: int, connections: int, seconds: float) -> float:
    """Return requests a second."""
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds:g}s", f"http://127.0.0.1:{port}/"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return float(_found(r"Requests/sec:\s+([\d.]+)", said))


def generator(port: int, connections: int, seconds: float, processes: int) -> float:
    """Return the same of the generator of ``nerite bench``."""
    request = f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode()
    target = BenchTarget("http", Address.parse(f"127.0.0.1:{port}"))
    with Fleet(BenchPlan(target, RoundRobin((request,))), processes) as fleet:
        fleet.begin(LoadLevel(concurrency=connections))
        time.sleep(_WARM_UP)
        fleet.take()
        began = time.perf_counter()
        time.sleep(seconds)
        records = fleet.take().records
        passed = time.perf_counter() - began
        fleet.end()
    if records.reasons:
        raise RuntimeError(records.reasons[0])
    return len(records.ended) / passed


def by_perf_analyzer(url: str, protocol: str, model: str, concurrency: int, seconds: float) -> tuple[float, float]:
    """Return requests a second, and the mean latency in ms."""
    head, environment = perf_analyzer.command()
    command = [*head, f"-m{model}", f"-i{protocol}", f"-u{url}", f"--shape=INPUT0:{SMALL}", "--async"]
    command += [f"--concurrency-range={concurrency}", f"--measurement-interval={seconds * 1000:.0f}"]
    # As many windows as the other has: one run is one figure here, and rounds say how steady it is.
    command += ["--stability-percentage=999"]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return float(_found(r"Throughput: ([\d.]+) infer", said)), float(_found(r"Avg latency: (\d+) usec", said)) / 1e3


def by_nerite(url: str, protocol: str, model: str, concurrency: int, seconds: float) -> tuple[float, float]:
    """Return the same."""
    with tempfile.NamedTemporaryFile() as file:
        command = [str(Path(sys.executable).with_name("nerite")), "bench", model, "--url", url, "--protocol", protocol]
        command += ["--shape", f"INPUT0:{SMALL}", "--concurrency", str(concurrency), "--json", file.name]
        command += ["--window", str(seconds), "--stability", "999"]
        subprocess.run(command, capture_output=True, text=True, check=True)
        (level,) = json.loads(Path(file.name).read_text())["levels"]
    return level["requests_per_second"], level["latency_ms"]["mean"]


def beside_wrk(seconds: float, rounds: int) -> str:
    """Return the table of the trivial endpoint."""
    lines = ["| | wrk | nerite bench | ratio | with 2 processes | ratio |", "|---|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as name, trivial(Path(name)) as port:
        for connections in _CONNECTIONS:
            contestants: list[Callable[[], float]] = [
                lambda c=connections: wrk(port, c, seconds),
                lambda c=connections: generator(port, c, seconds, 1),
                lambda c=connections: generator(port, c, seconds, 2),
            ]
            runs = [[contestant() for contestant in contestants] for _ in range(rounds)]
            reference, one, two = map(statistics.median, zip(*runs, strict=True))
            lines.append(
                f"| {connections} connections | {reference:,.0f} | {one:,.0f} | **{one / reference:.2f}** "
                f"| {two:,.0f} | {two / reference:.2f} |"
            )
    return "\n".join(lines) + "\n"


def beside_perf_analyzer(model: str, server: Contestant, seconds: float, rounds: int) -> str:
    """Return the table of a model."""
    lines = ["| | perf_analyzer | nerite bench | ratio | mean latency, ms | mean latency, ms | ratio |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for protocol, port in (("http", server.http), ("grpc", server.grpc)):
        for concurrency in _CONCURRENCIES:
            wanted = (f"127.0.0.1:{port}", protocol, model, concurrency, seconds)
            runs = [(*by_perf_analyzer(*wanted), *by_nerite(*wanted)) for _ in range(rounds)]
            rate, latency, our_rate, our_latency = map(statistics.median, zip(*runs, strict=True))
            lines.append(
                f"| {model}, {protocol}, {concurrency} | {rate:,.0f} | {our_rate:,.0f} | **{our_rate / rate:.3f}** "
                f"| {latency:.2f} | {our_latency:.2f} | {our_latency / latency:.3f} |"
            )
    return "\n".join(lines) + "\n"


def _found(pattern: str, said: str) -> str:
    match = re.search(pattern, said)
    if match is None:
        raise RuntimeError(f"no {pattern} in: {said}")
    return match[1]


def main() -> None:
    """Measure and report."""
    parser = command_line(__doc__, 2.0, 5)
    parser.add_argument("--beside", choices=("wrk", "steady", "identity"), help="measure this part alone")
    options = parser.parse_args()
    need("wrk", "nginx")
    head = f"Measured on {machine()}; {options.rounds} rounds of {options.seconds} s; requests a second.\n\n"
    if options.beside in (None, "wrk"):
        publish("generators wrk", head + beside_wrk(options.seconds, options.rounds), options)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model in ("steady", "identity"):
            if options.beside in (None, model):
                inside = model == "identity"
                models = identity_repository(folder / "inside", in_process=True) if inside else write_model(folder)
                with nerite(model, models, folder) as server:
                    table = beside_perf_analyzer(model, server, options.seconds, options.rounds)
                publish(f"generators {model}", head + table, options)


if __name__ == "__main__":
    main()

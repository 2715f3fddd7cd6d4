"""Attributes the processor time of a request to phases, by samples of the server's processes that py-spy takes.

Each load runs once without py-spy, for its processor time, and again while py-spy samples the core and then one front.
A sample belongs to the phase of its innermost frame in Nerite; system calls and OpenSSL, which py-spy sees below it,
count by what they do. A phase has its share of the samples of the main thread, times the measured processor time.
py-spy stops a process where it is. If all processors are busy, it also finds processes that wait for one, mostly in the
system call that has woken up another process, which is "hand over" or "write". So these are upper limits there.

py-spy is a public tool: `pip install py-spy`, outside of this environment if need be; it has to be on the path. It may
need root, or `sysctl kernel.yama.ptrace_scope=0`.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import trustme
from contestants import ASLEEP, Contestant, nerite
from front_loads import FrontLoad, front_processes, loads, tls_flags
from page import machine

PHASES: Final = ("read", "TLS", "parse", "JSON", "decide", "hand over", "answer", "write", "poll", "loop")
"""read, write: system calls on connections of clients. hand over: messages between processes, with their system calls.
decide: routing, validation, queues, batches, statistics. answer: encoding of what is sent to clients. poll: calls
that wait; py-spy counts some of the wait itself. loop: the rest."""
_RATE = 250
"""Samples a second."""
_PATIENCE = 60
"""Seconds that py-spy may take to begin and end."""
_SETTLE = 0.5
_LONGER = 3
"""Seconds for which a load goes on at the most while py-spy begins and ends."""
_FRAME: Final = re.compile(r"^(.*) \((.*?)(?::\d+)?\)$")
_MAIN: Final = "MainThread"
_OURS: Final = "nerite/"
_READS: Final = frozenset(("read", "readv", "recv", "recvfrom", "recvmsg"))
_WRITES: Final = frozenset(("write", "writev", "send", "sendto", "sendmsg", "sendmmsg"))
_POLLS: Final = frozenset(("epoll_wait", "epoll_pwait", "epoll_pwait2", "poll", "select", "sched_yield"))
_TLS: Final = re.compile(r"^(SSL_|EVP_|BIO_|CRYPTO_|tls_|ssl3_|aes|gcm|SSLProtocol|.*SSLProtocol)|_ssl\b")
_TLS_FILES: Final = re.compile(r"libssl|libcrypto|sslproto|_ssl\.c|/ssl\.py$")
_BEGINNINGS: Final = ("nerite/server_process", "nerite/fronts/process", "nerite/cli/", "nerite/workers/child/")
"""Where a loop is run: a sample with nothing below is of the loop."""
_MODULES: Final = (
    ("nerite/transports/http/json_", "JSON"),
    ("nerite/transports/http/large_json", "JSON"),
    ("nerite/fronts/relay", "decide"),
    ("nerite/fronts/catalogue", "decide"),
    ("nerite/fronts/", "hand over"),
    ("nerite/workers/", "hand over"),
    ("nerite/dispatch/busy_poll", "loop"),
    ("nerite/transports/http/infer_response", "answer"),
    ("nerite/transports/http/reply", "answer"),
    ("nerite/transports/access", "decide"),
    ("nerite/transports/limits", "decide"),
    ("nerite/transports/", "parse"),
    ("nerite/http2/outgoing", "answer"),
    ("nerite/http2/", "parse"),
    ("nerite/wire/", "parse"),
    ("nerite/llm/openai/", "parse"),
    ("nerite/", "decide"),
)
"""Phase of each file; the first prefix counts."""
_ANSWERING: Final = frozenset(("respond", "answer", "_answer", "responded", "send_pieces", "send_chunk", "_flush"))
"""Functions below which what parses requests encodes responses."""


def phase(frames: Sequence[str]) -> str:
    """Return the phase of a stack, whose outermost frame comes first."""
    parts = [match.groups() for match in map(_FRAME.match, frames) if match]
    ours = [(function, path) for function, path in parts if path.startswith(_OURS)]
    function, path = ours[-1] if ours else ("", "")
    name = function.rpartition(".")[2]
    beginning = not ours or (path.startswith(_BEGINNINGS) and name in ("main", "run", "_run"))
    found = "loop" if beginning else next(name for prefix, name in _MODULES if path.startswith(prefix))
    below = parts[next((at for at in range(len(parts) - 1, -1, -1) if parts[at][1].startswith(_OURS)), -1) + 1 :]
    if any(_TLS.search(name) or _TLS_FILES.search(file) for name, file in below):
        return "TLS"
    innermost = parts[-1][0] if parts else ""
    if innermost in _POLLS:
        return "poll"
    if found != "hand over" and innermost in _READS:
        return "read"
    if found != "hand over" and innermost in _WRITES:
        return "write"
    if any("json" in file or "json" in name for name, file in below):
        return "JSON"
    if found == "parse" and any(name.rpartition(".")[2] in _ANSWERING for name, _ in ours):
        return "answer"
    return found


def shares(raw: Iterable[str]) -> dict[str, float]:
    """Return the share of each phase in the samples of the main thread, given as lines of py-spy's raw format."""
    counts: Counter[str] = Counter()
    for line in raw:
        stack, _, count = line.rpartition(" ")
        thread, *frames = stack.split(";")
        if _MAIN in thread:
            counts[phase(frames)] += int(count)
    total = counts.total()
    return {name: counts[name] / total if total else 0.0 for name in PHASES}


def sampled(process: int, seconds: int, written: Path) -> dict[str, float]:
    """Return the share of each phase in a process while it is loaded."""
    command = ["py-spy", "record", f"--pid={process}", f"--duration={seconds}", f"--rate={_RATE}"]
    command += ["--format=raw", "--native", "--threads", f"--output={written}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds + _PATIENCE)
    if done.returncode or not written.exists():
        sys.exit(f"py-spy has failed: {done.stderr[-500:]}")
    return shares(written.read_text().splitlines())


def beside(run: Callable[[], object], what: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Return what ``what`` finds while ``run`` goes on."""
    with ThreadPoolExecutor(1) as executor:
        load = executor.submit(run)
        time.sleep(_SETTLE)
        found = what()
        load.result()
    return found


def row(name: str, microseconds: float, found: dict[str, float]) -> str:
    """Return a line of the table."""
    cells = " | ".join(f"{found[each] * microseconds:.1f}" for each in PHASES)
    line = f"| {name} | **{microseconds:.1f}** | {cells} |\n"
    print(line, end="", file=sys.stderr, flush=True)
    return line


def certificates(folder: Path) -> list[str]:
    """Write a certificate; return the flags of a server that uses it."""
    issued = trustme.CA().issue_cert("localhost", "127.0.0.1")
    issued.private_key_and_cert_chain_pem.write_to_path(str(folder / "server.pem"))
    return tls_flags(folder / "server.pem")


def of_load(load: FrontLoad, longer: FrontLoad, server: Contestant, title: str, seconds: int) -> str:
    """Return the lines of a load. ``longer`` is the same, for as long as samples are taken."""
    _, times = load.run(server)
    fronts = front_processes(server)
    processes = [("core" if fronts else "single", server.process.pid, times.core)]
    if fronts:
        processes.append(("front", fronts[0], times.fronts))
    text = ""
    for role, process, microseconds in processes:
        with tempfile.TemporaryDirectory() as folder:
            found = beside(
                lambda: longer.run(server),
                lambda process=process, folder=folder: sampled(process, seconds, Path(folder) / "raw"),  # type: ignore[misc]
            )
        text += row(f"{title}, {role}", microseconds, found)
    return text


def report(options: argparse.Namespace, folder: Path, models: Path) -> str:
    """Measure all loads; return the table."""
    if shutil.which("py-spy") is None:
        sys.exit("install py-spy first: pip install py-spy, or uvx py-spy; and put it on the path")
    text = f"Measured on {machine()}; {options.seconds:g} s each; microseconds of processor time for one.\n\n"
    text += f"| | all | {' | '.join(PHASES)} |\n|---|{'---|' * (len(PHASES) + 1)}\n"
    counts = dict.fromkeys((1, *options.fronts))
    for tls in (False, True):
        flags = certificates(folder) if tls else []
        with ExitStack() as stack:
            servers = [
                stack.enter_context(
                    nerite(f"{count}{tls}", models, folder, ASLEEP, f"--front-processes={count}", *flags)
                )
                for count in counts
            ]
            brief = loads(folder, options.seconds, options.streams, tls=tls)
            lasting = loads(folder, options.seconds + _LONGER, options.streams, tls=tls)
            for load, longer in zip(brief, lasting, strict=True):
                title = f"{load.name}{', TLS' if tls else ''}"
                if not options.only or any(part in title for part in options.only):
                    for server in servers:
                        text += of_load(load, longer, server, title, options.seconds)
    return text

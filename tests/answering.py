"""Whether a server goes on answering others while something is asked of it that takes long."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from serving import PATIENCE, Serving

WITHIN = 3.0
"""Seconds in which a server answers, however busy the machine."""
_WATCH = """
import http.client, select, sys, time

host, patience, longest = sys.argv[1], float(sys.argv[2]), 0.0
print("watching", flush=True)
while not select.select([sys.stdin], [], [], 0.005)[0]:
    began = time.monotonic()
    connection = http.client.HTTPConnection(host, timeout=patience)
    connection.request("GET", "/v2/health/live")
    assert connection.getresponse().status == 200
    connection.close()
    longest = max(longest, time.monotonic() - began)
print(longest, flush=True)
"""


@contextmanager
def answering(server: Serving, within: float = WITHIN) -> Iterator[None]:
    """Fail if a request for the server's health takes longer than ``within`` seconds meanwhile.

    It is asked from another process, as this one may have much to do.
    """
    command = [sys.executable, "-c", _WATCH, server.http, str(PATIENCE)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watch:
        assert watch.stdin is not None and watch.stdout is not None
        assert watch.stdout.readline() == "watching\n"
        try:
            yield
        finally:
            longest = watch.communicate("\n", PATIENCE)[0]
    assert float(longest) < within, f"the server did not answer for {longest} s"

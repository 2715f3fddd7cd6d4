"""The ports that a server would open, and who has them."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterable, Iterator

from nerite.cli.doctor.finding import Finding, Level
from nerite.transports.port_use import used_by


def findings(ports: Iterable[tuple[str, int]]) -> Iterator[Finding]:
    """Yield what is found about each port: the flag that says it, and its number."""
    for flag, port in ports:
        refused = _refusal(port)
        if refused == errno.EADDRINUSE:
            remedy = f"Stop that, or have the server listen elsewhere: {flag}=PORT (0 takes a free one)."
            yield Finding(Level.WARNING, f"port {port} is in use{used_by(port)}", remedy)
        elif refused:
            remedy = f"Ports below 1024 want privileges; or have the server listen elsewhere: {flag}=PORT."
            yield Finding(Level.PROBLEM, f"port {port} cannot be opened: {os.strerror(refused)}", remedy)
        else:
            yield Finding(Level.OK, f"port {port} is free ({flag})")


def _refusal(port: int) -> int:
    """Return the number of the error with which a port cannot be opened; 0 if it can be."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError as error:
            return error.errno or errno.EINVAL
    return 0

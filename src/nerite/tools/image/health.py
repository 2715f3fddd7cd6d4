"""The health check of the image: whether the server or the router that the container runs is ready.

``python -m nerite.tools.image.health`` reads the command line of process 1, and so knows its ports without a setting.
The exit status is 0 if it is ready, 1 if not.
"""

from __future__ import annotations

import http.client
import os
import ssl
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from nerite.cli.command import UsageError
from nerite.cli.command_line import NERITE, TRITON, HelpRequested, parse_command_line
from nerite.config.options import ServerOptions
from nerite.core.errors import NeriteError
from nerite.tools.image.entry import SAGEMAKER_MODEL, start_command

_READY: Final = "/v2/health/ready"
_SECONDS: Final = 4.0
"""Less than Docker waits for the check."""
_ANYWHERE: Final = ("", "0.0.0.0", "::")


class HealthProbe(NamedTuple):
    """A request that is answered with 200 when the server is ready."""

    host: str
    port: int
    path: str
    tls: bool = False


def main(command_line: Path = Path("/proc/1/cmdline")) -> int:
    """Ask the process with this command line whether it is ready; print why not; return the exit status."""
    try:
        words = command_line.read_text().rstrip("\0").split("\0")
        probe = probe_of(words, os.environ)
        status = _ask(probe)
    except (UsageError, HelpRequested, NeriteError, ValueError, OSError, http.client.HTTPException) as error:
        print(f"not ready: {error or type(error).__name__}")
        return 1
    print(f"{'ready' if status == 200 else 'not ready'}: port {probe.port} answered {probe.path} with {status}")
    return 0 if status == 200 else 1


def probe_of(words: Sequence[str], environment: Mapping[str, str]) -> HealthProbe:
    """Return the probe for the process that was started with these words.

    Raises ``ValueError`` if they are not a command of Nerite's that has a port for it, ``UsageError`` and
    ``NeriteError`` if they are wrong.
    """
    for index, word in enumerate(words):
        rest = words[index + 1 :]
        match word.rpartition("/")[2], rest:
            case "tritonserver", _:
                return _of_server(parse_command_line(rest, environment, TRITON).options)
            case "serve", _:
                command = start_command(rest, environment, SAGEMAKER_MODEL)
                environment = {**environment, **command.environment}
                return _of_server(parse_command_line(command.arguments, environment, NERITE).options)
            case "nerite", ["serve", *flags]:
                return _of_server(parse_command_line(flags, environment, NERITE).options)
            case "nerite", ["route" | "up", *_]:
                return _of_router(rest[1:])
    raise ValueError(f"process 1 is neither a server nor a router: {' '.join(words)}")


def _of_server(options: ServerOptions) -> HealthProbe:
    if options.http.enabled:
        tls = options.http.tls.enabled or options.http.tls.mutual
        return HealthProbe(_host(options.http.address), options.http.port, _READY, tls)
    if options.sagemaker.enabled:
        return HealthProbe(_host(options.sagemaker.address), options.sagemaker.port, "/ping")
    if options.vertex.enabled:
        return HealthProbe(_host(options.vertex.address), options.vertex.port, options.vertex.health_route)
    raise ValueError("the server has no port for HTTP: use a health check of your own, or none (--no-healthcheck)")


def _of_router(arguments: Sequence[str]) -> HealthProbe:
    from nerite.cluster.cluster_file import read_cluster  # takes as long as all other imports

    file = next((each for each in arguments if not each.startswith("-")), "")
    router = read_cluster(file).router
    return HealthProbe(_host(router.address), router.http_port, _READY)


def _host(address: str) -> str:
    return "127.0.0.1" if address in _ANYWHERE else address


def _ask(probe: HealthProbe) -> int:
    if probe.tls:
        # Its own server, on an address of this container: whom the certificate names does not matter.
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            probe.host, probe.port, timeout=_SECONDS, context=context
        )
    else:
        connection = http.client.HTTPConnection(probe.host, probe.port, timeout=_SECONDS)
    try:
        connection.request("GET", probe.path)
        return connection.getresponse().status
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main())

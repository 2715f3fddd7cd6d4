"""What a server tells when it has started: its models, where it listens, and what to try."""

from __future__ import annotations

from collections.abc import Mapping

from nerite import __version__
from nerite.config.open_ports import is_loopback
from nerite.config.options import RepositoryOptions
from nerite.observability.log_records import LogTable
from nerite.server import InferenceServer
from nerite.transports.http.openapi import example_command


def welcome_lines(
    server: InferenceServer, ports: Mapping[str, int], address: str, repository: RepositoryOptions, *, console: bool
) -> list[str]:
    """Return the start-up message: served models, open ``ports`` by service, and commands to try the server."""
    host = "localhost" if address in ("0.0.0.0", "::", "") else address
    ready = [record for record in server.manager.records if record.running]
    failed = [
        record.name
        for record in server.manager.records
        if record.states and not (record.running or record.routed or record.gone)
    ]
    lines = [f"Nerite {__version__} serves {counted(len(ready), 'model')}" + _failures(failed)]
    services = [f"{name} {host}:{port}" for name, port in ports.items()]
    lines.append(f"Listening: {', '.join(services)}")
    if is_loopback(address):
        lines.append("Reachable from this machine only. For others, start it with --address=0.0.0.0 (docs/access.md)")
    if "HTTP" not in ports:
        return lines
    url = f"http://{host}:{ports['HTTP']}"
    if repository.control_mode == "demand":
        lines.append(
            f"Models are loaded when they are asked for (docs/demand.md): {url}/v2/repository/index lists them"
        )
    if ready:
        lines.append(f"Try it: {example_command(ready, url)}")
        lines.append(f"A command for each model: {url}/v2/docs")
    elif repository.control_mode == "explicit":
        lines.append(f"Load a model: curl -X POST {url}/v2/repository/models/NAME/load")
    elif repository.control_mode != "demand":
        then = "it is loaded automatically" if repository.control_mode == "poll" else "restart the server"
        lines.append(f"Put a model into {repository.paths[0]}, and {then}. {server.control_note}")
    if console:
        lines.append(f"Web console: {url}/ui")
    return lines


def counted(number: int, noun: str) -> str:
    """Return a number with a noun in singular or plural."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _failures(names: list[str]) -> str:
    return f"; {counted(len(names), 'model')} failed to load: {', '.join(names)} (reasons above)" if names else ""


def model_table(index: list[dict[str, str]]) -> LogTable:
    """Return a table of all models with their state, and the reason for those that are not ready."""
    rows = []
    for entry in index:
        state = entry.get("state", "")
        reason = entry.get("reason", "")
        rows.append((entry["name"], entry.get("version", "-"), f"{state}: {reason}" if reason else state))
    return LogTable(("Model", "Version", "Status"), rows)

"""What a server says when it is up: what it serves, where, and a command that tries it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nerite import __version__
from nerite.config.exposure import is_loopback
from nerite.config.options import RepositoryOptions
from nerite.repository.model_record import ModelRecord
from nerite.server import InferenceServer
from nerite.transports.http.docs.sample import sample_of
from nerite.transports.http.docs.served import served_by


def lines(
    server: InferenceServer, ports: Mapping[str, int], address: str, repository: RepositoryOptions, *, console: bool
) -> list[str]:
    """Return the lines, given the port of each service that is open, and whether there is a console."""
    host = "localhost" if address in ("0.0.0.0", "::", "") else address
    ready = [record for record in server.manager.records if record.running]
    failed = [record.name for record in server.manager.records if record.states and not record.running]
    said = [f"Nerite {__version__} serves {_count(len(ready), 'model')}" + _failures(failed)]
    where = [f"{name} {host}:{port}" for name, port in ports.items()]
    said.append(f"Listening: {', '.join(where)}")
    if is_loopback(address):
        said.append("Only this machine gets in. For others, start it with --address=0.0.0.0 (docs/access.md)")
    if "HTTP" not in ports:
        return said
    url = f"http://{host}:{ports['HTTP']}"
    if ready:
        said.append(f"Try it: {_command(ready, url)}")
        said.append(f"A command for each model: {url}/v2/docs")
    elif repository.control_mode == "explicit":
        said.append(f"Load a model: curl -X POST {url}/v2/repository/models/NAME/load")
    else:
        when = "it is loaded then" if repository.control_mode == "poll" else "start the server again"
        said.append(f"Put a model into {repository.paths[0]}, and {when}. {server.control_note}")
    if console:
        said.append(f"Watch it: {url}/ui")
    return said


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _failures(names: list[str]) -> str:
    return f"; {_count(len(names), 'model')} failed to load: {', '.join(names)} (why: see above)" if names else ""


def _command(records: Sequence[ModelRecord], url: str) -> str:
    """Return a curl command that works: an inference by the first model for which that is short, else a look at one."""
    served = [each for each in served_by(records) if each.latest and each.paths]
    for each in served:
        sample = sample_of(each.signature, decoupled=each.decoupled)
        if sample is not None and sample.brief:
            return sample.curl(url + each.paths[0])
    return f"curl {url}/v2/models/{records[0].name}"

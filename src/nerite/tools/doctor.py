"""``nerite doctor``: checks limits, ports, access and repositories, and reports these and the machine's findings."""

from __future__ import annotations

import argparse
import errno
import os
import resource
import shutil
import socket
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Final

from nerite.cli.command import UsageError, new_parser, show, show_json, status_of
from nerite.cli.command_line import NERITE, TRITON, EntryPoint, HelpRequested, parse_command_line
from nerite.config import open_ports as exposure
from nerite.config.options import ServerOptions
from nerite.core.text import terminal_width
from nerite.tools import check, doctor_expected, doctor_gpus, doctor_machine
from nerite.tools.add.destination import add_repositories, repositories_of
from nerite.tools.doctor_expected import Expected
from nerite.tools.doctor_machine import MB, DoctorFinding, FindingLevel, note, ok, problem, size, warning
from nerite.transports.tcp import owner_of, port_in_use_text

# Access: who can control the servers that listen on these ports, and a server that is started here.

_PROC: Final = Path("/proc")
_SERVED: Final = "--model-repository=."
"""Placeholder for the repositories that a command line must name."""


def access_findings(ports: Iterable[int], proc: Path = _PROC) -> Iterator[DoctorFinding]:
    """Yield a finding about a server started with the environment's flags, and about each server on the ports."""
    try:
        here = parse_command_line([_SERVED], os.environ, NERITE).options
        yield of_options(here, "a server started here by nerite serve")
    except UsageError as error:
        remedy = "Correct the NERITE_* environment variables, or the file that NERITE_OPTIONS_FILE names."
        yield problem(f"nerite serve cannot start here: {' '.join(error.text.split())}", remedy)
    owners = {owner.pid for owner in (owner_of(port, proc) for port in ports) if owner is not None}
    for pid in sorted(owners):
        options = options_of(proc / str(pid))
        if options is not None:
            yield of_options(options, f"the server with pid {pid}")


def of_options(options: ServerOptions, server: str) -> DoctorFinding:
    """Return the finding about access to a server with these options."""
    ports = exposure.open_ports(options)
    if not ports:
        return ok(f"{server}: no other machine can control it without a key")
    return warning(f"{server}: {exposure.rights(ports)}", exposure.remedy(ports))


def options_of(process: Path) -> ServerOptions | None:
    """Return the options of a server process; None if it is not a server or cannot be read."""
    try:
        words = [os.fsdecode(word) for word in (process / "cmdline").read_bytes().split(b"\0")[:-1]]
        pairs = (os.fsdecode(pair).partition("=") for pair in (process / "environ").read_bytes().split(b"\0"))
        environment = {name: value for name, _, value in pairs if name}
    except OSError:
        return None
    started = _server_command(words)
    try:
        return None if started is None else parse_command_line(started[1], environment, started[0]).options
    except (UsageError, HelpRequested, OSError):  # its options file may have been removed
        return None


def _server_command(words: Sequence[str]) -> tuple[EntryPoint, Sequence[str]] | None:
    """Return the program that a server was started as, and its arguments; None if the words do not start a server."""
    for at, word in enumerate(words):
        name = PurePath(word).name
        if name == "tritonserver":
            return TRITON, words[at + 1 :]
        if name in ("nerite", "nerite.cli.main") and words[at + 1 : at + 2] == ["serve"]:
            return NERITE, words[at + 2 :]
    return None


# Ports that a server would open.


def port_findings(ports: Iterable[tuple[str, int]]) -> Iterator[DoctorFinding]:
    """Yield a finding about each port, given as its flag and its number."""
    for flag, port in ports:
        refused = _refusal(port)
        if refused == errno.EADDRINUSE:
            remedy = f"Stop that process, or use another port: {flag}=PORT (0 picks a free one)."
            yield warning(f"port {port} is in use{port_in_use_text(port)}", remedy)
        elif refused:
            remedy = f"Ports below 1024 require privileges. Use another port: {flag}=PORT."
            yield problem(f"port {port} cannot be opened: {os.strerror(refused)}", remedy)
        else:
            yield ok(f"port {port} is free ({flag})")


def _refusal(port: int) -> int:
    """Return the errno of the error if a port cannot be opened, or 0."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError as error:
            return error.errno or errno.EINVAL
    return 0


# Model repositories: a summary of what ``nerite check`` finds.

_MAX_MISTAKES: Final = 5
"""Maximum number of mistakes that are reported individually."""


def repository_findings(repositories: Sequence[str]) -> Iterator[DoctorFinding]:
    """Yield findings about the mistakes in model repositories."""
    found = check.examine(repositories)
    mistakes = [mistake for each in found for mistake in each.mistakes]
    for mistake in mistakes[:_MAX_MISTAKES]:
        where = ":".join(map(str, filter(None, (mistake.file, mistake.line, mistake.column))))
        yield problem(f"{where}: {mistake.message}".partition("\n")[0], mistake.remedy)
    if len(mistakes) > _MAX_MISTAKES:
        remedy = f"nerite check {' '.join(repositories)}"
        yield problem(f"and {len(mistakes) - _MAX_MISTAKES} more mistakes", remedy)
    for each in found:
        for remark in each.remarks:
            if remark.level != "note":
                yield warning(f"{each.directory}: {remark.text}")
    models = len({each.directory for each in found if each.model})
    if models and not mistakes:
        yield ok(f"{models} model{'' if models == 1 else 's'} without mistakes")


# Resource limits of a process: open files, processes, shared memory.

_MIN_FILES: Final = 4096
_MIN_PROCESSES: Final = 512
_MIN_SHARED_MEMORY: Final = 256 * MB
_SHARED_MEMORY: Final = Path("/dev/shm")


def limit_findings() -> Iterator[DoctorFinding]:
    """Yield findings about resource limits."""
    yield of_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    if hasattr(resource, "RLIMIT_NPROC"):
        yield of_processes(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    if hasattr(resource, "RLIMIT_MEMLOCK"):
        yield of_locked(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    if _SHARED_MEMORY.is_dir():
        yield of_shared(shutil.disk_usage(_SHARED_MEMORY).total, shutil.disk_usage(_SHARED_MEMORY).free)
    if not hasattr(os, "memfd_create"):
        yield note("memfd_create is missing: tensors pass to workers in temporary files")


def of_files(most: int) -> DoctorFinding:
    """Return the finding about open files. ``most`` is the hard limit, to which the server raises its own."""
    remedy = "ulimit -Hn 65536, or docker run --ulimit nofile=65536: each connection is an open file."
    return _limit("open files", most, _MIN_FILES, remedy)


def of_processes(most: int) -> DoctorFinding:
    """Return the finding about the number of processes and threads."""
    remedy = "ulimit -u unlimited: each worker is a process, and frameworks start threads in each."
    return _limit("processes and threads", most, _MIN_PROCESSES, remedy)


def of_locked(most: int) -> DoctorFinding:
    """Return the finding about locked memory, which Nerite itself does not use."""
    return ok(f"locked memory: {'unlimited' if most < 0 else size(most)}")


def of_shared(total: int, free: int) -> DoctorFinding:
    """Return the finding about the free space in /dev/shm."""
    text = f"/dev/shm: {size(free)} free of {size(total)}"
    if free < _MIN_SHARED_MEMORY:
        remedy = (
            "docker run --shm-size=1g, if clients pass tensors in shared memory or models start processes of their "
            "own. The server itself does not use it."
        )
        return note(text, remedy)
    return ok(text)


def _limit(what: str, most: int, minimum: int, remedy: str) -> DoctorFinding:
    """Return the finding about a limit ``most``, where a negative number is unlimited; warn if below ``minimum``."""
    text = f"{what}: {'unlimited' if most < 0 else most}"
    return warning(text, remedy) if 0 <= most < minimum else ok(text)


_EPILOG = """\
Each finding is followed by its remedy. A warning is likely to cause trouble; a problem prevents something from working.
The exit status is 0 if there are no problems, 1 if there are, 2 for an invalid command line.

Examples:
  nerite doctor
  nerite doctor ./models --http-port 9000
  nerite doctor ./models --json
"""
_MAX_WIDTH: Final = 110


def run(arguments: Sequence[str]) -> int:
    """Examine the machine; return the exit status."""
    return status_of("nerite doctor", lambda: _examine(_parser().parse_args(arguments)))


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("nerite doctor", "Diagnose present and likely problems on this machine.", _EPILOG)
    add_repositories(parser, "model repositories to check as well")
    defaults = ServerOptions()
    for service, port in (("http", defaults.http), ("grpc", defaults.grpc), ("metrics", defaults.metrics)):
        parser.add_argument(
            f"--{service}-port",
            metavar="PORT",
            type=int,
            default=port.port,
            help=f"port that a server would use for {service} (default: %(default)s)",
        )
    expected = parser.add_argument_group(
        "what was asked for", "With one of these only that is checked, as in an init container of a pod."
    )
    expected.add_argument("--expect-gpus", metavar="N", type=_number, help="this node has N GPUs")
    expected.add_argument("--expect-nvlink", action="store_true", help="NVLink connects each pair of them")
    expected.add_argument("--expect-rdma", metavar="N", type=_number, help="this node has N active RDMA ports or more")
    expected.add_argument(
        "--expect-nodes", metavar="N", type=_number, help="this pod's group of a LeaderWorkerSet has N nodes"
    )
    expected.add_argument(
        "--wait", metavar="SECONDS", type=_number, default=0, help="time for the nodes' names to become known"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as a JSON list")
    return parser


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of 0 or more")
    return int(text)


def _examine(options: argparse.Namespace) -> int:
    expected = Expected(
        options.expect_gpus, options.expect_nvlink, options.expect_rdma, options.expect_nodes, options.wait
    )
    if expected._replace(wait=0) != Expected():
        if repositories_of(options):
            raise UsageError("repositories are not checked beside --expect-…: use two commands")
        return _tell({"expected": list(doctor_expected.findings(expected))}, as_json=options.json)
    ports = [(f"--{service}-port", getattr(options, f"{service}_port")) for service in ("http", "grpc", "metrics")]
    parts: dict[str, list[DoctorFinding]] = {
        "machine": list(doctor_machine.machine_findings()),
        "limits": list(limit_findings()),
        "installed": list(doctor_machine.findings()),
        "ports": list(port_findings(ports)),
        "access": list(access_findings(port for _, port in ports)),
        "gpus": list(doctor_gpus.findings()),
    }
    if repositories := repositories_of(options):
        parts["repositories"] = list(repository_findings(repositories))
    return _tell(parts, as_json=options.json)


def _tell(parts: Mapping[str, Sequence[DoctorFinding]], *, as_json: bool) -> int:
    """Print the findings; return the exit status."""
    if as_json:
        show_json([{"part": part, **each._asdict()} for part, found in parts.items() for each in found])
    else:
        show("\n".join([*(_report(part, found) for part, found in parts.items()), _summary(parts)]))
    return 1 if any(each.level is FindingLevel.PROBLEM for found in parts.values() for each in found) else 0


def _report(part: str, found: Sequence[DoctorFinding]) -> str:
    """Return the findings of a part as text."""
    width = min(terminal_width(), _MAX_WIDTH)
    lines = [part]
    for each in found:
        lines += _wrapped(each.text, f"  {each.level:9}", width)
        for line in filter(None, each.remedy.splitlines()):
            lines += _wrapped(line.strip(), " " * 13, width)
    return "\n".join(lines)


def _wrapped(text: str, first: str, width: int) -> list[str]:
    rest = " " * len(first)
    wrap = textwrap.TextWrapper(width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
    wrap.break_long_words = False
    return wrap.wrap(text)


def _summary(parts: Mapping[str, Sequence[DoctorFinding]]) -> str:
    levels = [each.level for found in parts.values() for each in found]
    problems, warnings = levels.count(FindingLevel.PROBLEM), levels.count(FindingLevel.WARNING)
    return f"{_count(problems, 'problem')}, {_count(warnings, 'warning')}."


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"

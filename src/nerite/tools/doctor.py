"""``nerite doctor``: the parts of the examination, and how the findings are told."""

from __future__ import annotations

import argparse
import errno
import os
import resource
import shutil
import socket
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Final

from nerite.cli.command import new_parser, show, show_json, status_of
from nerite.cli.errors import HelpRequested, UsageError
from nerite.cli.serve import NERITE, TRITON, Manner
from nerite.config import options as exposure
from nerite.config.options import ServerOptions
from nerite.observability.log_records import terminal_width
from nerite.tools import check, doctor_machine
from nerite.tools.doctor_machine import MB, DoctorFinding, FindingLevel, size
from nerite.transports.tcp import owner_of, port_in_use_text

# Who may command the servers that run on the ports of a server, and one that is started here.

_PROC: Final = Path("/proc")
_SERVED: Final = "--model-repository=."
"""Stands for the repositories that a command line has to name."""


def access_findings(ports: Iterable[int], proc: Path = _PROC) -> Iterator[DoctorFinding]:
    """Yield what is found about a server that has the environment's flags, and about each on one of the ports."""
    try:
        yield of_options(NERITE.parse([_SERVED], os.environ).options, "a server that is started here by nerite serve")
    except UsageError as error:
        remedy = "Correct the variables NERITE_…, or the file that NERITE_OPTIONS_FILE names."
        yield DoctorFinding(
            FindingLevel.PROBLEM, f"nerite serve cannot start here: {' '.join(error.text.split())}", remedy
        )
    owners = {owner.pid for owner in (owner_of(port, proc) for port in ports) if owner is not None}
    for pid in sorted(owners):
        options = options_of(proc / str(pid))
        if options is not None:
            yield of_options(options, f"the server with pid {pid}")


def of_options(options: ServerOptions, server: str) -> DoctorFinding:
    """Return what there is to say of a server with these options."""
    ports = exposure.open_ports(options)
    if not ports:
        return DoctorFinding(FindingLevel.OK, f"{server}: no other machine can command it without a key")
    return DoctorFinding(FindingLevel.WARNING, f"{server}: {exposure.rights(ports)}", exposure.remedy(ports))


def options_of(process: Path) -> ServerOptions | None:
    """Return the options that a process serves with; None if it is no server, or is not ours to look at."""
    try:
        words = [os.fsdecode(word) for word in (process / "cmdline").read_bytes().split(b"\0")[:-1]]
        pairs = (os.fsdecode(pair).partition("=") for pair in (process / "environ").read_bytes().split(b"\0"))
        environment = {name: value for name, _, value in pairs if name}
    except OSError:
        return None
    started = _started(words)
    try:
        return None if started is None else started[0].parse(started[1], environment).options
    except (UsageError, HelpRequested, OSError):  # its options file may be gone
        return None


def _started(words: Sequence[str]) -> tuple[Manner, Sequence[str]] | None:
    """Return the name under which a server was started, and its arguments; None if the words start none."""
    for at, word in enumerate(words):
        name = PurePath(word).name
        if name == "tritonserver":
            return TRITON, words[at + 1 :]
        if name in ("nerite", "nerite.cli.main") and words[at + 1 : at + 2] == ["serve"]:
            return NERITE, words[at + 2 :]
    return None


# The ports that a server would open, and who has them.


def port_findings(ports: Iterable[tuple[str, int]]) -> Iterator[DoctorFinding]:
    """Yield what is found about each port: the flag that says it, and its number."""
    for flag, port in ports:
        refused = _refusal(port)
        if refused == errno.EADDRINUSE:
            remedy = f"Stop that, or have the server listen elsewhere: {flag}=PORT (0 takes a free one)."
            yield DoctorFinding(FindingLevel.WARNING, f"port {port} is in use{port_in_use_text(port)}", remedy)
        elif refused:
            remedy = f"Ports below 1024 want privileges; or have the server listen elsewhere: {flag}=PORT."
            yield DoctorFinding(FindingLevel.PROBLEM, f"port {port} cannot be opened: {os.strerror(refused)}", remedy)
        else:
            yield DoctorFinding(FindingLevel.OK, f"port {port} is free ({flag})")


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


# The model repositories, as ``nerite check`` sees them, in a few lines.

_MOST: Final = 5
"""Mistakes that are told."""


def repository_findings(repositories: Sequence[str]) -> Iterator[DoctorFinding]:
    """Yield what is wrong with them."""
    found = check.examine(repositories)
    mistakes = [mistake for each in found for mistake in each.mistakes]
    for mistake in mistakes[:_MOST]:
        where = ":".join(map(str, filter(None, (mistake.file, mistake.line, mistake.column))))
        yield DoctorFinding(FindingLevel.PROBLEM, f"{where}: {mistake.message}".partition("\n")[0], mistake.remedy)
    if len(mistakes) > _MOST:
        remedy = f"nerite check {' '.join(repositories)}"
        yield DoctorFinding(FindingLevel.PROBLEM, f"and {len(mistakes) - _MOST} mistakes more", remedy)
    for each in found:
        for remark in each.remarks:
            if remark.level != "note":
                yield DoctorFinding(FindingLevel.WARNING, f"{each.directory}: {remark.text}")
    models = len({each.directory for each in found if each.model})
    if models and not mistakes:
        yield DoctorFinding(FindingLevel.OK, f"{models} model{'' if models == 1 else 's'} without a mistake")


# What the system lets a process have: open files, processes, shared memory.

_FEW_FILES: Final = 4096
_FEW_PROCESSES: Final = 512
_LITTLE_SHARED: Final = 256 * MB
_SHARED: Final = Path("/dev/shm")


def limit_findings() -> Iterator[DoctorFinding]:
    """Yield what is found here."""
    yield of_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    if hasattr(resource, "RLIMIT_NPROC"):
        yield of_processes(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    if hasattr(resource, "RLIMIT_MEMLOCK"):
        yield of_locked(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    if _SHARED.is_dir():
        yield of_shared(shutil.disk_usage(_SHARED).total, shutil.disk_usage(_SHARED).free)
    if not hasattr(os, "memfd_create"):
        yield DoctorFinding(FindingLevel.NOTE, "there is no memfd_create: tensors cross to workers in temporary files")


def of_files(most: int) -> DoctorFinding:
    """Say how many files may be open; the server raises its own limit as far as it may, which is ``most``."""
    remedy = "ulimit -Hn 65536, or docker run --ulimit nofile=65536: each connection is an open file."
    return _number("open files", most, _FEW_FILES, remedy)


def of_processes(most: int) -> DoctorFinding:
    """Say how many processes and threads there may be."""
    remedy = "ulimit -u unlimited: each worker is a process, and frameworks start threads in each."
    return _number("processes and threads", most, _FEW_PROCESSES, remedy)


def of_locked(most: int) -> DoctorFinding:
    """Say how much memory may be locked; nothing of ours wants that."""
    return DoctorFinding(FindingLevel.OK, f"locked memory: {'unlimited' if most < 0 else size(most)}")


def of_shared(total: int, free: int) -> DoctorFinding:
    """Say how much room there is in /dev/shm."""
    text = f"/dev/shm: {size(free)} free of {size(total)}"
    if free < _LITTLE_SHARED:
        remedy = (
            "docker run --shm-size=1g, if clients pass tensors in shared memory, or models run several processes: "
            "the server itself keeps nothing there."
        )
        return DoctorFinding(FindingLevel.NOTE, text, remedy)
    return DoctorFinding(FindingLevel.OK, text)


def _number(what: str, most: int, few: int, remedy: str) -> DoctorFinding:
    """Say how many there may be of something, and that ``few`` are too few. Below 0: any number."""
    text = f"{what}: {'unlimited' if most < 0 else most}"
    return (
        DoctorFinding(FindingLevel.WARNING, text, remedy) if 0 <= most < few else DoctorFinding(FindingLevel.OK, text)
    )


_EPILOG = """\
Below each finding stands what is to be done. A warning will be in somebody's way; a problem keeps things from working.
The exit status is 0 if there is no problem, 1 if there is one, 2 for a wrong command line.

Examples:
  nerite doctor
  nerite doctor ./models --http-port 9000
  nerite doctor ./models --json
"""
_WIDEST: Final = 110


def run(arguments: Sequence[str]) -> int:
    """Examine the machine; return the exit status."""
    return status_of("nerite doctor", lambda: _examine(_parser().parse_args(arguments)))


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("nerite doctor", "Find what is wrong on this machine, or soon will be.", _EPILOG)
    parser.add_argument("repositories", metavar="REPOSITORY", nargs="*", help="model repositories to look at, too")
    defaults = ServerOptions()
    for service, port in (("http", defaults.http), ("grpc", defaults.grpc), ("metrics", defaults.metrics)):
        parser.add_argument(
            f"--{service}-port",
            metavar="PORT",
            type=int,
            default=port.port,
            help=f"the port that a server would have for {service}; %(default)s unless given",
        )
    parser.add_argument("--json", action="store_true", help="print the findings as a JSON list")
    return parser


def _examine(options: argparse.Namespace) -> int:
    ports = [(f"--{service}-port", getattr(options, f"{service}_port")) for service in ("http", "grpc", "metrics")]
    parts: dict[str, list[DoctorFinding]] = {
        "machine": list(doctor_machine.machine_findings()),
        "limits": list(limit_findings()),
        "installed": list(doctor_machine.findings()),
        "ports": list(port_findings(ports)),
        "access": list(access_findings(port for _, port in ports)),
        "gpus": list(doctor_machine.gpu_findings()),
    }
    if options.repositories:
        parts["repositories"] = list(repository_findings(options.repositories))
    if options.json:
        show_json([{"part": part, **each._asdict()} for part, found in parts.items() for each in found])
    else:
        show("\n".join([*(_told(part, found) for part, found in parts.items()), _summary(parts)]))
    return 1 if any(each.level is FindingLevel.PROBLEM for found in parts.values() for each in found) else 0


def _told(part: str, found: Sequence[DoctorFinding]) -> str:
    """Return a part for people."""
    width = min(terminal_width(), _WIDEST)
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


def _summary(parts: dict[str, list[DoctorFinding]]) -> str:
    levels = [each.level for found in parts.values() for each in found]
    problems, warnings = levels.count(FindingLevel.PROBLEM), levels.count(FindingLevel.WARNING)
    return f"{_count(problems, 'problem')}, {_count(warnings, 'warning')}."


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"

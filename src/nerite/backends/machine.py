"""Resources of this machine, and the frameworks on it: cores, imports, exceptions, standard error."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from nerite.backends.interface import InstanceContext
from nerite.core.errors import NeriteError, NotInstalled
from nerite.core.memory import memory_file

_TELEMETRY_SWITCH: Final = "ORT_DISABLE_TELEMETRY"
_CGROUP = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Return the number of cores that CPU affinity and the container's CPU quota allow: at least 1.

    Frameworks size their thread pools by the machine: in a container with two of 64 cores they start 64 threads.
    Never raises: a limit that cannot be read does not apply.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(affinity, core_quota() or affinity))


def core_share(instance: InstanceContext) -> int:
    """Return an instance's share of its cores if all instances of the model get the same: at least 1."""
    usable = usable_cores()
    return max(1, min(len(instance.cores) or usable, usable) // instance.sharing)


def core_quota(cgroup: Path = _CGROUP) -> int:
    """Return the CPU quota of ``cgroup``, by default this process's, in cores, rounded up; 0 without a quota."""
    try:
        if (unified := cgroup / "cpu.max").exists():
            limit, period = unified.read_text().split()
        else:
            limit = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text()
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text()
        return max(0, -(-int(limit) // int(period)))
    except (OSError, ValueError):
        # No cgroup, or "max": no quota.
        return 0


@contextmanager
def importing(package: str, extra: str) -> Iterator[None]:
    """Import a framework in the ``with`` block. Raises ``NotInstalled`` with the ``extra`` to install if that fails."""
    try:
        yield
    except Exception as error:  # also OSError and others, of libraries that it looks for
        raise NotInstalled(f"unable to import {package} ({error}): pip install 'nerite[{extra}]'") from error


@contextmanager
def without_telemetry() -> Iterator[None]:
    """Import a framework in the ``with`` block, so that it collects no telemetry unless the environment says otherwise.

    Some builds of ONNX Runtime open a file for that when they are imported.
    """
    unset = _TELEMETRY_SWITCH not in os.environ
    if unset:
        os.environ[_TELEMETRY_SWITCH] = "1"
    try:
        yield
    finally:
        if unset:
            os.environ.pop(_TELEMETRY_SWITCH, None)


@contextmanager
def translating(translate: Callable[[Exception], NeriteError]) -> Iterator[None]:
    """Raise what a framework raises in the ``with`` block as its translation; ``NeriteError`` passes unchanged."""
    try:
        yield
    except NeriteError:
        raise
    except Exception as error:  # a framework may raise anything
        raise translate(error) from error


_one_at_a_time = threading.Lock()


@contextmanager
def capture_stderr(chatter: re.Pattern[bytes], log: logging.Logger) -> Iterator[list[str]]:
    """Capture file descriptor 2, to which some frameworks write regardless of their settings.

    At the end, lines that begin like ``chatter`` are logged at level debug and added to the list; all others are
    passed on. For short periods only, because all threads of the process share the descriptor.
    """
    found: list[str] = []
    with _one_at_a_time, open(memory_file(), "r+b") as captured:
        kept = os.dup(2)
        os.dup2(captured.fileno(), 2)
        try:
            yield found
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            captured.seek(0)
            for line in captured.read().splitlines(keepends=True):
                if chatter.match(line):
                    found.append(line.decode(errors="replace").rstrip())
                    log.debug("%s", found[-1])
                else:
                    os.write(2, line)

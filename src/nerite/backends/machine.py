"""How many processor cores this process, or an instance of a model, may really use."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from nerite.backends.interface import InstanceContext
from nerite.core.memory import memory_file

_CGROUP = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Return the cores that affinity and the container's CPU quota leave us: at least 1.

    Frameworks size their thread pools by the machine, so in a container with two of its 64 cores they start 64
    threads. Never raises: what cannot be read does not limit.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(affinity, core_quota() or affinity))


def core_share(instance: InstanceContext) -> int:
    """Return the cores that are an instance's own, if each instance of its model takes as many: at least 1."""
    usable = usable_cores()
    return max(1, min(len(instance.cores) or usable, usable) // instance.sharing)


def core_quota(cgroup: Path = _CGROUP) -> int:
    """Return the CPU quota of ``cgroup``, ours by default, in whole cores, rounded up; 0 where there is none."""
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


# Whether a framework that is installed was built for GPUs. Found by its files: no framework is imported for it.


class _Sign(NamedTuple):
    """A file that a build for GPUs has, and words in it that one for processors lacks."""

    package: str
    file: str
    words: str = ""


_SIGNS: Final[dict[str, _Sign]] = {
    "onnxruntime": _Sign("onnxruntime", "capi/libonnxruntime_providers_cuda.so"),
    "pytorch": _Sign("torch", "lib/libtorch_cuda.so"),
    "tensorflow": _Sign("tensorflow", "python/platform/build_info.py", "('is_cuda_build', True)"),
}


def can_use_gpus(backend: str) -> bool:
    """Return False for a backend whose framework, as it is installed, computes on processors alone."""
    sign = _SIGNS.get(backend)
    if sign is None:
        return True
    spec = importlib.util.find_spec(sign.package)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        file = Path(folder, sign.file)
        if file.is_file() and (not sign.words or sign.words in file.read_text()):
            return True
    return False


# What frameworks write to the file descriptor of standard error, past every setting of theirs.

_one_at_a_time = threading.Lock()


@contextmanager
def capture_stderr(chatter: re.Pattern[bytes], log: logging.Logger) -> Iterator[list[str]]:
    """Log lines that begin like ``chatter`` as details, and let all others through, a little later than written.

    For moments only: all threads of the process write there. The list has the lines that were logged, afterwards.
    """
    found: list[str] = []
    with _one_at_a_time, open(memory_file(), "r+b") as said:
        kept = os.dup(2)
        os.dup2(said.fileno(), 2)
        try:
            yield found
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            said.seek(0)
            for line in said.read().splitlines(keepends=True):
                if chatter.match(line):
                    found.append(line.decode(errors="replace").rstrip())
                    log.debug("%s", found[-1])
                else:
                    os.write(2, line)

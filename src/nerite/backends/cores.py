"""How many processor cores this process, or an instance of a model, may really use."""

from __future__ import annotations

import os
from pathlib import Path

from nerite.backends.interface import InstanceContext

_CGROUP = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Return the cores that affinity and the container's CPU quota leave us: at least 1.

    Frameworks size their thread pools by the machine, so in a container with two of its 64 cores they start 64
    threads. Never raises: what cannot be read does not limit.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(affinity, quota() or affinity))


def share(instance: InstanceContext) -> int:
    """Return the cores that are an instance's own, if each instance of its model takes as many: at least 1."""
    usable = usable_cores()
    return max(1, min(len(instance.cores) or usable, usable) // instance.sharing)


def quota(cgroup: Path = _CGROUP) -> int:
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

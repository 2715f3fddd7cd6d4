"""The memory that a server may use: the machine's, or the container's part of it."""

from __future__ import annotations

from pathlib import Path

from nerite.observability.machine import usable_memory

GB = 2**30


def test_memory_that_may_be_used(tmp_path: Path) -> None:
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    assert usable_memory(meminfo, cgroup) == 0
    meminfo.write_text(f"MemTotal: {64 * GB // 1024} kB\nMemAvailable: 5 kB\n")
    assert usable_memory(meminfo, cgroup) == 64 * GB
    cgroup.mkdir()
    (cgroup / "memory.max").write_text("max\n")
    assert usable_memory(meminfo, cgroup) == 64 * GB
    (cgroup / "memory.max").write_text(f"{2 * GB}\n")
    assert usable_memory(meminfo, cgroup) == 2 * GB
    meminfo.unlink()
    assert usable_memory(meminfo, cgroup) == 2 * GB


def test_memory_as_the_first_version_of_cgroups_tells_it(tmp_path: Path) -> None:
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    meminfo.write_text(f"MemTotal: {64 * GB // 1024} kB\n")
    (cgroup / "memory").mkdir(parents=True)
    (cgroup / "memory" / "memory.limit_in_bytes").write_text(f"{1 << 62}\n")
    assert usable_memory(meminfo, cgroup) == 64 * GB
    (cgroup / "memory" / "memory.limit_in_bytes").write_text(f"{GB}\n")
    assert usable_memory(meminfo, cgroup) == GB

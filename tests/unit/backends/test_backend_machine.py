"""Cores that a process may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from nerite.backends import machine


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "max 100000\n"}, 0),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0),
        ({}, 0),
    ],
)
def test_the_quota_of_a_container(tmp_path: Path, files: dict[str, str], quota: int) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert machine.core_quota(tmp_path) == quota


def test_a_quota_limits_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(machine, "core_quota", lambda: 3)
    assert machine.usable_cores() == 3
    monkeypatch.setattr(machine, "core_quota", lambda: 0)
    assert machine.usable_cores() == 64

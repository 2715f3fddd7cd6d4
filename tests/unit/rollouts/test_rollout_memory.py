"""Whether memory holds baseline and candidate at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nerite.config.model_config import ModelConfig, ModelInstanceGroup
from nerite.observability.machine import available_memory
from nerite.rollouts.memory import (
    GpuRoom,
    MemoryRoom,
    VersionMemory,
    estimate,
    measured_differences,
    read_version,
    room_differences,
    size_text,
)

MIB = 1 << 20
BASE = VersionMemory(100 * MIB, 300 * MIB, {})


def test_memory_grows_with_the_files() -> None:
    assert estimate(BASE, VersionMemory(200 * MIB, 0, {})) == 600 * MIB
    assert estimate(VersionMemory(100, 300 * MIB, {}), VersionMemory(500, 0, {})) == 300 * MIB
    assert estimate(VersionMemory(100 * MIB, 0, {}), VersionMemory(200 * MIB, 0, {})) == 200 * MIB


@pytest.mark.parametrize(
    ("room", "blocked"),
    [
        (MemoryRoom(700 * MIB), False),
        (MemoryRoom(500 * MIB), True),
        (MemoryRoom(0), False),
        (MemoryRoom(700 * MIB, limit=900 * MIB), False),
        (MemoryRoom(700 * MIB, limit=899 * MIB), True),
    ],
)
def test_host_memory(room: MemoryRoom, blocked: bool) -> None:
    found = list(room_differences(BASE, VersionMemory(200 * MIB, 0, {}), room))
    assert [each.severity.value for each in found] == ["blocks"] * blocked
    assert [each.candidate for each in found] == ["about 600 MiB"] * blocked


@pytest.mark.parametrize(
    ("candidate", "free", "blocked"),
    [
        (VersionMemory(2000, 0, {0: 2}), 4000, False),
        (VersionMemory(2000, 0, {0: 2}), 3999, True),
        (VersionMemory(2000, 0, {1: 2}), 0, False),
        (VersionMemory(10, 0, {0: 1}, 0.9), 9000, False),
        (VersionMemory(10, 0, {0: 1}, 0.9), 8999, True),
    ],
)
def test_memory_of_gpus(candidate: VersionMemory, free: int, blocked: bool) -> None:
    baseline = VersionMemory(2000, 0, candidate.gpus)
    found = list(room_differences(baseline, candidate, MemoryRoom(0, [GpuRoom(0, 10_000, free)])))
    assert [each.subject for each in found] == ["memory of GPU 0"] * blocked


def test_measured_memory() -> None:
    assert list(measured_differences(100, 149, 0)) == []
    assert [each.severity.value for each in measured_differences(100, 151, 0)] == ["warns"]
    assert [each.severity.value for each in measured_differences(200, 100, 0)] == ["notes"]
    assert [each.severity.value for each in measured_differences(100, 100, 199)] == ["blocks"]
    assert list(measured_differences(0, 0, 1)) == []


def test_what_an_engine_reserves(tmp_path: Path) -> None:
    groups = (ModelInstanceGroup(kind="KIND_GPU", count=1, gpus=(0, 1)), ModelInstanceGroup(kind="KIND_CPU", count=3))
    config = ModelConfig(backend="vllm", instance_group=groups)
    (tmp_path / "model.json").write_text(json.dumps({"gpu_memory_utilization": 0.4}))
    size = (tmp_path / "model.json").stat().st_size
    assert read_version(tmp_path, config, 7) == VersionMemory(size, 7, {0: 1, 1: 1}, 0.4)
    (tmp_path / "model.json").write_text("[]")
    assert read_version(tmp_path, config, 7).reserved == 0.9
    assert read_version(None, ModelConfig(backend="python"), 7) == VersionMemory(0, 7, {})


def test_sizes_for_people() -> None:
    assert [size_text(size) for size in (5, 5 * MIB, 3 << 30)] == ["5 B", "5 MiB", "3.0 GiB"]


def test_memory_that_a_container_can_still_take(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable: 60 kB\n")
    assert available_memory(meminfo, tmp_path) == 60 * 1024, "no limit"
    (tmp_path / "memory.max").write_text("40960")
    (tmp_path / "memory.current").write_text("30720")
    assert available_memory(meminfo, tmp_path) == 10 * 1024
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 5120\n")
    assert available_memory(meminfo, tmp_path) == 15 * 1024, "cached files can go"
    (tmp_path / "memory.max").write_text("max")
    assert available_memory(meminfo, tmp_path) == 60 * 1024
    assert available_memory(tmp_path / "none", tmp_path) == 0

"""What models take: measured, estimated, and kept over restarts."""

from __future__ import annotations

import asyncio
import logging
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nerite.core.memory import OwnMemory, resident_of, resident_of_family
from nerite.observability.gpus import Gpu, GpuLibrary, GpuMemory
from nerite.repository.catalogue import ModelFingerprint
from nerite.repository.memory_use import (
    LoadGrowth,
    MeasuredLoad,
    MeasuredLoads,
    MemoryGauge,
    MemoryUse,
    ModelMemory,
    files_estimate,
    fingerprint_digest,
    grown,
    measurements_file,
)

GIB = 1 << 30
SEEN = ModelFingerprint((("labels.txt", 10, 1),), {1: (("model.onnx", 1000, 1),), 2: (("model.onnx", 500, 1),)})


class Library(GpuLibrary):
    """Two GPUs, of which the second is used by a process of another container."""

    def __init__(self) -> None:
        super().__init__(None)
        self.processes = {0: {10: 4 * GIB, 11: 2 * GIB}, 1: dict[int, int]()}

    def memory(self, gpu: Gpu) -> GpuMemory | None:
        return GpuMemory(20 * GIB, (6 + gpu.number) * GIB)

    def memory_of_processes(self, gpu: Gpu) -> dict[int, int]:
        return self.processes[gpu.number]


GPUS = [Gpu(number, f"GPU-{number}", "G", 9.0, None) for number in range(2)]


def test_the_memory_of_a_process_is_counted_once_with_its_children() -> None:
    """In processes of their own: what pytest's process shares with those that it has started changes meanwhile."""
    child = "import sys; block = b'x' * (32 << 20); print('grown', flush=True); sys.stdin.read(); print(len(block))"
    family = f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {child!r}]); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", f"{family}; child.wait()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "grown\n"
        own, together = resident_of(process.pid), resident_of_family(process.pid)
        process.communicate()
    assert 0 < own < 24 << 20
    assert 32 << 20 < together - own < 56 << 20


def test_a_budget_is_a_share_of_what_there_is_unless_it_is_given() -> None:
    gauge = MemoryGauge(Library(), GPUS)
    assert gauge.budget(GIB, 0) == {"host": GIB, "GPU 0": 18 * GIB, "GPU 1": 18 * GIB}
    assert gauge.budget(GIB, 50 * GIB)["GPU 0"] == 20 * GIB, "not more than there is"
    assert gauge.budget(0, 0)["host"] > GIB // 8


def test_the_growth_of_a_process_is_that_of_the_load() -> None:
    growth = LoadGrowth()
    growth.begin("a", 10, used=1000)
    assert growth.end("a", used=1250) == 250
    growth.begin("b", 10, used=5000)
    assert growth.end("b", used=4000) == 0, "another model was unloaded meanwhile"


def test_loads_at_once_share_the_growth_by_the_size_of_their_files() -> None:
    growth = LoadGrowth()
    growth.begin("large", 299, used=0)
    growth.begin("small", 99, used=30)
    assert growth.end("small", used=430) == 100
    assert growth.end("large", used=500) == 30 + 300 + 70


def test_what_has_grown_less_than_its_files_is_estimated() -> None:
    assert OwnMemory.of_load(200, 100) == (200, False)
    assert OwnMemory.of_load(99, 100) == (100, True)


def test_workers_are_measured_by_their_share_of_each_process() -> None:
    gauge = MemoryGauge(Library(), GPUS)
    size = gauge.of_workers({10: 1.0, 11: 0.5})
    assert size["GPU 0"] == 5 * GIB
    assert "GPU 1" not in size, "the driver does not tell: what has grown counts there"


def test_a_growth_is_that_of_each_place() -> None:
    before, after = MemoryUse(100, {"GPU 0": 10, "GPU 1": 5}), MemoryUse(130, {"GPU 0": 50, "GPU 1": 5})
    assert grown(before, after) == {"host": 30, "GPU 0": 40}
    assert grown(after, before) == {}


def test_freed_memory_is_given_back_when_the_server_keeps_much_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    uses = [100, 1000]
    gauge = MemoryGauge(Library(), [], lambda: uses[0])
    trims: list[int] = []
    monkeypatch.setattr(gauge, "trim", lambda: trims.append(uses.pop(0)))
    with ThreadPoolExecutor(1) as loader:
        memory = ModelMemory(gauge, list, loader)
        memory.here["a"] = 500
        assert memory.of_server(MemoryUse(640, {})) == 40
        assert not memory.is_trim_due(MemoryUse(640, {}), 1000)
        assert memory.is_trim_due(MemoryUse(660, {}), 1000)
        assert asyncio.run(memory.trim()).process == 1000
    assert trims == [100]
    assert not memory.is_trim_due(MemoryUse(1040, {}), 1000), "what remained would not be given back the next time"
    assert memory.is_trim_due(MemoryUse(1060, {}), 1000)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library of GNU keeps freed blocks")
def test_large_blocks_are_given_back_when_they_are_freed() -> None:
    code = """
import ctypes, os, sys
from nerite.core.memory import memory_of
from nerite.observability.gpus import GpuLibrary
from nerite.repository.memory_use import MemoryGauge
if sys.argv[1:]:
    MemoryGauge(GpuLibrary(None), []).return_large_blocks()
library = ctypes.CDLL(None)
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
before = memory_of(os.getpid())
for size in (30, 4, 4, 4, 4, 4, 4, 4):
    block = library.malloc(ctypes.c_size_t(size << 20))
    ctypes.memset(block, 1, size << 20)
    last = library.malloc(ctypes.c_size_t(1000))  # on top of the block: it cannot be given back with the heap's end
    library.free(block)
print(memory_of(os.getpid()) - before)
"""
    kept, returned = (
        int(subprocess.run([sys.executable, "-c", code, *flag], check=True, capture_output=True, timeout=60).stdout)
        for flag in ([], ["large"])
    )
    assert returned < 1 << 20
    assert kept > 2 << 20


def test_before_the_first_load_the_files_tell() -> None:
    assert files_estimate(SEEN, [1], [], worker=False) == {"host": 1010}
    worker = files_estimate(SEEN, [1, 2], [0, 1], worker=True)
    assert worker["host"] > 1510
    assert (worker["GPU 0"], worker["GPU 1"]) == (1510, 1510)


def test_measurements_outlive_the_server_as_long_as_the_files_are_the_same(tmp_path: Path) -> None:
    digest = fingerprint_digest(SEEN)
    kept = MeasuredLoads(tmp_path / "state" / "memory.json")
    kept.read()
    kept.put("m", MeasuredLoad(digest, {"host": 5}, 2.5))
    kept.write(kept.encoded())
    again = MeasuredLoads(kept.path)
    again.read()
    assert again.get("m", digest) == MeasuredLoad(digest, {"host": 5}, 2.5)
    changed = ModelFingerprint((), SEEN.versions)
    assert fingerprint_digest(changed) != digest
    assert again.get("m", fingerprint_digest(changed)) is None


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b'{"models": {"m": 1}}', b'{"models": {"m": ["d", {"host": "x"}, 1]}}']
)
def test_a_spoiled_file_is_as_good_as_none(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "memory.json"
    file.write_bytes(content)
    kept = MeasuredLoads(file)
    with caplog.at_level(logging.WARNING):
        kept.read()
    assert "are measured again" in caplog.text
    assert kept.get("m", "d") is None


def test_a_directory_that_cannot_be_written_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    kept = MeasuredLoads(tmp_path / "file" / "memory.json")
    with caplog.at_level(logging.WARNING):
        kept.write(b"{}")
        kept.write(b"{}")
    assert caplog.text.count("cannot be kept") == 1


def test_each_set_of_repositories_has_a_file(tmp_path: Path) -> None:
    environment = {"XDG_STATE_HOME": str(tmp_path)}
    one, same, other = (measurements_file(paths, environment) for paths in (["a", "b"], ["b", "a"], ["c"]))
    assert one == same != other
    assert one.parent == tmp_path / "nerite" / "memory"

"""The stand-in for CUDA within the process of a test."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from nerite.devices import cuda, exchange
from nerite.devices.devices import Devices

STAND_IN = Path(__file__).resolve().parent / "stand_ins" / "cuda"


@pytest.fixture
def cuda_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Put the stand-in in the place of CUDA's bindings; yield what this process has of it."""

    def forget() -> None:
        cuda.runtime.cache_clear()
        exchange.available.cache_clear()
        for name in [name for name in sys.modules if name.partition(".")[0] in ("cuda", "device_arrays")]:
            del sys.modules[name]

    monkeypatch.setenv("STAND_IN_CUDA", str(tmp_path / "gpu-memory"))
    monkeypatch.setattr(exchange, "OF_THREAD", exchange.ThreadStreams())
    monkeypatch.syspath_prepend(str(STAND_IN))
    forget()
    from cuda.stand_in.process import process

    yield process()
    forget()


@pytest.fixture
def cuda_frameworks(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """Let frameworks that are built for processors stand for ones on the GPUs; return what this process has of CUDA."""
    monkeypatch.setenv("STAND_IN_CUDA_FRAMEWORKS", "1")
    monkeypatch.setattr(cuda, "FRAMEWORK_DEVICE", "cpu")
    monkeypatch.setattr(cuda, "DLPACK_DEVICE", 1)
    return request.getfixturevalue("cuda_process")


def with_devices(test: Callable[[Devices], Coroutine[Any, Any, None]], **settings: Any) -> None:
    """Run a test on a loop, with the two GPUs of the stand-in. ``settings`` are those of ``Devices``."""

    async def run() -> None:
        devices = Devices([0, 1], asyncio.get_running_loop(), **settings)
        try:
            await test(devices)
        finally:
            await asyncio.to_thread(devices.close)

    asyncio.run(run())

"""How many threads the libraries in a worker are told to start."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nerite.backends import machine
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.core.errors import InvalidArgument
from nerite.core.thread_binding import adopt_thread_count
from nerite.instances.placement import thread_variables

ALL = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
POLLING = {"OPENBLAS_THREAD_TIMEOUT": "20"}


@pytest.fixture(autouse=True)
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of eight cores."""
    monkeypatch.setattr(machine, "usable_cores", lambda: 8)


def told(value: str | None = None) -> ModelContext:
    parameters = {} if value is None else {"INTRA_OP_THREAD_COUNT": {"string_value": value}}
    return ModelContext("m", 1, Path(), {"parameters": parameters})


@pytest.mark.parametrize(
    ("sharing", "pinned", "threads"), [(1, 0, "8"), (2, 0, "4"), (3, 0, "2"), (20, 0, "1"), (1, 3, "3"), (2, 3, "1")]
)
def test_each_instance_has_its_share(sharing: int, pinned: int, threads: str) -> None:
    instance = InstanceContext("m_0", cores=tuple(range(pinned)), sharing=sharing)
    assert thread_variables(told(), instance, {}) == POLLING | dict.fromkeys(ALL, threads)


def test_the_model_s_own_word_comes_first() -> None:
    instance = InstanceContext("m_0")
    assert thread_variables(told("3"), instance, {"OMP_NUM_THREADS": "5"}) == POLLING | dict.fromkeys(ALL, "3")
    assert thread_variables(told("0"), instance, {}) == {}


def test_then_the_environment_s() -> None:
    instance = InstanceContext("m_0")
    assert thread_variables(told(), instance, {"OMP_NUM_THREADS": "5"}) == POLLING
    assert thread_variables(told(), instance, {"OMP_NUM_THREADS": "5", "OPENBLAS_THREAD_TIMEOUT": "26"}) == {}
    assert "MKL_NUM_THREADS" not in thread_variables(told(), instance, {"MKL_NUM_THREADS": "5"})


@pytest.mark.parametrize("value", ["many", "-1", "1.5"])
def test_a_number_that_is_none(value: str) -> None:
    with pytest.raises(
        InvalidArgument, match=rf"^parameter 'INTRA_OP_THREAD_COUNT' of model 'm' is '{value}'; it must"
    ):
        thread_variables(told(value), InstanceContext("m_0"), {})


def test_numpy_has_been_loaded_already() -> None:
    """In a process of its own: what it changes is for the whole process."""
    script = """
import ctypes, numpy
from nerite.core.thread_binding import adopt_thread_count
for count in ("1", "3"):
    adopt_thread_count({"OPENBLAS_NUM_THREADS": count})
    (path,) = {line.split()[-1] for line in open("/proc/self/maps") if "openblas" in line}
    print(ctypes.CDLL(path).scipy_openblas_get_num_threads64_())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "3"]


@pytest.mark.parametrize(
    ("variables", "loaded", "adopted", "polling"),
    [
        ({}, "1", None, "20"),
        ({"OMP_NUM_THREADS": "2"}, "2", "2", "20"),
        ({"OPENBLAS_THREAD_TIMEOUT": "26"}, "1", None, "26"),
    ],
)
def test_numpy_is_loaded_with_one_thread_first(
    variables: dict[str, str], loaded: str, adopted: str | None, polling: str
) -> None:
    """Unless a variable says how many; and what is started later does not get to know of it."""
    script = """
import ctypes, os
from nerite.core.thread_binding import adopt_thread_count, one_thread
def count():
    (path,) = {line.split()[-1] for line in open("/proc/self/maps") if "openblas" in line}
    return ctypes.CDLL(path).scipy_openblas_get_num_threads64_()
with one_thread():
    import numpy
    print(os.environ["OPENBLAS_THREAD_TIMEOUT"])
print(count(), os.environ.get("OPENBLAS_NUM_THREADS"))
adopt_thread_count(os.environ)
print(count())
"""
    ours = {name: value for name, value in os.environ.items() if name not in ALL} | variables
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=ours)
    cores = str(len(os.sched_getaffinity(0)))
    assert done.stdout.split() == [polling, loaded, "None", adopted or cores]


def test_where_nothing_is_to_be_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda path: pytest.fail(f"{path} was asked"))
    adopt_thread_count({"OPENBLAS_NUM_THREADS": "1"}, tmp_path / "no maps")
    (tmp_path / "maps").write_text("7f00-7f01 r-xp 00000000 08:01 1 /usr/lib/libc.so.6\n")
    adopt_thread_count({"OPENBLAS_NUM_THREADS": "1"}, tmp_path / "maps")

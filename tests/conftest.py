"""Settings that all tests share."""

import gc
import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

import tensorflow_models
from cuda_process import cuda_frameworks, cuda_process
from kept import kept

__all__ = ["cuda_frameworks", "cuda_process"]

# Machines are busy: a slow example is no failure. In CI every run tries the same examples.
settings.register_profile("nerite", deadline=None)
settings.register_profile("ci", settings.get_profile("nerite"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "nerite")

# Machines differ in their GPUs: a test has those that it brings, which are a stand-in's, and so have its servers.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

# What a shell starts in the background ignores Ctrl-C, and so would every program that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return how many processes share the tests: two more than there are processors, as tests often wait."""
    return (os.cpu_count() or 1) + 2


def pytest_sessionstart() -> None:
    """Collect tests without the garbage collector, which would go through all of them again and again."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Take what collecting made out of the garbage collector's sight, which each of its runs would go through again."""
    gc.collect()
    gc.freeze()
    gc.enable()


_file = [""]
"""The file that is under test."""


def pytest_runtest_logstart(nodeid: str) -> None:
    """Do the same for what a file of tests has imported: frameworks are millions of objects, which stay."""
    file = nodeid.partition("::")[0]
    if _file[0] != file:
        _file[0] = file
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give those more time that may have to wait until TensorFlow has made its models."""
    for item in items:
        if "tensorflow_artifacts" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def tensorflow_artifacts(pytestconfig: pytest.Config) -> Path:
    """The folder with models that TensorFlow has made, kept from one run to the next."""
    return kept(pytestconfig, "tensorflow-models", tensorflow_models.ingredients(), tensorflow_models.make)

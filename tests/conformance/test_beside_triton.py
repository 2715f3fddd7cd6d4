"""Triton's own server still runs Python models where Nerite is installed beside nvidia-pytriton."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import urllib.request
import venv
from pathlib import Path

import pytest

import triton_python_backend_utils
from conformance import triton_installation
from conformance.servers import START_SECONDS, listening
from forked_programs import start_program
from ports import free_ports
from serving import IDENTITY, pbtxt, python_model

PACKAGES = Path(triton_python_backend_utils.__file__).parents[1]
NAMES = """
def initialize(self, args):
    print("its module:", pb_utils.__file__, flush=True)
"""


def test_a_python_model_of_triton(tmp_path: Path) -> None:
    try:
        installed = triton_installation.installation()
    except triton_installation.TritonUnavailable as reason:
        pytest.skip(f"Triton: {reason}")
    both = tmp_path / "both"
    venv.create(both, with_pip=False)
    place = triton_installation.site(both)
    (place / "triton.pth").write_text(str(triton_installation.site(installed)))
    for name in ("nerite", "triton_python_backend_utils", "c_python_backend_utils"):
        (place / name).symlink_to(PACKAGES / name)
    head, environment = triton_installation.command(installed, tmp_path / "backends")
    environment["PATH"] = f"{both / 'bin'}:{environment['PATH']}"
    python_model(tmp_path / "models", "identity", NAMES + IDENTITY, pbtxt(batch=0, more=""))
    http, grpc, metrics = free_ports(3)
    ports = [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}"]
    log = tmp_path / "log"
    with log.open("wb") as sink:
        command = [*head, f"--model-repository={tmp_path / 'models'}", *ports]
        process = start_program(command, sink, environment=environment, session=True)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not listening(metrics):  # which Triton opens last
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        body = {"inputs": [{"name": "INPUT0", "shape": [2], "datatype": "FP32", "data": [1, 2]}]}
        asked = urllib.request.Request(f"http://127.0.0.1:{http}/v2/models/identity/infer", json.dumps(body).encode())
        with urllib.request.urlopen(asked, timeout=30) as answer:
            assert json.load(answer)["outputs"][0]["data"] == [1.0, 2.0]
        assert f"its module: {tmp_path}/backends/python/triton_python_backend_utils.py" in log.read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_only_triton_has_the_binding_built_in() -> None:
    assert "c_python_backend_utils" not in sys.builtin_module_names

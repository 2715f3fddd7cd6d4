"""Memory of real processes."""

from __future__ import annotations

import os
import subprocess
import sys

from nerite.core import memory

HOLD = "import sys; held = b'x' * (32 << 20); print(flush=True); sys.stdin.read()"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HOLD!r}])"


def test_a_process_and_those_that_it_has_started() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        parent.stdout.readline()
        own, family = memory.memory_of(parent.pid), memory.memory_of_family(parent.pid)
        assert 0 < own < 32 << 20
        assert family - own > 32 << 20
        parent.stdin.close()
        parent.wait(20)
    assert memory.memory_of(os.getpid()) > 1 << 20
    assert memory.memory_of_family(parent.pid) == 0

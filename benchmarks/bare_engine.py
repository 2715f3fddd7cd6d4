"""An engine by itself, in a process of its own: its continuous batching without a server or a text.

    python benchmarks/bare_engine.py FOLDER THREADS

``FOLDER`` is what OpenVINO GenAI loads. For each line on its input, a file of requests, how many of them run at a time,
and whether the tokens are heard of, it runs them and prints tokens a second, and the medians of milliseconds to the
first token and between two. Whoever hears of them is one more process, which reads of each step by a socket: the least
that any server costs.
"""

from __future__ import annotations

import itertools
import json
import socket
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from token_client import Figures


class BareEngine:
    """The engine, from another process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, requests: Path, streams: int, *, heard: bool = False) -> Figures:
        """Have it answer the requests of a file, ``streams`` at a time."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(requests, streams, int(heard), file=self._process.stdin, flush=True)
        return Figures(*json.loads(self._process.stdout.readline()))


@contextmanager
def bare_engine(folder: Path, threads: int) -> Iterator[BareEngine]:
    """Start the engine."""
    command = [sys.executable, "-W", "ignore", __file__, str(folder), str(threads)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield BareEngine(process)


_LISTENER = """
import socket, sys
tokens = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
while tokens.recv(1 << 16):
    pass
"""
_NEWS = b'data: {"text_output": " token"}\n\n'


def listener() -> socket.socket:
    """Start a process that reads, and return where it hears from. It ends with this one."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        subprocess.Popen([sys.executable, "-c", _LISTENER, str(door.getsockname()[1])])
        heard_by, _ = door.accept()
    heard_by.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return heard_by


def main() -> None:
    """Load, and run what is asked for."""
    import openvino
    import openvino_genai

    # As a model that is served has it by default.
    scheduling = openvino_genai.SchedulerConfig()
    scheduling.max_num_seqs, scheduling.max_num_batched_tokens = 256, 256
    scheduling.enable_prefix_caching, scheduling.cache_size = True, 4
    properties = {"INFERENCE_NUM_THREADS": int(sys.argv[2]), "ENABLE_CPU_PINNING": "NO"}
    pipeline = openvino_genai.ContinuousBatchingPipeline(sys.argv[1], scheduling, "CPU", properties)
    numbers = itertools.count()
    heard_by = listener()
    for line in sys.stdin:
        file, streams, heard = line.split()
        given = deque(json.loads(Path(file).read_text()))
        total = sum(length for *_, length in given)
        running: dict[Any, tuple[float, bool]] = {}
        firsts: list[float] = []
        gaps: list[float] = []
        began = time.perf_counter()
        while given or running:
            while given and len(running) < int(streams):
                _, tokens, length = given.popleft()
                config = openvino_genai.GenerationConfig()
                config.max_new_tokens, config.ignore_eos = length, True
                now = time.perf_counter()
                handle = pipeline.add_request(next(numbers), openvino.Tensor(np.array([tokens], np.int64)), config)
                running[handle] = now, False
            pipeline.step()
            now = time.perf_counter()
            news = 0
            for handle, (before, begun) in list(running.items()):
                if handle.can_read():
                    handle.read()
                    news += 1
                    (gaps if begun else firsts).append(now - before)
                    running[handle] = now, True
                if handle.get_status().name != "RUNNING":
                    del running[handle]
            if news and heard == "1":
                heard_by.sendall(_NEWS * news)
        took = time.perf_counter() - began
        figures = total / took, statistics.median(firsts) * 1000, statistics.median(gaps) * 1000
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()

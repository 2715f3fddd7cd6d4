"""The bare loop: a program of ``torch.export``, called batch by batch in a process of its own, without a server.

    python -m gpu_parts.bare FILE KIND NET

For each line on its input (rows, seconds, and 1 to copy or 0 not to) it computes for so long and prints rows a second.
With copies, a batch begins as arrays in pinned memory, from which it is copied to the card, and ends when its outputs
are in the host's memory. Without, inputs and outputs stay on the card, and a batch ends when the card has computed it.
One batch at a time, in one thread, on one stream.
"""

from __future__ import annotations

import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any, Self

from contestants import ROOT

from gpu_parts.served_nets import batch, nets


class BareLoop:
    """The loop, from another process. It is ready when it has answered for the first time."""

    def __init__(self, file: Path, kind: str, net: str) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "gpu_parts.bare", str(file), kind, net]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT / "benchmarks")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def rate(self, rows: int, seconds: float, *, copies: bool = True) -> float:
        """Have it compute; return the rows a second. Raises ``RuntimeError`` if it has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(rows, seconds, int(copies), file=self._process.stdin, flush=True)
        said = self._process.stdout.readline()
        if not said:
            raise RuntimeError("the bare loop has ended")
        return float(said)


def main(file: Path, kind: str, name: str) -> None:
    """Load the program, and compute when asked to."""
    import torch
    from torch.export.passes import move_to_device_pass

    warnings.simplefilter("ignore")
    # What is left of it on a processor: with more, threads would wait for each other beside the server.
    torch.set_num_threads(1)
    gpu, net = kind == "KIND_GPU", nets(kind == "KIND_GPU")[name]
    program = torch.export.load(file)
    if gpu:
        program = move_to_device_pass(program, "cuda:0")
    module = program.module()
    made: dict[int, tuple[Any, Any]] = {}
    for line in sys.stdin:
        rows, seconds, copies = line.split()
        if int(rows) not in made:
            host = [torch.from_numpy(values) for values in batch(net, int(rows)).values()]
            made[int(rows)] = ([each.pin_memory() for each in host] if gpu else host,
                               [each.cuda() if gpu else each for each in host])  # fmt: skip
        host, there = made[int(rows)]

        def call(host: Any = host, there: Any = there, copied: bool = copies == "1") -> None:
            given = [each.to("cuda:0", non_blocking=True) for each in host] if gpu and copied else there
            computed = module(*given)[net.output]
            if copied:
                computed.cpu()
            elif gpu:
                torch.cuda.synchronize()

        with torch.inference_mode():
            call()  # the first one of a shape takes longer
            calls, began = 0, time.perf_counter()
            while (now := time.perf_counter()) < began + float(seconds) or not calls:
                call()
                calls += 1
        print(calls * int(rows) / (now - began or 1), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])

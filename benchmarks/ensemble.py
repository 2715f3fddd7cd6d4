"""An ensemble of three Python steps, beside Triton: small requests, and tensors of 602 KB that go through all of them.

python benchmarks/ensemble.py [--seconds S] [--rounds N] [--print]
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

from contestants import identity_repository, nerite, real_triton
from loads import need, write_bodies, wrk
from page import bring_up_to_date, machine

STEPS = ("first", "second", "third")
ONE_WORKER = 'parameters { key: "WORKER" value: { string_value: "steps" } }\n'
INSIDE = 'parameters { key: "EXECUTION_MODE" value: { string_value: "in_process" } }\n'
CELLS = (("small", 1, 1.5), ("small", 16, 3.0), ("large", 1, 1.5), ("large", 16, 1.5))
"""Body, connections, and the ratio that is to be reached."""


def main() -> None:
    """Run, and write or print the section of docs/benchmarks.md."""
    need("wrk")
    bring_up_to_date("ensemble", __doc__, report, 3.0)


def report(seconds: float, rounds: int) -> str:
    """Return the table."""
    lines = [
        f"Measured on {machine()}; {rounds} rounds of {seconds:g} s; requests a second.",
        "",
        "| | Triton | a worker each | ratio | one worker | ratio | in process | ratio | wanted |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        write_bodies(folder)
        workers = ensemble_repository(folder / "workers")
        servers = [
            stack.enter_context(real_triton(workers, folder)),
            stack.enter_context(nerite("workers", workers, folder)),
            stack.enter_context(nerite("one", ensemble_repository(folder / "one", parameter=ONE_WORKER), folder)),
            stack.enter_context(nerite("inside", ensemble_repository(folder / "inside", parameter=INSIDE), folder)),
        ]
        for body, connections, wanted in CELLS:
            load = wrk(folder, body, connections, seconds, "three")
            rates = [[load(server).rate for server in servers] for _ in range(rounds)]
            theirs, *ours = (statistics.median(column) for column in zip(*rates, strict=True))
            cells = " | ".join(f"{rate:,.0f} | **{rate / theirs:.2f}**" for rate in ours)
            size = "64 bytes" if body == "small" else "602 KB"
            lines.append(f"| {size}, c={connections} | {theirs:,.0f} | {cells} | {wanted} |")
    return "\n".join(lines) + "\n"


def ensemble_repository(folder: Path, *, parameter: str = "") -> Path:
    """Write three identity models, with a parameter in their configuration, and an ensemble of them in a row."""
    models = identity_repository(folder)
    with (models / "identity" / "config.pbtxt").open("a") as config:
        config.write(parameter)
    for name in STEPS:
        shutil.copytree(models / "identity", models / name)
        config = models / name / "config.pbtxt"
        config.write_text(config.read_text().replace('"identity"', f'"{name}"'))
    tensors = ("INPUT0", "between0", "between1", "OUTPUT0")
    steps = ",".join(
        f'{{ model_name: "{name}" model_version: -1 input_map {{ key: "INPUT0" value: "{taken}" }} '
        f'output_map {{ key: "OUTPUT0" value: "{given}" }} }}'
        for name, taken, given in zip(STEPS, tensors, tensors[1:], strict=False)
    )
    three = models / "three"
    (three / "1").mkdir(parents=True)
    (three / "config.pbtxt").write_text(
        'platform: "ensemble"\nmax_batch_size: 64\n'
        'input [{ name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }]\n'
        'output [{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }]\n'
        f"ensemble_scheduling {{ step [ {steps} ] }}\n"
    )
    return models


if __name__ == "__main__":
    main()

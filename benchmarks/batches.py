"""What interactive requests notice of a batch beside them: latency and time to first token, without one and with one.

    python benchmarks/batches.py [--seconds S] [--rounds N] [--rate R] [--items N] [--window S] [--router] [--print]

The engine is a stand-in: each of its steps takes 20 ms and 0.05 ms more for each sequence, and makes one token of each.
It runs 32 sequences at most. Interactive requests come at random times, whatever comes back; the batch must end before
its deadline. With --router, a router has the batch, and two servers behind it answer items and interactive requests.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from contestants import ASLEEP, ROOT, Contestant, nerite
from page import command_line, machine, publish
from router import router

sys.path.insert(0, str(ROOT / "src"))

from nerite.client.connection import Address, HttpClientConnection
from nerite.tools.batch import BatchConnection

MODEL: Final = "tokens"
TOKENS: Final = 64
"""Of an interactive answer."""
_ITEM_TOKENS: Final = 16
"""Of the answer to an item."""
_ENGINE: Final = {
    "model": "m",
    "mortal": False,
    "max_model_len": 1000,
    "max_num_seqs": 32,
    "num_gpu_blocks_override": 4096,
}
_SLEEP: Final = "            await asyncio.sleep(0.001)\n            if any("
_STEP: Final = "            await asyncio.sleep(0.02 + 0.00005 * len(self._running))\n            if any("
_MEASURES: Final = ("p50", "p99")


def write_repository(folder: Path) -> Path:
    """Write the model, and the stand-in of its engine with the times of steps."""
    stand_in = folder / "stand-in"
    shutil.copytree(ROOT / "tests" / "stand_ins" / "vllm", stand_in)
    engine = stand_in / "vllm" / "v1" / "engine" / "async_llm.py"
    source = engine.read_text()
    if _SLEEP not in source:
        raise RuntimeError(f"{engine} has no step to slow down")
    engine.write_text(source.replace(_SLEEP, _STEP))
    version = folder / "models" / MODEL / "1"
    version.mkdir(parents=True)
    (version / "model.json").write_text(json.dumps(_ENGINE))
    (version.parent / "config.pbtxt").write_text('backend: "vllm" instance_group [{ kind: KIND_CPU }]')
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(stand_in), os.environ.get("PYTHONPATH", ""))))
    return folder / "models"


def interactive(server: Contestant, folder: Path, rate: float, seconds: float) -> dict[str, float]:
    """Send interactive requests; return quantiles of latency and of the time to first token in milliseconds."""
    written = folder / "figures.json"
    command = [str(Path(sys.executable).with_name("nerite")), "bench", MODEL, f"--url=127.0.0.1:{server.http}"]
    load = [
        "--protocol=openai",
        f"--rate={rate:g}",
        "--poisson",
        f"--parameter=max_tokens={TOKENS}",
        "--prompt-words=20",
        "--warm-up=3",
        "--windows=1",
        f"--window={seconds:g}",
    ]
    subprocess.run([*command, *load, f"--json={written}"], check=True, stdout=subprocess.DEVNULL)
    (level,) = json.loads(written.read_text())["levels"]
    found = {f"latency {name}": level["latency_ms"][name] for name in _MEASURES}
    first = level["tokens"]["time_to_first_ms"]
    return found | {f"first token {name}": first[name] for name in _MEASURES} | {"failed": level["failed"]}


def create(api: BatchConnection, items: int, window: float) -> str:
    """Create a batch; return its id."""
    lines = []
    for number in range(items):
        messages = [{"role": "user", "content": f"number {number}"}]
        body = {"model": MODEL, "messages": messages, "max_tokens": _ITEM_TOKENS}
        line = {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
        lines.append(json.dumps(line).encode() + b"\n")
    file = api.upload(Path("items.jsonl"), b"".join(lines))
    new = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": f"{window:g}s"}
    return str(api.ask("POST", "/v1/batches", json.dumps(new).encode())["id"])


def ended(api: BatchConnection, name: str) -> Mapping[str, Any]:
    """Return a batch when it has ended."""
    while True:
        batch: Mapping[str, Any] = api.ask("GET", f"/v1/batches/{name}")
        if batch["status"] in ("completed", "expired", "failed", "cancelled"):
            return batch
        time.sleep(0.5)


def counters(server: Contestant) -> dict[str, float]:
    """Return how often items were refused, and the tokens that preemption has wasted."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics}/metrics") as page:
        lines = page.read().decode().splitlines()
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
    wasted = sum(value for name, value in values.items() if name.startswith("nerite_admission_wasted_tokens"))
    return {"refused": values.get('nerite_batch_items_total{outcome="refused"}', 0.0), "wasted": wasted}


@contextlib.contextmanager
def single(folder: Path) -> Iterator[Contestant]:
    """Run one server that has batches."""
    flag = f"--batches={folder / 'batches.db'}"
    with nerite("batches", write_repository(folder), folder, ASLEEP, flag) as server:
        yield server


@contextlib.contextmanager
def routed(folder: Path) -> Iterator[Contestant]:
    """Run a router that has batches, before two servers."""
    models = write_repository(folder)
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(nerite(name, models, folder, ASLEEP)) for name in ("one", "other")]
        with socket.create_server(("127.0.0.1", 0)) as free:
            metrics = int(free.getsockname()[1])
        settings = f'metrics-port = {metrics}\nbatches = "{folder / "batches.db"}"'
        port, _ = stack.enter_context(router([server.http for server in servers], settings, "nerite"))
        yield Contestant("router", port, 0, servers[0].process, metrics)


def main() -> None:
    """Measure, and write the table."""
    flags = command_line(__doc__, 240.0, 1)
    flags.add_argument("--rate", type=float, default=4.0, help="interactive requests a second (default: %(default)g)")
    flags.add_argument("--items", type=int, default=2000, help="of the batch (default: %(default)s)")
    flags.add_argument("--window", type=float, default=400.0, help="seconds to the deadline (default: %(default)g)")
    flags.add_argument("--router", action="store_true", help="measure a router before two servers")
    given = flags.parse_args()
    alone, beside, again, batches = [], [], [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (routed if given.router else single)(folder) as server:
            api = BatchConnection(HttpClientConnection(Address.parse(f"127.0.0.1:{server.http}"), {}, 60, None))
            interactive(server, folder, given.rate, 3.0)
            for _ in range(given.rounds):
                alone.append(interactive(server, folder, given.rate, given.seconds))
                batch = create(api, given.items, given.window)
                beside.append(interactive(server, folder, given.rate, given.seconds))
                batches.append(ended(api, batch))
                again.append(interactive(server, folder, given.rate, given.seconds))
            counted = counters(server)
    publish(
        "batches-router" if given.router else "batches", table(alone, beside, again, batches, counted, given), given
    )


def table(
    alone: list[dict[str, float]],
    beside: list[dict[str, float]],
    again: list[dict[str, float]],
    batches: list[Mapping[str, Any]],
    counted: Mapping[str, float],
    given: Any,
) -> str:
    """Return what was measured."""
    text = f"Measured on {machine()}; {given.rate:g} interactive requests a second of {TOKENS} tokens "
    text += f"for {given.seconds:g} s each; items of {_ITEM_TOKENS} tokens.\n\n"
    text += "| milliseconds | alone | beside the batch | alone again |\n|---|---|---|---|\n"
    for measure in (name for name in alone[0] if name != "failed"):
        values = (statistics.median(each[measure] for each in found) for found in (alone, beside, again))
        before, during, after = values
        changes = [f"{value:.1f} ({100 * (value / before - 1):+.1f} %)" for value in (during, after)]
        text += f"| {measure} | {before:.1f} | {' | '.join(changes)} |\n"
    for batch in batches:
        counts = batch["request_counts"]
        end = batch["completed_at"] or batch["expired_at"] or batch["failed_at"]
        text += (
            f"\nThe batch is {batch['status']}: {counts['completed']} of {counts['total']} items in "
            f"{end - batch['created_at']} s, with {batch['expires_at'] - batch['created_at']} s to the deadline.\n"
        )
    failed = sum(each["failed"] for each in (*alone, *beside, *again))
    return text + (
        f"\n{failed:.0f} interactive requests failed; items were refused {counted['refused']:.0f} times for lack of "
        f"idle room, and {counted['wasted']:.0f} tokens were generated for items that were preempted.\n"
    )


if __name__ == "__main__":
    main()

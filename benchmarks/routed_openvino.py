"""Routers before three real servers: ``nerite serve`` with a small language model on OpenVINO GenAI."""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import llm_checkpoint
from contestants import Contestant, nerite
from llm_checkpoint import Prompts
from routed_by import Members, Router
from routed_cases import Result, result
from routed_client import chat_message, run

from nerite.backends.interface import ModelContext
from nerite.llm import installation

_SIZE: Final = "30M"
_MEMBERS: Final = 3
_PREFIXES: Final = 12
_PREFIX: Final = 1000
_QUESTION: Final = 30
_ANSWER: Final = 16
_RATE: Final = 5.0
_WARM: Final = 8.0
_BLOCKS: Final = 320
"""Of 32 tokens, of a member's KV cache: a third of what all prefixes would take, and room for what runs."""
_CONFIG: Final = f"""
backend: "llm"
parameters [
  {{ key: "NUM_KV_BLOCKS" value {{ string_value: "{_BLOCKS}" }} }},
  {{ key: "INFERENCE_NUM_THREADS" value {{ string_value: "1" }} }}
]
"""


def _messages(prompts: Prompts, chance: random.Random) -> Iterator[bytes]:
    """Yield questions on prefixes that no run before had."""
    prefixes = [prompts.take(_PREFIX) for _ in range(_PREFIXES)]
    while True:
        text = chance.choice(prefixes) + prompts.take(_QUESTION)
        yield chat_message(_SIZE, text, _ANSWER, stream=True, temperature=0, ignore_eos=True)


def _run(router: Router, servers: Sequence[Contestant], prompts: Prompts, seed: int, seconds: float) -> Result:
    chance = random.Random(seed)
    messages = _messages(prompts, chance)
    with (
        tempfile.TemporaryDirectory() as directory,
        router.running(Members([each.http for each in servers], kind="nerite"), Path(directory) / "router") as running,
    ):
        run([running.port], messages, _RATE, _WARM, chance)
        before = running.processor_seconds()
        answers = run([running.port], messages, _RATE, seconds, chance)
        return result(answers, running.processor_seconds() - before)


def table(routers: Sequence[Router], rounds: int, seconds: float) -> str:
    """Let routers take turns before the same servers, each time with other prompts."""
    found: dict[str, list[Result]] = {each.name: [] for each in routers}
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        folder = Path(directory)
        model = folder / "models" / _SIZE
        llm_checkpoint.write(_SIZE, model / "1")
        (model / "config.pbtxt").write_text(_CONFIG)
        installation.converted(ModelContext(_SIZE, 1, model, {}))
        prompts = Prompts(model / "1")
        names = [f"member {number}" for number in range(_MEMBERS)]
        servers = [stack.enter_context(nerite(name, folder / "models", folder)) for name in names]
        for turn in range(rounds):
            for router in routers:
                found[router.name].append(_run(router, servers, prompts, turn, 2 * seconds))
    lines = [
        f"**OpenVINO**: {_MEMBERS} servers with a model of 30 million parameters, {_PREFIXES} prefixes of "
        f"{_PREFIX} tokens, of which a member caches a third; {_RATE:g} requests/s.\n",
        "| | TTFT p50, ms | p95 | failed |",
        "|---|---|---|---|",
    ]
    for name, results in found.items():
        first = [statistics.median(each.first[place] for each in results) * 1e3 for place in range(2)]
        failed = sum(each.refused + each.cut for each in results)
        lines.append(f"| {name} | {first[0]:,.0f} | {first[1]:,.0f} | {failed} |")
    return "\n".join(lines) + "\n"

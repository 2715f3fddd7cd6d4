"""Routers before three real servers: ``nerite serve`` with a small language model on OpenVINO GenAI."""

from __future__ import annotations

import random
import re
import statistics
import tempfile
import urllib.request
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
_QUERIES: Final = re.compile(r"^vllm:prefix_cache_queries_total\S* ([0-9.e+]+)$", re.MULTILINE)
_HITS: Final = re.compile(r"^vllm:prefix_cache_hits_total\S* ([0-9.e+]+)$", re.MULTILINE)


def _messages(prompts: Prompts, chance: random.Random) -> Iterator[bytes]:
    """Yield questions on prefixes that no run before had."""
    prefixes = [prompts.take(_PREFIX) for _ in range(_PREFIXES)]
    while True:
        text = chance.choice(prefixes) + prompts.take(_QUESTION)
        yield chat_message(_SIZE, text, _ANSWER, stream=True, temperature=0, ignore_eos=True)


def _counts(servers: Sequence[Contestant]) -> tuple[float, float]:
    """Return the tokens that were looked for in the servers' caches, and those that were found."""
    queries = hits = 0.0
    for server in servers:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics}/metrics") as page:
            text = page.read().decode()
        queries += sum(map(float, _QUERIES.findall(text)))
        hits += sum(map(float, _HITS.findall(text)))
    return queries, hits


def _run(router: Router, servers: Sequence[Contestant], prompts: Prompts, seed: int, seconds: float) -> Result:
    chance = random.Random(seed)
    messages = _messages(prompts, chance)
    with (
        tempfile.TemporaryDirectory() as directory,
        router.running(
            Members([each.http for each in servers], "/v2/health/ready", "nerite"), Path(directory) / "router"
        ) as running,
    ):
        run([running.port], messages, _RATE, _WARM, chance)
        before, (queries, hits) = running.processor_seconds(), _counts(servers)
        answers = run([running.port], messages, _RATE, seconds, chance)
        spent = running.processor_seconds() - before
    more, found = _counts(servers)
    return result(answers, spent)._replace(cached=(found - hits) / max(more - queries, 1.0))


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
        "| | cached | TTFT p50, ms | p95 | failed |",
        "|---|---|---|---|---|",
    ]
    for name, results in found.items():
        first = [statistics.median(each.first[place] for each in results) * 1e3 for place in range(2)]
        cached = statistics.median(each.cached for each in results)
        failed = sum(each.refused + each.cut for each in results)
        lines.append(f"| {name} | {cached:.1%} | {first[0]:,.0f} | {first[1]:,.0f} | {failed} |")
    return "\n".join(lines) + "\n"

"""NVIDIA's aiperf against /v1: it measures without an error, and its figures are those that the server has counted."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.aiperf import AiperfUnavailable, program
from llm_models import byte_tokenizer, language_model
from serving import Serving, serving
from tools import unavailable

pytestmark = pytest.mark.timeout(600)  # with the download

REQUESTS, ANSWER = 12, 16
KINDS = {"chat, stream": ("chat", "--streaming"), "completions": ("completions",)}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("aiperf")
    language_model(folder / "models" / "chat" / "1", context=4000)
    byte_tokenizer().save_pretrained(folder / "tokenizer")
    with serving(folder / "models", folder / "log") as running:
        yield running


def counted(server: Serving) -> dict[str, float]:
    """The tokens and requests that the server has counted so far."""
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total")
    metrics = server.metrics()
    return {name: sum(value for sample, value in metrics.items() if sample.startswith(name)) for name in names}


@pytest.mark.parametrize("kind", KINDS)
def test_its_figures_are_those_of_the_server(server: Serving, kind: str, tmp_path: Path) -> None:
    try:
        aiperf = program()
    except AiperfUnavailable as reason:
        unavailable(str(reason))
        raise
    endpoint, *flags = KINDS[kind]
    before = counted(server)
    done = subprocess.run(
        [
            aiperf, "profile", "--model=chat", f"--url=http://{server.http}", f"--endpoint-type={endpoint}", *flags,
            f"--tokenizer={server.log.parent / 'tokenizer'}", f"--request-count={REQUESTS}", "--concurrency=4",
            "--isl=100", f"--osl={ANSWER}", "--extra-inputs=ignore_eos:true", "--use-server-token-count",
            f"--artifact-dir={tmp_path}", "--ui=none", "--no-gpu-telemetry", "--no-server-metrics", "--max-workers=1",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-3000:]
    told: dict[str, Any] = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    after = counted(server)
    prompts, answers, over = (after[name] - before[name] for name in before)
    assert told.get("error_request_count", {"avg": 0})["avg"] == 0, said
    assert told["request_count"]["avg"] == over == REQUESTS
    assert told["total_osl"]["avg"] == answers == REQUESTS * ANSWER
    assert told["total_isl"]["avg"] == prompts >= 100 * REQUESTS
    if "--streaming" in flags:
        assert 0 < told["time_to_first_token"]["avg"] < told["request_latency"]["avg"]

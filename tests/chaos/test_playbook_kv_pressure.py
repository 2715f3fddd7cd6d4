"""The playbook of KV pressure: a language model with few blocks, long answers, and room that is made for them."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

from llm_models import language_model
from playbooks import Playbook, clients, platform
from serving import Serving, eventually, serving

CONFIG = """
backend: "llm"
parameters { key: "MAX_NUM_SEQS" value { string_value: "8" } }
parameters { key: "NUM_KV_BLOCKS" value { string_value: "40" } }
"""
LONG = json.dumps({"text_input": "once " * 20, "parameters": {"max_tokens": 400, "ignore_eos": True}}).encode()
PATH = "/v2/models/chat/generate"


def used(server: Serving) -> float:
    """Return the used part of the KV cache."""
    return server.metrics().get('vllm:kv_cache_usage_perc{model="chat",version="1"}', 0.0)


def test_kv_pressure(tmp_path: Path) -> None:
    playbook = Playbook("KV pressure")
    curl, quota = playbook.commands("Look")
    add, fewer = playbook.commands("Type")
    (tmp_path / "models" / "chat").mkdir(parents=True)
    language_model(tmp_path / "models" / "chat" / "1")
    (tmp_path / "models" / "chat" / "config.pbtxt").write_text(CONFIG)
    # Without it, requests wait for memory before they begin, and the alert is a matter of moments.
    (tmp_path / "servers.toml").write_text("[llms.chat]\novercommit = 1.0\n")
    flag = f"--policy-file={tmp_path / 'servers.toml'}"
    with ExitStack() as stack:
        servers = [
            stack.enter_context(serving(tmp_path / "models", tmp_path / f"log{number}", flag)) for number in range(3)
        ]
        stage = stack.enter_context(platform(tmp_path, servers))
        traffic = stack.enter_context(clients(16, stage.router, PATH, LONG, x_tenant="acme"))
        stage.pages(playbook)
        assert "vllm:kv_cache_usage_perc" in stage.enter(curl)
        assert "acme" in stage.enter(quota)

        stage.enter(add)
        eventually(lambda: stage.of_router("nerite_router_member_requests", member=servers[2].http) > 0)
        stage.enter(fewer)
        eventually(lambda: stage.of_router("nerite_admission_running", model="chat") <= 2)
        stage.is_over(playbook)
        answered = traffic.count(200)
        eventually(lambda: traffic.count(200) > answered + 4)
        assert stage.of_router("nerite_admission_running", model="chat") <= 2
        assert stage.of_router("nerite_admission_waiting", model="chat") > 0
    assert traffic.found.keys() == {200}

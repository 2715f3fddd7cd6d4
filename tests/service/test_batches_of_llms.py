"""A batch and clients on one engine: items leave room, stop for clients, and end all the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from test_batches import output, upload, wait

from llm_models import language_model
from serving import ALL_TENANTS, Serving, eventually, serving

ENGINE = """
backend: "openvino_genai"
instance_group [{ kind: KIND_CPU }]
parameters { key: "MAX_NUM_SEQS" value { string_value: "2" } }
"""
URL = "/v1/completions"
POLICY = "[llms.tiny]\nmax_sequences = 2\n"
WORK = {"model": "tiny", "prompt": "once", "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("engine")
    language_model(folder / "models" / "tiny" / "1")
    (folder / "models" / "tiny" / "config.pbtxt").write_text(ENGINE)
    (folder / "policy.toml").write_text(POLICY)
    flags = (f"--batches={folder / 'batches.db'}", f"--policy-file={folder / 'policy.toml'}", ALL_TENANTS)
    with serving(folder / "models", folder / "log", *flags) as running:
        yield running


@pytest.fixture
def client(server: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0) as made:
        yield made


def use(server: Serving, level: str) -> dict[str, Any]:
    found = server.json("GET", "/v2/quota")["use"]
    return next((dict(each) for each in found if each["class"] == level), {"admitted": 0, "wasted_tokens": 0})


def stream(client: openai.OpenAI, tokens: int) -> Any:
    return client.completions.create(
        model="tiny", prompt="once", max_tokens=tokens, stream=True, extra_body={"ignore_eos": True}
    )


def create(client: openai.OpenAI, count: int, tokens: int, window: str) -> Any:
    body = {**WORK, "max_tokens": tokens}
    file = upload(client, *({"custom_id": str(n), "url": URL, "body": body} for n in range(count)))
    return client.batches.create(input_file_id=file.id, endpoint=URL, completion_window=window)  # type: ignore[arg-type]


def test_items_stop_for_clients_and_run_again(client: openai.OpenAI, server: Serving) -> None:
    batch = create(client, 2, 3000, "1h")
    eventually(lambda: use(server, "idle")["admitted"] > 0)
    streams = [stream(client, 40) for _ in range(2)]
    assert [sum(1 for _ in each) > 10 for each in streams] == [True, True]
    batch = wait(client, batch)
    assert (batch.status, batch.request_counts.completed) == ("completed", 2)
    assert all(
        row["response"]["body"]["usage"]["completion_tokens"] == 3000 for row in output(client, batch.output_file_id)
    )
    assert use(server, "idle")["admitted"] > 2, "an item was preempted, and admitted again"
    assert use(server, "idle")["wasted_tokens"] > 0


def test_no_item_is_admitted_while_clients_use_the_engine_until_time_gets_short(
    client: openai.OpenAI, server: Serving
) -> None:
    before = use(server, "idle")["admitted"]
    status = {}
    streams = [stream(client, 20_000) for _ in range(2)]
    try:
        batch = create(client, 1, 5, "30s")
        under_way = 'nerite_batch_items_under_way{lane="raised"}'
        eventually(lambda: server.metrics()[under_way] == 1)
        status = use(server, "idle")
    finally:
        for each in streams:
            each.close()
    assert status["admitted"] == before
    assert wait(client, batch).status == "completed"


def test_the_class_is_for_clients_too(server: Serving) -> None:
    status, _, body = server.ask("POST", URL, {**WORK, "max_tokens": 3}, x_nerite_class="idle")
    assert status == 200
    assert json.loads(body)["usage"]["completion_tokens"] == 3


def test_a_refused_request_of_the_class(client: openai.OpenAI, server: Serving) -> None:
    streams = [stream(client, 20_000) for _ in range(2)]
    try:
        status, _, body = server.ask("POST", URL, {**WORK, "max_tokens": 3}, x_nerite_class="idle")
    finally:
        for each in streams:
            each.close()
    assert status == 503
    assert "idle_room of model 'tiny'" in json.loads(body)["error"]["message"]


def test_the_database_is_where_the_flag_says(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    with (
        pytest.raises(RuntimeError, match="--batch-files=DIR"),
        serving(tmp_path / "models", tmp_path / "log", "--batches=postgresql://nobody@localhost/none", clean=False),
    ):
        pass

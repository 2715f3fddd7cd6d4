"""Rows of requests that several versions had, or one version several times: arms of routes, handovers, preemption."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
from test_batches import upload, wait
from test_batches_of_llms import ENGINE, URL, WORK, stream
from test_routes import DIES, ONE, route

from llm_models import language_model
from serving import IN_PROCESS, Serving, adds, eventually, pbtxt, python_model, serving


def rows(server: Serving, ledger: Path) -> list[dict[str, Any]]:
    """Return the rows of clients' requests in their order."""
    server.json("GET", "/v2/usage")  # writes what has come
    with closing(sqlite3.connect(ledger)) as database:
        database.row_factory = sqlite3.Row
        found = database.execute("SELECT * FROM ledger_rows WHERE origin = 'client' ORDER BY started, number")
        return [dict(row) for row in found]


def test_the_arm_of_each_request(tmp_path: Path) -> None:
    for version in (1, 2):
        python_model(tmp_path / "models", "m", adds(version), pbtxt(more=IN_PROCESS), version)
    route(tmp_path / "models", "m", ("1", 50), ("2", 50))
    ledger = tmp_path / "ledger.db"
    with serving(tmp_path / "models", tmp_path / "log", f"--ledger={ledger}") as server:
        answers = [server.infer("m", [[1.0]])[0] for _ in range(20)]
        found = rows(server, ledger)
    assert [(row["route"], row["arm"], row["version"]) for row in found] == [
        ("m", "m:1", "1") if answer == 2.0 else ("m", "m:2", "2") for answer in answers
    ]
    assert {row["arm"] for row in found} == {"m:1", "m:2"}


def test_a_request_that_was_handed_over_is_answered_once(tmp_path: Path) -> None:
    for version in (1, 2):
        python_model(tmp_path / "models", "fragile", DIES if version == 2 else adds(1), pbtxt(), version)
    route(tmp_path / "models", "fragile", ("1", 50), ("2", 50))
    ledger = tmp_path / "ledger.db"
    handed_over = 'nerite_route_handed_over_total{arm="fragile:2",route="fragile"}'
    with serving(tmp_path / "models", tmp_path / "log", f"--ledger={ledger}", clean=False) as server:
        asked = 0
        while not server.metrics()[handed_over]:
            assert server.ask("POST", "/v2/models/fragile/infer", ONE)[0] == 200
            asked += 1
            assert asked < 100
        found = rows(server, ledger)
        count = server.metrics()[handed_over]
    answered = [row for row in found if row["ending"] == "answered"]
    assert len(answered) == asked
    assert {row["version"] for row in answered} == {"1"}
    assert "fragile:2" in {row["arm"] for row in answered}, "the arm that was chosen for them"
    lost = [row for row in found if row["ending"] == "failed"]
    assert {(row["arm"], row["version"]) for row in lost} == {("fragile:2", "2")}
    assert len(lost) == count
    assert all(row["compute_seconds"] > 0 for row in lost), "the time until the worker died"


def test_each_attempt_of_a_preempted_item_has_a_row(tmp_path: Path) -> None:
    models, ledger = tmp_path / "models", tmp_path / "ledger.db"
    language_model(models / "tiny" / "1")
    (models / "tiny" / "config.pbtxt").write_text(ENGINE)
    flags = (f"--batches={tmp_path / 'batches.db'}", f"--ledger={ledger}")
    with (
        serving(models, tmp_path / "log", *flags) as server,
        openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0) as client,
    ):
        item = {"custom_id": "one", "url": URL, "body": {**WORK, "max_tokens": 3000}}
        batch = client.batches.create(
            input_file_id=upload(client, item).id,
            endpoint=URL,  # type: ignore[arg-type]
            completion_window="1h",  # type: ignore[arg-type]
        )
        eventually(lambda: any(row["answer_tokens"] > 0 for row in rows(server, ledger)))
        streams = [stream(client, 40) for _ in range(2)]
        assert all(sum(1 for _ in each) > 10 for each in streams)
        assert wait(client, batch).request_counts.completed == 1
        items = [row for row in rows(server, ledger) if row["class"] == "idle"]
    (done,) = [row for row in items if row["ending"] == "answered"]
    assert done["answer_tokens"] == 3000
    stopped = [row for row in items if row["answer_tokens"] and row is not done]
    assert stopped, "an attempt was stopped for the streams"
    assert {row["ending"] for row in stopped} == {"preempted"}, "which is not charged"
    assert all(row["decode_seconds"] > 0 for row in stopped)

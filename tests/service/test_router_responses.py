"""Stored responses behind a router: what continues, reads or deletes one reaches the member that keeps it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack

import openai
import pytest

from routing import pool, routing
from serving import Serving, serving
from text_models import engine

PIPES = "{% for each in messages %}[{{ each.role }}]{{ each.content }}|{% endfor %}"


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Serving]]:
    """Two servers, each of which keeps responses in a database of its own."""
    folder = tmp_path_factory.mktemp("members")
    (engine(folder / "models", "words") / "chat_template.jinja").write_text(PIPES)
    with ExitStack() as running:
        yield [
            running.enter_context(
                serving(folder / "models", folder / f"log{number}", f"--responses={folder / f'{number}.db'}")
            )
            for number in range(2)
        ]


@pytest.fixture(scope="module")
def router(members: list[Serving], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    # In turn, so that what a request gets by chance is never the member of the one before.
    pools = pool(*(each.http for each in members), policy="round-robin")
    with routing(tmp_path_factory.mktemp("router"), pools) as running:
        yield running


def client_of(server: Serving) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="k", max_retries=0, timeout=30)


def test_a_conversation_stays_where_it_is_kept(router: Serving, members: list[Serving]) -> None:
    with client_of(router) as client:
        begun = [client.responses.create(model="words", input=f"first {number}") for number in range(4)]
        assert len({each.id[:13] for each in begun}) == 2, "both members have answered"
        for number, first in enumerate(begun):
            second = client.responses.create(model="words", input="two", previous_response_id=first.id)
            assert second.output_text.startswith(f"[user]first {number}|[assistant]")
            large = client.responses.create(model="words", input="x" * 600_000, previous_response_id=second.id)
            assert large.output_text.count("[user]") > 3
            streamed = client.responses.create(
                model="words", input="three", previous_response_id=second.id, stream=True
            )
            assert [event.type for event in streamed][-1] == "response.completed"
            assert client.responses.retrieve(first.id).output_text == first.output_text
            assert next(iter(client.responses.input_items.list(second.id))).type == "message"
            client.responses.delete(first.id)
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(first.id)
            with client_of(members[0]) as one, client_of(members[1]) as other:
                assert sum(second.id in ids(each, second.id) for each in (one, other)) == 1


def ids(client: openai.OpenAI, name: str) -> list[str]:
    try:
        return [client.responses.retrieve(name).id]
    except openai.NotFoundError:
        return []


def test_a_tag_comes_from_routers_alone(router: Serving, members: list[Serving]) -> None:
    asked = {"model": "words", "input": "a"}
    status, _, body = router.ask("POST", "/v1/responses", asked, x_nerite_response_tag="00000000")
    assert status == 200
    assert not json.loads(body)["id"].startswith("resp_00000000")
    status, _, body = members[0].ask("POST", "/v1/responses", asked, x_nerite_response_tag="none")
    assert status == 400
    assert "x-nerite-response-tag" in json.loads(body)["error"]["message"]


def test_a_response_of_nobody(router: Serving) -> None:
    with client_of(router) as client, pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="words", input="a", previous_response_id="resp_none")
    assert "several need a common one" in refused.value.message

"""Libraries that agents are written with, each against a server: calls, streams, structured answers, vectors."""

from __future__ import annotations

import gc
import importlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pydantic
import pytest

from serving import Serving, python_model, serving
from text_models import engine, parameter

CALL = '<tool_call>{"name": "look", "arguments": {"at": "sky"}}</tool_call>'
THINKING = "{% for each in messages %}[{{ each.role }}]{{ each.content }}{% endfor %}<think>"
EMBED = """
def execute(self, requests):
    vector = np.array([[1, 2, 3, 4]], np.float32)
    return [pb_utils.InferenceResponse([pb_utils.Tensor("embedding", vector)]) for _ in requests]
"""
VECTORS = """
backend: "python"
max_batch_size: 4
input [{ name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }]
output [{ name: "embedding" data_type: TYPE_FP32 dims: [ 4 ] }]
instance_group [{ kind: KIND_CPU }]
"""


class Place(pydantic.BaseModel):
    """A place to look at."""

    at: str


def look(at: str) -> str:
    """Look at a place."""
    return f"{at} is blue"


def client_library(name: str) -> Any:
    """Import a library, which only the environment of ``make exam-clients`` has."""
    if os.environ.get("EXAM_CLIENTS"):
        return importlib.import_module(name)
    return pytest.importorskip(name)


@pytest.fixture(autouse=True)
def _connections_that_libraries_leave_open() -> Iterator[None]:
    """Those of event loops that are over, which nobody can close: not a fault of the next test."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("libraries")
    models = folder / "models"
    hermes = parameter("TOOL_CALL_PARSER", "hermes") + parameter("CHAT_TEMPLATE", "chatml")
    engine(models, "caller", CALL, hermes)
    engine(models, "place", '{"at": "sky"}', hermes)
    engine(models, "final", '[{"name": "final_result", "parameters": {"at": "sky"}}]', hermes)
    engine(models, "speaker", "The sky is blue.", hermes)
    (engine(models, "thinker", "Let me see. </think>Blue.") / "chat_template.jinja").write_text(THINKING)
    python_model(models, "vectors", EMBED, VECTORS)
    with serving(models, folder / "log", "--model-alias=claude-*=caller") as running:
        yield running


@pytest.fixture
def url(server: Serving) -> str:
    return f"http://{server.http}/v1"


def test_openai(url: str) -> None:
    library = client_library("openai")
    messages = [{"role": "user", "content": "Look up."}]
    with library.OpenAI(base_url=url, api_key="any", max_retries=0) as client:
        tools = [library.pydantic_function_tool(Place, name="look")]
        with client.chat.completions.stream(model="caller", messages=messages, tools=tools) as stream:
            (called,) = stream.get_final_completion().choices[0].message.tool_calls
        assert (called.function.name, called.function.parsed_arguments) == ("look", Place(at="sky"))
        parsed = client.chat.completions.parse(model="place", messages=messages, response_format=Place)
        assert parsed.choices[0].message.parsed == Place(at="sky")
        assert client.responses.parse(model="place", input="Where?", text_format=Place).output_parsed == Place(at="sky")
        made = client.embeddings.create(model="vectors", input=["sky", "sea"])
        assert [each.embedding for each in made.data] == [[1, 2, 3, 4]] * 2
        thought = client.chat.completions.create(model="thinker", messages=messages).choices[0].message
        assert (thought.reasoning_content.strip(), thought.content) == ("Let me see.", "Blue.")


def test_llama_index(url: str) -> None:
    library = client_library("llama_index.llms.openai_like")
    core = client_library("llama_index.core.llms")
    tools = client_library("llama_index.core.tools")
    embeddings = client_library("llama_index.embeddings.openai_like")

    def model(name: str) -> Any:
        return library.OpenAILike(
            model=name, api_base=url, api_key="any", is_chat_model=True, is_function_calling_model=True, max_retries=0
        )

    asked = [core.ChatMessage(role="user", content="Look up.")]
    assert model("speaker").chat(asked).message.content == "The sky is blue."
    assert "".join(part.delta for part in model("speaker").stream_chat(asked)) == "The sky is blue."
    tool = tools.FunctionTool.from_defaults(fn=look)
    answer = model("caller").chat_with_tools([tool], user_msg="Look up.", allow_parallel_tool_calls=False)
    (call,) = model("caller").get_tool_calls_from_response(answer)
    assert (call.tool_name, call.tool_kwargs) == ("look", {"at": "sky"})
    completing = library.OpenAILike(model="speaker", api_base=url, api_key="any", is_chat_model=False)
    assert completing.complete("Hello").text == "The sky is blue."
    embedding = embeddings.OpenAILikeEmbedding(model_name="vectors", api_base=url, api_key="any")
    assert embedding.get_text_embedding("sky") == [1, 2, 3, 4]


def test_langchain(url: str) -> None:
    library = client_library("langchain_openai")
    model = library.ChatOpenAI(base_url=url, api_key="any", model="caller")
    answer = model.bind_tools([Place], parallel_tool_calls=False).invoke("Look up.")
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("look", {"at": "sky"})]
    speaker = library.ChatOpenAI(base_url=url, api_key="any", model="speaker", stream_usage=True)
    assert "".join(str(chunk.content) for chunk in speaker.stream("Hello")) == "The sky is blue."
    responses = library.ChatOpenAI(base_url=url, api_key="any", model="speaker", use_responses_api=True)
    assert responses.invoke("Hello").text == "The sky is blue."
    place = library.ChatOpenAI(base_url=url, api_key="any", model="place").with_structured_output(Place)
    assert place.invoke("Where?") == Place(at="sky")
    vectors = library.OpenAIEmbeddings(base_url=url, api_key="any", model="vectors", check_embedding_ctx_length=False)
    assert vectors.embed_query("sky") == [1, 2, 3, 4]


def test_langchain_of_anthropic(server: Serving) -> None:
    library = client_library("langchain_anthropic")
    model = library.ChatAnthropic(base_url=f"http://{server.http}", api_key="any", model="claude-any", max_tokens=100)
    answer = model.bind_tools([Place]).invoke("Look up.")
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("look", {"at": "sky"})]


def test_instructor(url: str) -> None:
    library = client_library("instructor")
    openai = client_library("openai")
    with openai.OpenAI(base_url=url, api_key="any") as client:
        made = library.from_openai(client)
        messages = [{"role": "user", "content": "Where?"}]
        place = made.chat.completions.create(model="place", response_model=Place, messages=messages)
        assert isinstance(place, Place) and place.at == "sky"


def test_pydantic_ai(url: str) -> None:
    library = client_library("pydantic_ai")
    models = client_library("pydantic_ai.models.openai")
    providers = client_library("pydantic_ai.providers.openai")
    provider = providers.OpenAIProvider(base_url=url, api_key="any")

    def agent(kind: Any, model: str, **more: Any) -> Any:
        return library.Agent(kind(model, provider=provider), **more)

    assert agent(models.OpenAIChatModel, "final", output_type=Place).run_sync("Where?").output == Place(at="sky")
    spoken = agent(models.OpenAIChatModel, "speaker", tools=[look]).run_sync("Hello")
    assert spoken.output == "The sky is blue." and spoken.all_messages()
    assert agent(models.OpenAIResponsesModel, "speaker").run_sync("Hello").output == "The sky is blue."


def test_anthropic(server: Serving) -> None:
    library = client_library("anthropic")
    with library.Anthropic(base_url=f"http://{server.http}", api_key="any", max_retries=0) as client:
        tool = {"name": "look", "input_schema": Place.model_json_schema()}
        messages = [{"role": "user", "content": "Look up."}]
        asked = {"model": "claude-any", "max_tokens": 5000, "messages": messages, "tools": [tool]}
        answer = client.messages.create(**asked)
        assert (answer.stop_reason, answer.content[0].input) == ("tool_use", {"at": "sky"})
        with client.messages.stream(**asked) as stream:
            assert stream.get_final_message().content[0].input == {"at": "sky"}

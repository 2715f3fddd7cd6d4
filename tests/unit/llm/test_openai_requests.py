"""Bodies of OpenAI's API: what they mean, and what is said of the first thing that is wrong."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest

from nerite.core import tensor as dtypes
from nerite.core.errors import (
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    NeriteError,
    QuotaExceeded,
    Restricted,
    TooLarge,
    Unavailable,
    Unsupported,
)
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.core.signature import Signature, SignatureInput, SignatureOutput
from nerite.core.tensor import TensorSpec, decode_bytes, from_array
from nerite.llm.openai import chat_requests, completion_requests, embeddings, reply_formats, sampling, text_model
from nerite.llm.openai.chat_requests import ChatMessages
from nerite.llm.openai.errors import ApiError, body_of, reply_of
from nerite.llm.openai.fields import Fields, UnknownField
from nerite.llm.openai.text_model import Strings, TextDelta, TextModel
from nerite.transports.access import SenderHeaders

IMAGE = "data:image/png;base64," + base64.b64encode(b"picture").decode()
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
LONG = "x" * 1025
DEEP: dict[str, Any] = {}
for _ in range(300):
    DEEP = {"items": DEEP}
TOO_LONG = "it is 1025 characters long"
PROMPT = Strings([b"p"])
OTHER: dict[str, Any] = {"type": "function", "function": {"name": "listen"}}


def body(**fields: Any) -> memoryview:
    return memoryview(json.dumps(fields).encode())


def completion(**fields: Any) -> completion_requests.CompletionRequest:
    return completion_requests.read_completion(body(**{"model": "m", "prompt": "p", **fields}))


def chat(**fields: Any) -> chat_requests.ChatRequest:
    messages = [{"role": "user", "content": "hello"}]
    return chat_requests.read_chat(body(**{"model": "m", "messages": messages, **fields}))


def given(asked: chat_requests.ChatRequest) -> dict[str, Any]:
    """Return what the template is given."""
    assert isinstance(asked.given, dict)
    return asked.given


def told(settings: sampling.Sampling) -> dict[str, Any]:
    return {name: setting.value for name, setting in settings.items()}


def test_a_completion() -> None:
    asked = completion(n=2, stream=True, stream_options={"include_usage": True}, logprobs=0, seed=None, user="me")
    assert (asked.prompts, asked.echo, asked.wanted.n, asked.wanted.usage, asked.wanted.logprobs) == (
        [b"p"],
        False,
        2,
        True,
        0,
    )
    assert told(asked.wanted.sampling) == {"logprobs": 0}
    assert completion(prompt=["a", "b"]).prompts == [b"a", b"b"]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"prompt": ""}, "prompt", "prompt must be non-empty"),
        ({"prompt": []}, "prompt", "prompt must be non-empty"),
        ({"prompt": [1, "2"]}, "prompt", "expected a string, an array of strings, an array of token ids"),
        ({"prompt": [[1], [-2]]}, "prompt[1]", "token ids, which are integers from 0"),
        ({"prompt": [[1], []]}, "prompt", "prompt must be non-empty"),
        ({"prompt": {"a": 1}}, "prompt", "or an array of such arrays, but got an object"),
        ({"prompt": None}, "prompt", "Missing required parameter: 'prompt'"),
        ({"model": 3}, "model", "expected a string, but got an integer"),
        ({"n": 0}, "n", "an integer from 1 to 128"),
        ({"n": True}, "n", "expected an integer, but got a boolean"),
        ({"n": 3, "best_of": 2}, "best_of", "at least the 3 choices of 'n'"),
        ({"best_of": 2, "stream": True}, "best_of", "cannot be combined with 'stream'"),
        ({"prompt": ["a"] * 10, "best_of": 13}, "best_of", "no more than 128 choices for all 10 prompts together"),
        ({"suffix": "x", "echo": True}, "suffix", "cannot be combined with 'suffix'"),
        ({"suffix": "x", "prompt": [1]}, "suffix", "needs a prompt that is text"),
        (
            {"guided_json": {}, "guided_regex": "a"},
            "guided_regex",
            "'guided_json' and 'guided_regex' cannot be combined",
        ),
        ({"stop": 3}, "stop", "a string or an array of strings"),
        ({"stop": [""]}, "stop", "no empty string"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"5": 1000}}, "logit_bias.5", "from -100 to 100"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "one of 'text'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "Missing"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "can only be used when `stream` is True"),
        ({"model": LONG}, "model", TOO_LONG),
        ({"user": LONG}, "user", TOO_LONG),
        ({"user": 3}, "user", "expected a string, but got an integer"),
        ({"safety_identifier": LONG}, "safety_identifier", TOO_LONG),
        ({"stop": LONG}, "stop", TOO_LONG),
        ({"stop": ["a"] * 65}, "stop", "an array with maximum length 64, but got an array with length 65 instead"),
        ({"stop": ["x" * 1000] * 5}, "stop", "no more than 4096 characters in total"),
        ({"prompt": ["a"] * 129}, "prompt", r"Invalid 'prompt': array too long\. .*maximum length 128"),
        ({"prompt": ["a"] * 10, "n": 13}, "n", "no more than 128 choices for all 10 prompts together"),
        ({"n": 1_000_000}, "n", "an integer from 1 to 128"),
        ({"best_of": 1_000_000}, "best_of", "an integer from 1 to 128"),
        ({"logprobs": 1_000_000}, "logprobs", "an integer from 0 to 20"),
        (
            {"logit_bias": {str(token): 1 for token in range(1025)}},
            "logit_bias",
            "an object with at most 1024 properties, but got an object with 1025 properties",
        ),
        ({"allowed_token_ids": [1] * 65_537}, "allowed_token_ids", "maximum length 65536"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids", "maximum length 1024"),
        ({"bad_words": ["a"] * 257}, "bad_words", "maximum length 256"),
        ({"logit_bias": {"9" * 5_000: 1}}, "logit_bias", "token ids"),
    ],
)
def test_completions_that_are_wrong(fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(ApiError, match=says) as refused:
        completion(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize(
    "fields", [{"metadata": {"a": DEEP}}, {"response_format": {"type": "json_schema", "json_schema": {"schema": DEEP}}}]
)
def test_a_body_that_is_nested_too_deeply(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="The body is nested deeper than 100 levels"):
        completion(**fields)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'"text"'])
def test_bodies_that_are_none(text: bytes) -> None:
    with pytest.raises(ApiError, match="JSON"):
        Fields.of_body(text)


def test_what_the_engine_is_told() -> None:
    schema = {"type": "object"}
    asked = chat(
        max_completion_tokens=5,
        max_tokens=7,
        stop=["a"],
        temperature=1,
        top_k=3,
        lora_name="l",
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    )
    settings = told(asked.wanted.sampling)
    assert json.loads(settings.pop("guided_decoding")) == {"json": schema}
    assert settings == {"max_tokens": 5, "stop": ["a"], "temperature": 1.0, "top_k": 3, "lora_name": "l"}
    assert told(chat().wanted.sampling) == {}


def test_seeds_of_choices() -> None:
    settings = completion(seed=7).wanted.sampling
    assert [told(sampling.for_choice(settings, index))["seed"] for index in range(3)] == [7, 8, 9]


def test_tools() -> None:
    asked = chat(tools=[TOOL], tool_choice="none")
    assert (chat(tools=[TOOL]).choice, asked.choice, given(asked)["tools"]) == ("auto", "none", None)
    asked = chat(tools=[TOOL, OTHER], tool_choice={"type": "function", "function": {"name": "listen"}})
    assert (asked.choice, asked.tool, [tool.name for tool in given(asked)["tools"]]) == ("named", "listen", ["listen"])
    assert json.loads(told(asked.wanted.sampling)["guided_decoding"]) == {"json": {"type": "object"}}
    asked = chat(tools=[TOOL, OTHER], tool_choice="required")
    schema = json.loads(told(asked.wanted.sampling)["guided_decoding"])["json"]
    assert [each["properties"]["name"]["const"] for each in schema["items"]["anyOf"]] == ["look", "listen"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tool_choice": "required"}, '"required" tool choice requires CreateChatCompletionRequest.tools'),
        ({"tool_choice": {"function": {"name": "look"}}}, "Named tool choice requires"),
        ({"tools": [TOOL], "tool_choice": {"function": {"name": "x"}}}, "the name of one of the tools"),
        ({"tools": [TOOL], "tool_choice": "maybe"}, "Invalid value for 'tool_choice'"),
        ({"tools": [TOOL, TOOL]}, "Two tools have the name 'look'"),
        ({"tools": [{"type": "function", "function": {}}]}, r"Missing required parameter: 'tools\[0\].function.name'"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"enable_thinking": "no"}, "enable_thinking"),
        (
            {"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}},
            "'response_format' cannot be combined with a tool",
        ),
        ({"functions": []}, "use 'tools'"),
        ({"modalities": ["text", "audio"]}, "models generate text only"),
        ({"top_logprobs": 1}, "can only be used when `logprobs` is True"),
        ({"model": LONG}, TOO_LONG),
        ({"reasoning_effort": LONG}, TOO_LONG),
        ({"tools": [{"type": "function", "function": {"name": LONG}}]}, rf"'tools\[0\].function.name': {TOO_LONG}"),
        ({"tools": [TOOL], "tool_choice": {"function": {"name": LONG}}}, f"'tool_choice.function.name': {TOO_LONG}"),
    ],
)
def test_chats_that_are_wrong(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ApiError, match=says):
        chat(**fields)


def conversation(*messages: Any) -> ChatMessages:
    return ChatMessages(Fields({"messages": list(messages)}))


def test_messages() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
    found = conversation(
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "hi", "name": "Ada"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
    )
    assert found.messages == [
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": "hi", "name": "Ada"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "look", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "1", "tool_call_id": "c"},
    ]


def test_images() -> None:
    parts = [{"type": "image_url", "image_url": {"url": IMAGE}}, {"type": "text", "text": "What is it?"}]
    found = conversation({"role": "user", "content": "Look:"}, {"role": "user", "content": parts})
    assert (found.images, found.first_image) == ([base64.b64encode(b"picture")], "messages[1].content[0].type")
    assert found.messages[1]["content"] == [{"type": "image"}, {"type": "text", "text": "What is it?"}]


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"content": "x"}, r"Missing required parameter: 'messages\[0\].role'"),
        ({"role": "robot", "content": "x"}, r"Invalid value for 'messages\[0\].role'"),
        ({"role": "user"}, r"Missing required parameter: 'messages\[0\].content'"),
        ({"role": "tool", "content": "x"}, r"messages\[0\].tool_call_id"),
        ({"role": "user", "content": 3}, "a string or an array of parts"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "takes no parts of the type 'input_audio'"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b"}}]}, "data:image"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x;base64,?"}}]}, "valid base64"),
        (
            {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{"}}]},
            "JSON in a string",
        ),
        ("text", r"Invalid type for 'messages\[0\]': expected an object"),
        ({"role": "user", "content": "x", "name": LONG}, rf"messages\[0\].name': {TOO_LONG}"),
        ({"role": "tool", "content": "x", "tool_call_id": LONG}, rf"messages\[0\].tool_call_id': {TOO_LONG}"),
        ({"role": "assistant", "tool_calls": [{"id": LONG}]}, TOO_LONG),
    ],
)
def test_messages_that_are_wrong(message: Any, says: str) -> None:
    with pytest.raises(ApiError, match=says):
        conversation(message)


def signature(*inputs: SignatureInput, batch: int = 0, outputs: tuple[str, ...] = ()) -> Signature:
    prompt = SignatureInput("text_input", dtypes.BYTES, (1,))
    given = [SignatureOutput(name, dtypes.BYTES, (-1,)) for name in ("text_output", *outputs)]
    return Signature("m", batch, [prompt, *inputs], given)


ENGINE = signature(
    SignatureInput("sampling_parameters", dtypes.BYTES, (1,), optional=True),
    SignatureInput("stream", dtypes.BOOL, (1,), optional=True),
    SignatureInput("add_special_tokens", dtypes.BOOL, (1,), optional=True),
    SignatureInput("return_finish_reason", dtypes.BOOL, (1,), optional=True),
    SignatureInput("image", dtypes.BYTES, (-1,), optional=True),
    batch=4,
    outputs=("finish_reason", "logprobs"),
)


def test_what_a_text_model_is() -> None:
    assert text_model.is_text(signature()) and text_model.is_text(ENGINE)
    assert not text_model.is_text(signature(SignatureInput("other", dtypes.FP32, (1,))))
    assert text_model.is_text(signature(SignatureInput("other", dtypes.FP32, (1,), optional=True)))
    assert not text_model.is_text(Signature("m", 0, [SignatureInput("text_input", dtypes.BYTES, (2,))], []))
    assert not text_model.is_embedding(signature())


def test_the_inputs_of_an_engine() -> None:
    settings = completion(stop="x", max_tokens=3).wanted.sampling
    model, sender, images = TextModel("m", ENGINE), SenderHeaders({"h": "1"}), Strings([b"aa", memoryview(b"bb")])
    header, data = model.ask(Strings(["héllo".encode()]), settings, sender, stream=True, images=images)
    ENGINE.bind(header)
    found = {
        spec.name: decode_bytes(raw, spec.elements).tolist() if spec.datatype is dtypes.BYTES else bytes(raw)
        for spec, raw in zip(header.inputs, data, strict=True)
    }
    assert json.loads(found.pop("sampling_parameters")[0]) == {"stop": ["x"], "max_tokens": 3}
    assert found == {
        "text_input": ["héllo".encode()],
        "image": [b"aa", b"bb"],
        "stream": b"\x01",
        "return_finish_reason": b"\x01",
    }
    assert header.parameters == {"h": "1"}
    header, data = model.ask(PROMPT, settings, SenderHeaders({}), special=False)
    assert dict(zip([spec.name for spec in header.inputs], data, strict=True))["add_special_tokens"] == b"\x00"


def test_a_model_without_sampling_parameters() -> None:
    model = TextModel("m", signature())
    header, data = model.ask(PROMPT, completion(temperature=0.5).wanted.sampling, SenderHeaders({}))
    assert (header.parameters, len(data)) == ({"temperature": 0.5}, 1)
    for fields in ({"stop": "x"}, {"response_format": {"type": "json_object"}}):
        with pytest.raises(ApiError, match="model 'm' has no input 'sampling_parameters'") as refused:
            model.ask(PROMPT, completion(**fields).wanted.sampling, SenderHeaders({}))
        assert refused.value.param == next(iter(fields))


def response(**arrays: Any) -> InferenceResponse:
    tensors = [from_array(name, np.asarray(array)) for name, array in arrays.items()]
    return InferenceResponse(ResponseHeader("m", "1", [spec for spec, _ in tensors]), [data for _, data in tensors])


def test_what_a_response_says() -> None:
    text = np.array([b"a", b"b"], object)
    counts = {"num_input_tokens": np.array([3], np.uint32), "num_output_tokens": np.array([1, 1], np.uint32)}
    reason = np.array([b"length"], object)
    assert text_model.read(response(text_output=text, finish_reason=reason, **counts)) == TextDelta(
        b"ab", "length", 3, 2
    )
    assert text_model.read(response(finish_reason=np.array([b"None"], object))) == TextDelta()


def test_log_probabilities() -> None:
    said = [{"5": {"decoded_token": "b", "logprob": -2.0}, "1": {"decoded_token": "a", "logprob": -0.25}}]
    tokens = reply_formats.read_logprobs(json.dumps(said))
    assert reply_formats.completion_logprobs(tokens, 1, 4) == {
        "tokens": ["b"],
        "token_logprobs": [-2.0],
        "top_logprobs": [{"a": -0.25}],
        "text_offset": [4],
    }
    (entry,) = reply_formats.chat_logprobs(tokens, 2)["content"]
    assert (entry["token"], [each["token"] for each in entry["top_logprobs"]]) == ("b", ["a", "b"])
    assert reply_formats.read_logprobs("null") == []
    for wrong in ("{", "[1]", "[{}]", '[{"5": {}}]'):
        with pytest.raises(ValueError, match="the output 'logprobs'"):
            reply_formats.read_logprobs(wrong)


def test_vectors() -> None:
    assert embeddings.encode_vectors(np.array([1.0], np.float32)) == base64.b64encode(b"\0\0\x80\x3f").decode()
    assert embeddings.cut_vectors(np.array([3, 4, 9], np.float32), 2).tolist() == pytest.approx([0.6, 0.8])
    assert embeddings.cut_vectors(np.zeros(3, np.float32), 2).tolist() == [0, 0]
    with pytest.raises(ApiError, match="no more than the 3"):
        embeddings.cut_vectors(np.zeros(3, np.float32), 4)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ApiError("x", "n", "c", 404), 404, "invalid_request_error"),
        (Restricted("x"), 401, "authentication_error"),
        (Unsupported("x"), 400, "invalid_request_error"),
        (Internal("half a \ud800"), 500, "server_error"),
        (Unavailable("x", 3), 503, "server_error"),
        (TooLarge("x"), 413, "invalid_request_error"),
    ],
)
def test_errors(error: Any, status: int, kind: str) -> None:
    reply = reply_of(error)
    assert (reply.status, json.loads(reply.body)["error"]["type"]) == (status, kind)
    assert (b"Retry-After: 3" in reply.headers) == (status == 503)


@pytest.mark.parametrize(
    ("error", "headers"),
    [
        (QuotaExceeded("x", 3), b"Retry-After: 3\r\n"),
        (QuotaExceeded("x"), b"x-should-retry: false\r\n"),
        (DeadlineExceeded("x"), b"x-should-retry: false\r\n"),
        (Unavailable("x"), b""),
    ],
)
def test_when_to_come_again(error: Any, headers: bytes) -> None:
    """OpenAI's clients come again after 429 and 503, unless they are told not to."""
    assert reply_of(error).headers == headers


def test_a_parameter_is_named_at_a_bounded_length() -> None:
    (unknown,) = completion(**{"z" * 3_000_000: 1}).wanted.unknown
    assert len(reply_of(unknown.error()).body) < 1_000


def test_fields_that_are_passed_over() -> None:
    assert completion(max_token=3).wanted.unknown == [UnknownField("max_token", "max_tokens")]
    refused = completion(max_token=3, zzzz=1).wanted.unknown[0].error()
    assert (refused.message, refused.param) == (
        "Unknown parameter: 'max_token'. Did you mean 'max_tokens'?",
        "max_token",
    )
    answered = {"role": "assistant", "content": "a", "annotations": [], "audio": None, "refusal": None}
    messages = [answered, answered, {"role": "user", "content": "b", "extra": 1}]
    asked = chat(messages=messages, stream=True, stream_options={"more": 1})
    assert {each.path for each in asked.wanted.unknown} == {
        "messages[].annotations",
        "messages[].extra",
        "stream_options.more",
    }
    assert given(asked)["messages"][0] == {"role": "assistant", "content": "a"}
    assert len(completion(**{f"unknown{number}": 1 for number in range(100)}).wanted.unknown) == 16


def test_what_a_model_thought_goes_back_to_its_template() -> None:
    messages = [
        {"role": "assistant", "reasoning_content": "hm"},
        {"role": "assistant", "reasoning": "so", "content": "a"},
    ]
    assert [each["reasoning_content"] for each in given(chat(messages=messages))["messages"]] == ["hm", "so"]


def test_what_vllm_has_beyond_openai() -> None:
    asked = completion(guided_choice=["a", "b"], stream=True, return_token_ids=True)
    assert json.loads(told(asked.wanted.sampling)["guided_decoding"]) == {"choice": ["a", "b"]}
    assert asked.wanted.token_ids and not asked.wanted.running_usage
    options = {"include_usage": True, "continuous_usage_stats": True}
    assert completion(stream=True, stream_options=options).wanted.running_usage
    assert told(completion(max_tokens=0).wanted.sampling) == {"max_tokens": 0}
    assert given(chat(enable_thinking=False))["enable_thinking"] is False


def test_prompts_that_are_token_ids() -> None:
    asked = completion(prompt=[1, 2])
    assert (asked.prompts, asked.tokens) == ([b"[1,2]"], True)
    assert completion(prompt=[[1], [2, 3]], best_of=2).kept == 1
    vectors = embeddings.read_embedding(body(model="m", input=[[1, 2], [3]]))
    assert (vectors.texts, vectors.tokens) == ([b"[1,2]", b"[3]"], True)


def test_a_message_that_is_continued() -> None:
    messages = [{"role": "user", "content": "Say"}, {"role": "assistant", "content": " I am "}]
    asked = chat(messages=messages, continue_final_message=True)
    assert given(asked)["add_generation_prompt"] is False
    assert asked.open_ended(b"<user>Say<assistant> I am </s>") == b"<user>Say<assistant> I am"
    with pytest.raises(ApiError, match="cannot be continued"):
        asked.open_ended(b"other")


def test_one_call_at_a_time() -> None:
    assert chat(tools=[TOOL], parallel_tool_calls=False).single
    forced = chat(tools=[TOOL], parallel_tool_calls=False, tool_choice="required")
    assert json.loads(told(forced.wanted.sampling)["guided_decoding"])["json"]["maxItems"] == 1


def test_a_spec_of_text() -> None:
    asked = TextModel("m", ENGINE).ask(PROMPT, {}, SenderHeaders({}))
    assert TensorSpec("text_input", dtypes.BYTES, (1, 1)) in asked.header.inputs


REJECTED = "Error generating stream: "


@pytest.mark.parametrize(
    ("error", "message", "param", "code"),
    [
        (InvalidArgument(f"{REJECTED}'top_p' must be 0"), "'top_p' must be 0", "top_p", "invalid_value"),
        (
            InvalidArgument("'max_tokens' is 0"),
            "'max_completion_tokens' is 0",
            "max_completion_tokens",
            "invalid_value",
        ),
        (Unsupported("'logprobs' is 5"), "'top_logprobs' is 5", "top_logprobs", "unsupported_parameter"),
        (
            Unsupported(f"{REJECTED}'guided_decoding.json.properties.a.not' cannot be enforced"),
            "'response_format.json_schema.schema.properties.a.not' cannot be enforced",
            "response_format",
            "unsupported_parameter",
        ),
        (
            InvalidArgument("'guided_decoding' is not valid JSON"),
            "'response_format' is not valid JSON",
            "response_format",
            "invalid_value",
        ),
        (
            InvalidArgument("structured output (json): no"),
            "structured output (json): no",
            "response_format",
            "invalid_value",
        ),
        (
            InvalidArgument("'text_input' is not valid UTF-8"),
            "'messages' is not valid UTF-8",
            "messages",
            "invalid_value",
        ),
        (Unsupported("omit 'image'"), "omit 'image_url'", "messages", "unsupported_parameter"),
        (InvalidArgument("the prompt is empty"), "the prompt is empty", "messages", "invalid_value"),
        (
            TooLarge("too long (max_input_tokens of model 'm' is 1, now 2)."),
            "too long (max_input_tokens of model 'm' is 1, now 2).",
            "messages",
            "context_length_exceeded",
        ),
        (
            InvalidArgument("ask for fewer (max_output_tokens of x)"),
            "ask for fewer (max_output_tokens of x)",
            "max_completion_tokens",
            "invalid_value",
        ),
        (InvalidArgument(f"{REJECTED}no 'luck'"), "no 'luck'", None, None),
        (Unavailable(f"{REJECTED}busy"), "busy", None, None),
        (ApiError("'top_p'", "n", "own"), "'top_p'", "n", "own"),
    ],
)
def test_refusals_of_engines_name_what_the_client_wrote(
    error: NeriteError, message: str, param: str | None, code: str | None
) -> None:
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    asked = chat(top_p=1, max_completion_tokens=1, logprobs=True, top_logprobs=5, response_format=schema)
    fields = sampling.fields_of(asked.wanted.sampling, "messages")
    told = json.loads(body_of(sampling.in_words_of_client(error, fields)))["error"]
    assert (told["message"], told["param"], told["code"]) == (message, param, code)


def test_schemas_of_tools_are_named_where_they_stand() -> None:
    for choice, said, param in (
        ({"type": "function", "function": {"name": "listen"}}, ".type", "tools[1].function.parameters"),
        ("required", ".items.anyOf.0.type", "tools"),
    ):
        asked = chat(tools=[TOOL, OTHER], tool_choice=choice)
        fields = sampling.fields_of(asked.wanted.sampling, "messages")
        error = sampling.in_words_of_client(InvalidArgument(f"'guided_decoding.json{said}' is wrong"), fields)
        assert isinstance(error, ApiError)
        assert (error.param, error.message) == (param, f"'{param}{said if '[' in param else ''}' is wrong")

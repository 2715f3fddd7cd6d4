"""The generate extension: tensors as plain JSON, one answer or a stream of events."""

from conformance.exchange import Session, get, post
from conformance.exchanges.scenes import STREAMS

SCENE = STREAMS


def prompt(body=None, **keys):
    return post("/v2/models/prompt/generate", body if body is not None else keys)


def one(words, **keys):
    return post("/v2/models/one/generate", {"KIND": words, **keys})


def many(words, **keys):
    return post("/v2/models/many/generate", {"KIND": words, **keys})


def streamed(model, words, **keys):
    return post(f"/v2/models/{model}/generate_stream", {"KIND": words, **keys})


EXCHANGES = {
    "a text": prompt(text="hello"),
    "a list of one text": prompt(text=["hello"]),
    "a list of two texts": prompt(text=["hello", "world"]),
    "load metrics of a model that has none": [
        post("/v2/models/prompt/generate", {"text": "hello"}, endpoint_load_metrics_format=form)
        for form in ("text", "json", "other")
    ],
    "an id": prompt(text="hello", id="me"),
    "an id that is a number": prompt(text="hello", id=7),
    "numbers": prompt(text="a", numbers=[1, 2.5, 3]),
    "one number": prompt(text="a", numbers=1.5),
    "no numbers": prompt(text="a", numbers=[]),
    "a grid": prompt(text="a", grid=[1, 2, 3, 4]),
    "a grid that does not fit": prompt(text="a", grid=[1, 2, 3]),
    "nested": prompt(text="a", grid=[[1, 2], [3, 4]]),
    "a text in base64": prompt(text={"b64": "aGVsbG8="}),
    "a text as an object": prompt(text={"hello": 1}),
    "base64 for the outputs": prompt(text="hello", base64_output=True),
    "a flag": prompt(text="a", flag=True),
    "a flag that is a number": prompt(text="a", flag=1),
    "a small number": prompt(text="a", small=-3),
    "a small number that is large": prompt(text="a", small=300),
    "a half": prompt(text="a", half=1.5),
    "a text that is a number": prompt(text=3),
    "a number that is a text": prompt(text="a", numbers="b"),
    "null": prompt(text=None),
    "parameters": prompt(text="a", temperature=0.5, top_k=3, stream=False, stop="x"),
    "parameters by that name": prompt(text="a", parameters={"temperature": 0.5, "text2": "b"}),
    "an input in the parameters": prompt(parameters={"text": "a"}),
    "an input in both": prompt(text="a", parameters={"text": "b"}),
    "parameters that are no object": prompt(text="a", parameters=3),
    "a parameter that is a list": prompt(text="a", other=[1, 2]),
    "a parameter that is an object": prompt(text="a", other={"a": 1}),
    "a parameter that is null": prompt(text="a", other=None),
    "sequence, priority and timeout": prompt(text="a", sequence_id=3, priority=1, timeout=10),
    "an input is missing": prompt(numbers=[1]),
    "an empty object": prompt({}),
    "no body": prompt(b""),
    "an input twice": prompt(b'{"text":"a","text":"b"}'),
    "an input twice, with an id": prompt(b'{"id":"me","text":"a","numbers":[1],"text":"b"}'),
    "an input and a value of its name": prompt(text="text", other='"text"'),
    "a parameter twice": prompt(b'{"text":"a","top_k":1,"top_k":2}'),
    "nested too deep": prompt(text=eval("[" * 100 + "'a'" + "]" * 100)),
    "a list": prompt([1]),
    "broken": prompt(b"{"),
    "the other method": get("/v2/models/prompt/generate"),
    "an unknown model": post("/v2/models/nobody/generate", {"text": "a"}),
    "a version": post("/v2/models/prompt/versions/1/generate", {"text": "a"}),
    "an unknown version": post("/v2/models/prompt/versions/7/generate", {"text": "a"}),
    "an encoding": post("/v2/models/prompt/generate", {"text": "a"}, Content_Encoding="gzip"),
    "an error": one("error"),
    "raised": one("raise"),
    "sent": one("send end"),
    "decoupled: one response": many("last"),
    "decoupled: one response and the end": many("send end"),
    "decoupled: none": many("end"),
    "decoupled: two": many("send send end"),
    "decoupled: an error": many("error end"),
    "decoupled: an error after a response": many("send error end"),
    "stream: one": streamed("one", "return"),
    "stream: with an id": streamed("one", "return", id="me"),
    "stream: an error": streamed("one", "error"),
    "stream: many": streamed("many", "send send end"),
    "stream: many, with a last one": streamed("many", "send last"),
    "stream: none": streamed("many", "end"),
    "stream: an error at once": streamed("many", "error end"),
    "stream: not found": streamed("many", "not-found"),
    "stream: an error later": streamed("many", "send error send end"),
    "stream: raised": streamed("many", "raise"),
    "stream: a missing input": post("/v2/models/one/generate_stream", {}),
    "stream: an unknown model": post("/v2/models/nobody/generate_stream", {"KIND": "a"}),
    "stream: broken": post("/v2/models/one/generate_stream", b"{"),
    "stream: the connection goes on": Session((streamed("many", "send end"), streamed("one", "return"))),
}

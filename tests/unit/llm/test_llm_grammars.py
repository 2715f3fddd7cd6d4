"""Structured output on a real engine: what comes fits, and a grammar that is wrong harms nobody else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from llm_listening import FEW, asked, eventually, ignored
from llm_models import END, VOCABULARY, language_model
from nerite.core.errors import InvalidArgument, Unsupported
from nerite.llm.engine import FinishReason
from nerite.llm.openvino_genai import OpenVinoGenAiEngine, grammars
from nerite.llm.openvino_genai.options import PipelineOptions
from nerite.llm.structured_output import Grammar, read_structured

FREE = replace(FEW, max_tokens=400, temperature=1.0, ignore_eos=False)
LONG = replace(FEW, max_tokens=3000)
BOUND = 8 << 20
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "home": {"$ref": "#/$defs/home"},
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
    "$defs": {"home": {"anyOf": [{"type": "null"}, {"type": "boolean"}]}},
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenVinoGenAiEngine]:
    directory = language_model(tmp_path_factory.mktemp("model") / "1", 4000)
    made = OpenVinoGenAiEngine(PipelineOptions("m", directory, cache_blocks=1024, context_length=4000))
    made.start(ignored, ignored)
    yield made
    made.stop()


def form(**said: Any) -> Grammar:
    grammar = read_structured("guided_decoding", said)
    assert grammar is not None
    return grammar


def texts(engine: OpenVinoGenAiEngine, schema: Any) -> list[str]:
    """Return some texts of a form, each of which ended by itself."""
    heard = [asked(engine, replace(FREE, seed=seed), id=str(seed), grammar=form(json=schema)) for seed in range(16)]
    assert {each.over().reason for each in heard} == {FinishReason.STOP}
    # Bytes that are no characters count as one to the grammar and as several to Python: real models write none.
    whole = [each.text() for each in heard if "\ufffd" not in each.text()]
    assert len(whole) > 1
    return whole


@pytest.mark.feature("openvino_genai", "JSON schema")
def test_json_that_fits_its_schema(engine: OpenVinoGenAiEngine) -> None:
    for text in texts(engine, SCHEMA):
        jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("said", [{"json_object": True}, {"json": {"type": "array", "items": {"type": "number"}}}])
def test_blanks_and_digits_are_bounded(engine: OpenVinoGenAiEngine, said: Any) -> None:
    heard = [asked(engine, replace(FREE, seed=seed), id=f"b{seed}", grammar=form(**said)) for seed in range(16)]
    for text in [each.over().text() for each in heard]:
        outside = re.sub(r'"(?:[^"\\]|\\.)*"?', '""', text)
        assert re.search(r"[ \n\t]{34}| \n|\n[ \t]*\n|[0-9]{20}", outside) is None, text


def test_members_that_may_be_missing(engine: OpenVinoGenAiEngine) -> None:
    one_letter = {"enum": ["x"]}
    schema = {
        "type": "object",
        "properties": {"a": one_letter, "b": one_letter, "c": one_letter},
        "required": ["b"],
    }
    for text in texts(engine, schema):
        jsonschema.validate(json.loads(text), schema)
    nothing = {"type": "object", "properties": {"a": one_letter}}
    assert {len(json.loads(text)) for text in texts(engine, nothing)} <= {0, 1}


def test_schemas_that_refer_to_themselves(engine: OpenVinoGenAiEngine) -> None:
    node = {
        "anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/node"}, "minItems": 1, "maxItems": 2}]
    }
    schema = {"$ref": "#/$defs/node", "$defs": {"node": node}}
    for text in texts(engine, schema):
        jsonschema.validate(json.loads(text), schema)


def test_strings_that_are_json_whatever_their_pattern_says(engine: OpenVinoGenAiEngine) -> None:
    strings = [{"minLength": 2, "maxLength": 30}, {"pattern": "^.{2,9}[^a]{2,9}$"}, {"pattern": r"\S{1,9}\D\d\s\w"}]
    for string in strings:
        schema = {"type": "string", **string}
        for text in texts(engine, schema):
            jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("pattern", ['a"', r"\\", r"\n", "[ -~]", r"[\x20-\x7e]", r"[a\S]", "\t", "["])
def test_patterns_that_would_end_a_string(engine: OpenVinoGenAiEngine, pattern: str) -> None:
    with pytest.raises(Unsupported, match=r"'schema\.pattern' "):
        asked(engine, FREE, grammar=form(json={"type": "string", "pattern": pattern}))


@pytest.mark.parametrize("said", [r"[^é]", r"a[^\S]", r"[^a-\u00e9]", r"[^\x80]", r"[^\x41\W\d]"])
def test_classes_that_would_be_read_otherwise(engine: OpenVinoGenAiEngine, said: str) -> None:
    for wrong in (form(regex=said), form(grammar=f'root ::= {said} | "b"')):
        with pytest.raises(Unsupported, match="which the engine cannot enforce"):
            asked(engine, FREE, grammar=wrong)
    with pytest.raises(Unsupported, match=r"'schema\.pattern' has the class"):
        asked(engine, FREE, grammar=form(json={"type": "string", "pattern": said}))


@pytest.mark.parametrize("said", [r"\[[^a\]]", r"[\[^][é-ü]", r"[^\x41b]"])
def test_classes_that_are_read_as_they_are(engine: OpenVinoGenAiEngine, said: str) -> None:
    for seed in range(8):
        text = asked(engine, replace(FREE, seed=seed), grammar=form(regex=said)).over().text()
        assert "\ufffd" in text or re.fullmatch(said, text)
    assert asked(engine, FREE, grammar=form(grammar='root ::= "[^é]" # [^é]')).over().text() == "[^é]"


@pytest.mark.feature("openvino_genai", "regex")
def test_a_regular_expression(engine: OpenVinoGenAiEngine) -> None:
    expression = r"[a-f]{3}-[0-9]{2,4}"
    for temperature in (0.0, 1.0):
        heard = asked(engine, replace(FREE, temperature=temperature), grammar=form(regex=expression)).over()
        assert re.fullmatch(expression, heard.text())
        assert (heard.reason, heard.tokens()[-1]) == (FinishReason.STOP, END)


@pytest.mark.feature("openvino_genai", "choice")
def test_a_choice(engine: OpenVinoGenAiEngine) -> None:
    choices = ['"yes" or\nno', "é", "no"]
    told = {asked(engine, replace(FREE, seed=seed), grammar=form(choice=choices)).over().text() for seed in range(20)}
    assert told <= set(choices)
    assert len(told) > 1


@pytest.mark.feature("openvino_genai", "grammar")
def test_a_grammar(engine: OpenVinoGenAiEngine) -> None:
    sums = 'root ::= number (" + " number){1,3}\nnumber ::= [1-9] [0-9]{0,2}'
    text = asked(engine, FREE, grammar=form(grammar=sums)).over().text()
    assert re.fullmatch(r"[1-9]\d{0,2}( \+ [1-9]\d{0,2}){1,3}", text)


def test_several_sequences_of_one_form(engine: OpenVinoGenAiEngine) -> None:
    heard = asked(engine, replace(FREE, n=3), grammar=form(regex="[ab]{4}")).over()
    assert all(re.fullmatch("[ab]{4}", heard.text(index)) for index in range(3))


@pytest.mark.parametrize(
    "wrong",
    [
        form(json={"type": "strin"}),
        form(json={"properties": {"a": {"$ref": "#/$defs/nowhere"}}}),
        # These have no instances, which is left to the compiler to notice.
        form(json={"properties": {"a": False}}),
        form(json={"type": "integer", "minimum": 1.2, "exclusiveMaximum": 2}),
        form(json={"type": "array", "prefixItems": [{}], "items": False, "minItems": 2}),
        form(json={"type": "object", "minProperties": 1, "additionalProperties": False}),
        form(json={"type": "object", "maxProperties": 0, "properties": {"a": {}}, "required": ["a"]}),
        form(regex="[0-9"),
        form(regex="a(?=b)"),
        form(grammar="root ::= nowhere"),
        form(grammar="start: /[0-9]+/"),
    ],
)
def test_what_cannot_be_compiled_is_refused_alone(engine: OpenVinoGenAiEngine, wrong: Grammar) -> None:
    neighbour = asked(engine, LONG, id="neighbour").begun()
    for _ in range(2):
        with pytest.raises(InvalidArgument, match=r"structured output \("):
            asked(engine, FREE, id="wrong", grammar=wrong).over()
    told = len(neighbour.tokens())
    eventually(lambda: len(neighbour.tokens()) > told)
    assert asked(engine, FREE, id="right", grammar=form(regex="[0-9]{3}")).over().reason is FinishReason.STOP
    engine.abort("neighbour")
    assert neighbour.over().reason is FinishReason.ABORT
    assert engine.stats().failures == 0


SLOW = form(regex="((a{0,300}b){0,300}c){0,300}")


@pytest.mark.parametrize(
    ("heavy", "text"),
    [
        (SLOW, "it takes more than 2 seconds to compile"),
        (form(grammar="root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000), "it crashes the compiler"),
    ],
)
def test_what_is_too_heavy_is_refused_alone(
    engine: OpenVinoGenAiEngine, monkeypatch: pytest.MonkeyPatch, heavy: Grammar, text: str
) -> None:
    monkeypatch.setattr(grammars, "LONGEST_SECONDS", 2.0)
    neighbour = asked(engine, LONG, id="neighbour").begun()
    with pytest.raises(InvalidArgument, match=text):
        asked(engine, FREE, id="heavy", grammar=heavy).over()
    assert re.fullmatch("[0-9]{3}", asked(engine, FREE, grammar=form(regex="[0-9]{3}")).over().text())
    engine.abort("neighbour")
    assert neighbour.over().reason in (FinishReason.ABORT, FinishReason.LENGTH)  # it may be done by now
    assert (engine.stats().waiting, engine.stats().failures) == (0, 0)


def test_only_those_with_a_new_form_wait_for_the_one_that_is_tried(
    engine: OpenVinoGenAiEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "LONGEST_SECONDS", 2.0)
    slow = form(regex=SLOW.source + "d")
    waiting = asked(engine, FREE, id="slow", grammar=slow)
    dropped = asked(engine, replace(FREE, n=2), id="dropped", grammar=form(regex="[0-9]{7}"))
    assert engine.stats().waiting == 3
    assert asked(engine, FEW, id="quick").over().reason is FinishReason.LENGTH
    engine.abort("dropped")
    assert [delta.finish_reason for delta in dropped.over().deltas] == [FinishReason.ABORT] * 2
    with pytest.raises(InvalidArgument, match="it takes more than 2 seconds"):
        waiting.over()


def test_what_is_compiled_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond it, what runs comes to its end, what comes waits, and then nothing is left of what was compiled."""
    monkeypatch.setattr(grammars, "MAX_BYTES", BOUND)
    engine = OpenVinoGenAiEngine(
        PipelineOptions("m", language_model(tmp_path / "1"), cache_blocks=512, context_length=4000)
    )
    engine.start(ignored, ignored)
    processes = {engine.process}
    most = 0
    few = replace(FREE, max_tokens=4)
    for number in range(10):
        neighbour = asked(engine, replace(LONG, max_tokens=30), id=f"neighbour {number}").begun()
        many = f"(a{{0,300}}b){{0,{20 + number}}}c"
        forms = [form(regex=many), form(regex=f"[0-9]{{{number + 1}}}"), form(regex=many)]
        heard = [asked(engine, few, id=f"{number} {place}", grammar=each) for place, each in enumerate(forms)]
        for each, of in zip(forms, heard, strict=True):
            assert of.over().reason is FinishReason.LENGTH or re.fullmatch(each.source, of.text())
        assert neighbour.over().reason is FinishReason.LENGTH
        most = max(most, engine.grammars.compiled_bytes)
        processes.add(engine.process)
    assert most <= BOUND + BOUND // 4
    assert len(processes) == 2
    # Also if there is no room after one that nobody wants any more.
    engine.grammars.compiled_bytes = BOUND + 1
    asked(engine, few, id="dropped", grammar=form(regex=many + "d"))
    engine.abort("dropped")
    for number in range(2):
        assert asked(engine, FREE, id=f"later {number}", grammar=form(regex=f"[ab]{{{number + 1}}}")).over().text()
    assert engine.stats().failures == 0
    large = "root ::= " + " | ".join(f'"{f"q{number}" * 20}"' for number in range(500))
    with pytest.raises(InvalidArgument, match=r"compiled it takes \d+ MB: make it simpler"):
        asked(engine, FREE, grammar=form(grammar=large)).over()
    engine.stop()


def test_what_contradicts_a_form(engine: OpenVinoGenAiEngine) -> None:
    grammar = form(regex="[0-9]{3}")
    for more in ({"ignore_eos": True}, {"min_tokens": 2}):
        with pytest.raises(InvalidArgument, match="cannot be combined with structured output"):
            asked(engine, replace(FREE, **more), grammar=grammar)
    with pytest.raises(InvalidArgument, match="'stop_token_ids' has 258, but the vocabulary has 258 tokens"):
        asked(engine, replace(FREE, stop_token_ids=(258,)), grammar=grammar)


def test_a_compiler_that_was_killed_is_no_fault_of_the_next_grammar(tmp_path: Path) -> None:
    compiler = grammars.CompilerProcess(VOCABULARY, language_model(tmp_path / "1"))
    try:
        for _ in range(2):
            assert compiler.wrong(form(choice=["a", "b"]), {END}) == ""
            assert compiler.process is not None
            compiler.process.kill()
            compiler.process.wait()
    finally:
        compiler.close()

"""What follows from differences between the files and engines of language models."""

from __future__ import annotations

from typing import Any

from nerite.core.engine_report import EngineReport
from nerite.rollouts.difference import Difference
from nerite.rollouts.language_differences import engine_differences, language_differences


def facts(**changes: Any) -> dict[str, Any]:
    return {
        "engine": "vllm 1.0",
        "probes": {"English": "two dogs", "Greek": "ψυχή"},
        "ids": {"English": [5, 6, 7], "Greek": [8]},
        "why_no_ids": "",
        "tokenizer_files": {"tokenizer.json": "aa"},
        "rendered": {"a question": "<s>[user]Hello"},
        "sampling": {"temperature": 0.6},
        "stops": {"eos_token_id": 2},
        "config": {"model_type": "llama"},
        "arguments": {},
        **changes,
    }


def compared(**changes: Any) -> list[Difference]:
    return list(language_differences(facts(), facts(**changes)))


def test_equal_models() -> None:
    assert compared() == []


def test_another_tokenizer_is_shown_with_its_text() -> None:
    (found,) = compared(ids={"English": [5, 6, 7], "Greek": [9, 10]})
    assert (found.severity.value, found.subject) == ("blocks", "tokenizer, probe text 'Greek'")
    assert (found.baseline, found.candidate) == ("1 ids: 8", "2 ids: 9 10")
    assert "'ψυχή'" in found.consequence


def test_a_model_of_another_family_has_its_own_tokenizer() -> None:
    found = compared(ids={"English": [1], "Greek": [8]}, config={"model_type": "qwen3"})
    assert [(each.severity.value, each.subject) for each in found] == [
        ("warns", "tokenizer, probe text 'English'"),
        ("notes", "config.json 'model_type'"),
    ]


def test_ids_that_are_unknown() -> None:
    assert compared(ids={}, why_no_ids="no tokenizer that can be read here") == []
    (found,) = compared(ids={}, why_no_ids="no such library", tokenizer_files={"tokenizer.json": "bb"})
    assert found.severity.value == "warns"
    assert found.candidate == "tokenizer.json differ"
    assert "no such library" in found.consequence


def test_a_chat_that_is_rendered_differently() -> None:
    (found,) = compared(rendered={"a question": "<s>[USER]Hello"})
    assert (found.severity.value, found.subject) == ("warns", "chat template, a question")
    assert "from character 0: '<s>[USER]Hello'" in found.candidate
    (found,) = compared(rendered={"a question": "refused: no roles"})
    assert (found.severity.value, found.candidate) == ("blocks", "refused: no roles")


def test_defaults_stops_and_engines() -> None:
    found = compared(sampling={"temperature": 1.0, "top_k": 5}, stops={"eos_token_id": [2, 7]}, engine="vllm 2.0")
    assert [(each.severity.value, each.subject, each.baseline, each.candidate) for each in found] == [
        ("warns", "sampling default 'temperature'", "0.6", "1.0"),
        ("warns", "sampling default 'top_k'", "none", "5"),
        ("warns", "stop tokens 'eos_token_id'", "2", "[2, 7]"),
        ("warns", "engine", "vllm 1.0", "vllm 2.0"),
    ]


def test_engines_that_run() -> None:
    base = EngineReport(context_length=4096, total_blocks=100, block_size=16, max_sequences=8)
    assert list(engine_differences(base, base)) == []

    def told(**changes: int) -> list[tuple[str, str]]:
        return [(each.severity.value, each.subject) for each in engine_differences(base, base._replace(**changes))]

    assert told(context_length=2048) == [("blocks", "context window")]
    assert told(context_length=8192) == [("notes", "context window")]
    assert told(total_blocks=80) == [("warns", "KV cache tokens")]
    assert told(total_blocks=95) == []
    assert told(total_blocks=200) == [("notes", "KV cache tokens")]
    assert told(max_sequences=0) == [("warns", "sequences at once")]

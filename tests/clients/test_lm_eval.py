"""lm-evaluation-harness from end to end: its numbers over /v1 are those of transformers on the same checkpoint."""

from __future__ import annotations

import functools
import importlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import serving
from checkpoints import language_checkpoint
from pages import Page, run

pytestmark = pytest.mark.timeout(900)

PAGE = Page("docs/llm.md")
CONFIG = PAGE.block("WEIGHT_FORMAT")
"""The settings with which an engine computes what transformers does."""
TEMPLATE = "{% for each in messages %}[{{ each.role }}]{{ each.content }}\n{% endfor %}[assistant]"
QUESTIONS: list[dict[str, Any]] = [
    {"question": "The sky is", "choices": [" blue", " green", " made of stone"], "answer": 0},
    {"question": "Two and two are", "choices": [" five", " four"], "answer": 1},
    {"question": "A long question with many words, so that its end is far from its beginning:", "choices": [" a", " b"],
     "answer": 1},
    {"question": "Caf\u00e9s are", "choices": [" open", " closed", " caf\u00e9s"], "answer": 2},
]  # fmt: skip
TASKS = {
    "own_choices": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "own_texts": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}{{choices[0]}}."
metric_list: [{metric: bits_per_byte}, {metric: byte_perplexity}]
""",
    "own_answers": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["@@"], max_gen_toks: 24, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}
OF_A_TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {file}}}}}
validation_split: validation
"""
LETTERS = range(2, 96)
"""Tokens of the checkpoint that are printable characters of ASCII."""


class Place(NamedTuple):
    """A checkpoint, a server that has it, and tasks."""

    checkpoint: Path
    tasks: Path
    server: serving.Serving


def harness() -> Any:
    """Import the harness, which only the environment of ``make exam-clients`` has."""
    if os.environ.get("EXAM_CLIENTS"):
        return importlib.import_module("lm_eval")
    return pytest.importorskip("lm_eval")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    harness()
    folder = tmp_path_factory.mktemp("harness")
    checkpoint = language_checkpoint(folder / "models" / "chat" / "1")
    _say_letters_only(checkpoint / "model.safetensors")
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "models" / "chat" / "config.pbtxt").write_text(CONFIG)
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    tasks = folder / "tasks"
    tasks.mkdir()
    for name, text in TASKS.items():
        (tasks / f"{name}.yaml").write_text(OF_A_TASK.format(name=name, file=data) + text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "PATIENCE", 800)  # the checkpoint is converted first
        with serving.serving(folder / "models", folder / "log") as server:
            serving.eventually(lambda: server.ready("chat"), 800)
            yield Place(checkpoint, tasks, server)


def _say_letters_only(weights: Path) -> None:
    """Change a checkpoint so that its likeliest tokens are letters: half a character would be decoded in two ways."""
    numpy = importlib.import_module("safetensors.numpy")
    tensors = numpy.load_file(weights)
    head = tensors["lm_head.weight"]
    head[[row for row in range(len(head)) if row not in LETTERS]] = 0
    numpy.save_file(tensors, weights, {"format": "pt"})


class Numbers(NamedTuple):
    """What the harness has found in a task."""

    metrics: Mapping[str, float]
    answers: Mapping[int, Any]
    """By question: log probability and greediness of each choice, the log probability of a text, or an answer."""


def evaluated(place: Place, model: str, task: str, arguments: Mapping[str, Any], *, chat: bool = False) -> Numbers:
    """Have the harness do a task."""
    library = harness()
    manager = importlib.import_module("lm_eval.tasks").TaskManager(
        include_path=str(place.tasks), include_defaults=False
    )
    found = library.simple_evaluate(
        model=model,
        model_args=dict(arguments),
        tasks=[task],
        task_manager=manager,
        bootstrap_iters=0,
        apply_chat_template=chat,
    )
    metrics = {name: value for name, value in found["results"][task].items() if isinstance(value, float)}
    return Numbers(metrics, {each["doc_id"]: each["filtered_resps"] for each in found["samples"][task]})


@functools.cache
def of_transformers(place: Place, task: str, *, chat: bool = False) -> Numbers:
    arguments = {"pretrained": str(place.checkpoint), "device": "cpu", "dtype": "float32", "batch_size": 1}
    return evaluated(place, "hf", task, arguments, chat=chat)


def of_the_server(place: Place, task: str, **more: Any) -> Numbers:
    arguments = {
        "base_url": f"http://{place.server.http}/v1/completions",
        "model": "chat",
        "tokenizer": str(place.checkpoint),
        "max_length": 2048,
        **more,
    }
    return evaluated(place, "local-completions", task, arguments)


def assert_same_metrics(ours: Numbers, theirs: Numbers) -> None:
    assert ours.metrics.keys() == theirs.metrics.keys() and theirs.metrics
    for name, value in theirs.metrics.items():
        assert math.isclose(ours.metrics[name], value, abs_tol=1e-3, rel_tol=1e-3 if "perplexity" in name else 0), name
    assert ours.answers.keys() == theirs.answers.keys() and len(theirs.answers) == len(QUESTIONS)


@pytest.mark.parametrize("more", [{}, {"batch_size": 4}, {"num_concurrent": 4}], ids=["one", "batches", "concurrent"])
def test_choices(place: Place, more: dict[str, Any]) -> None:
    """Prompts are token ids, with the log probabilities of their tokens."""
    theirs, ours = of_transformers(place, "own_choices"), of_the_server(place, "own_choices", **more)
    assert_same_metrics(ours, theirs)
    for question, answers in theirs.answers.items():
        for (expected, greedy), (got, greedily) in zip(answers, ours.answers[question], strict=True):
            assert got == pytest.approx(expected, abs=1e-3)
            assert greedily == greedy


def test_texts(place: Place) -> None:
    theirs, ours = of_transformers(place, "own_texts"), of_the_server(place, "own_texts")
    assert_same_metrics(ours, theirs)
    for question, (expected,) in theirs.answers.items():
        assert ours.answers[question] == [pytest.approx(expected, abs=1e-3)]


def test_answers(place: Place) -> None:
    theirs, ours = of_transformers(place, "own_answers"), of_the_server(place, "own_answers")
    assert_same_metrics(ours, theirs)
    assert ours.answers == theirs.answers
    assert all(len(answer) == 24 for (answer,) in theirs.answers.values()), "letters alone, as many as are allowed"


def test_answers_in_chats(place: Place) -> None:
    theirs = of_transformers(place, "own_answers", chat=True)
    arguments = {"base_url": f"http://{place.server.http}/v1/chat/completions", "model": "chat"}
    ours = evaluated(place, "local-chat-completions", "own_answers", arguments, chat=True)
    assert_same_metrics(ours, theirs)
    assert ours.answers == theirs.answers
    assert ours.answers != of_transformers(place, "own_answers").answers, "the template is used"


@pytest.mark.parametrize(("task", "metric"), [("own_choices", "acc_norm"), ("own_answers", "exact_match")])
def test_the_commands_of_the_page(place: Place, task: str, metric: str) -> None:
    printed = run(PAGE.block(f"--tasks {task}"), place.server, cwd=place.tasks.parent, seconds=300)
    assert f"|{task}" in printed.replace(" ", "") and metric in printed

"""lm-evaluation-harness from end to end: its numbers over /v1 are those of transformers on the same checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from checkpoints import language_checkpoint
from serving import serving

CONFIG = """
backend: "llm"
parameters [
  { key: "WEIGHT_FORMAT" value { string_value: "fp32" } },
  { key: "KV_CACHE_PRECISION" value { string_value: "f32" } },
  { key: "INFERENCE_PRECISION_HINT" value { string_value: "f32" } }
]
"""
QUESTIONS = [
    {"question": "The sky is", "choices": [" blue", " green", " made of stone"], "answer": 0},
    {"question": "Two and two are", "choices": [" five", " four"], "answer": 1},
    {"question": "A long question with many words, so that its end is far from its beginning:", "choices": [" a", " b"],
     "answer": 1},
]  # fmt: skip
TASK = """
task: own_choices
dataset_path: json
dataset_kwargs: {{ data_files: {{ validation: {file} }} }}
output_type: multiple_choice
validation_split: validation
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [ {{ metric: acc }}, {{ metric: acc_norm }} ]
"""


def scores(lm_eval: Any, folder: Path, model: str, arguments: dict[str, Any]) -> dict[int, list[tuple[float, bool]]]:
    """Return log probability and greediness of each choice of each question."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder))
    found = lm_eval.simple_evaluate(
        model=model, model_args=arguments, tasks=["own_choices"], task_manager=manager, bootstrap_iters=0, batch_size=1
    )
    return {
        each["doc_id"]: [tuple(answer) for answer in each["filtered_resps"]] for each in found["samples"]["own_choices"]
    }


@pytest.mark.timeout(900)
def test_the_numbers_are_those_of_transformers(tmp_path: Path) -> None:
    if not os.environ.get("EXAM_CLIENTS"):
        pytest.importorskip("lm_eval")
    import lm_eval

    checkpoint = language_checkpoint(tmp_path / "models" / "m" / "1")
    (tmp_path / "models" / "m" / "config.pbtxt").write_text(CONFIG)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "own.yaml").write_text(TASK.format(file=data))
    theirs = scores(lm_eval, tasks, "hf", {"pretrained": str(checkpoint), "device": "cpu", "dtype": "float32"})
    with serving(tmp_path / "models", tmp_path / "log", timeout=600) as server:
        arguments = {
            "base_url": f"http://{server.http}/v1/completions",
            "model": "m",
            "tokenizer": str(checkpoint),
            "tokenized_requests": True,
            "max_length": 2048,
        }
        ours = scores(lm_eval, tasks, "local-completions", arguments)
    assert ours.keys() == theirs.keys() and len(ours) == len(QUESTIONS)
    for question, answers in theirs.items():
        for (expected, greedy), (got, greedily) in zip(answers, ours[question], strict=True):
            assert got == pytest.approx(expected, abs=1e-3)
            assert greedily == greedy

"""The file of comparisons with a shadow."""

from __future__ import annotations

import json
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nerite.core.errors import Internal
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.core.tensor import Buffer, TensorSpec, from_array
from nerite.judge.answers import Answer, compare_answers
from nerite.routes.shadow_samples import ShadowSamples, sample_of
from serving import eventually


def answered(text: str, error: str = "") -> Answer:
    spec, data = from_array("text_output", np.array([text.encode()], object))
    return Answer([InferenceResponse(ResponseHeader("m", "1", [spec]), [data])], Internal(error) if error else None, 9)


def sample(
    ours: Answer, theirs: Answer, inputs: tuple[Sequence[TensorSpec], Sequence[Buffer]] | None = None
) -> dict[str, Any]:
    return sample_of("r", "m:1", "m:2", ours, theirs, compare_answers(ours, theirs, tolerance=0), inputs)


def written(samples: ShadowSamples) -> str:
    """Return what is in the file; nothing while the thread is about to make it, or another in its place."""
    try:
        return samples.path.read_text()
    except FileNotFoundError:
        return ""


def test_samples_are_lines_of_a_file_that_nobody_else_reads(tmp_path: Path) -> None:
    samples = ShadowSamples(tmp_path / "samples.jsonl")
    for number in range(3):
        samples.add({"number": number})
    eventually(lambda: written(samples).count("\n") == 3)
    assert [json.loads(line) for line in samples.path.read_text().splitlines()] == [{"number": n} for n in range(3)]
    assert stat.S_IMODE(samples.path.stat().st_mode) == 0o600
    samples.close()


def test_the_file_is_bounded(tmp_path: Path) -> None:
    samples = ShadowSamples(tmp_path / "samples.jsonl", max_bytes=1000)
    older = tmp_path / "samples.jsonl.1"
    for number in range(200):
        samples.add({"number": f"{number:010}"})
    eventually(lambda: "0000000199" in written(samples))
    assert older.stat().st_size <= 1000
    assert samples.path.stat().st_size <= 1000
    assert {path.name for path in tmp_path.iterdir()} == {"samples.jsonl", "samples.jsonl.1"}
    samples.close()


def test_a_file_that_cannot_be_written_is_counted(tmp_path: Path) -> None:
    samples = ShadowSamples(tmp_path / "missing" / "samples.jsonl")
    samples.add({})
    eventually(lambda: samples.left_out == 1)
    samples.close()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").symlink_to(tmp_path / "other")
    samples = ShadowSamples(tmp_path / "samples.jsonl")
    samples.add({})
    eventually(lambda: samples.left_out == 1)
    assert not (tmp_path / "other").exists()
    samples.close()


def test_contents_are_left_out() -> None:
    made = sample(answered("a secret"), answered("a second", error="no secret"))
    assert "secret" not in json.dumps(made)
    assert (made["agreement"], made["shadow_error"], made["latency_us"]) == ("shadow_failed", "INTERNAL", 9)


def test_contents_are_kept_where_asked_for() -> None:
    specs, data = zip(from_array("IN", np.arange(1000, dtype=np.float32)), strict=True)
    made = sample(answered("a secret"), answered("b", error="broken"), (specs, data))
    assert made["inputs"]["IN"] == list(range(64))
    assert made["answer"] == [{"text_output": ["a secret"]}]
    assert made["shadow_error"] == "INTERNAL: broken"

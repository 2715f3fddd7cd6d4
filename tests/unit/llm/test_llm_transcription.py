"""The instance of a speech model: what it says to callers that stream and to others, and what it counts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nerite.backends.interface import ExecutionTimes, ModelContext
from nerite.core import tensor
from nerite.core.errors import Cancelled, InvalidArgument
from nerite.core.request import InferenceRequest, RequestHeader
from nerite.core.response import InferenceResponse
from nerite.core.tensor import from_array, to_array
from nerite.llm import backend, checkpoint
from nerite.llm.openvino_genai import options
from nerite.llm.speech import TimedText, Transcript, TranscriptionInstance, TranscriptionSettings, read_settings
from triton_python_backend_utils.metrics import STORE


class Scripted:
    """A transcriber that says one word after the other, until it is told to stop."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock
        self.settings = TranscriptionSettings()
        self.closed = False

    def transcribe(self, samples: Any, settings: TranscriptionSettings, heard: Callable[[str], bool]) -> Transcript:
        self.settings = settings
        said = []
        for word in (" one", " two", ""):
            self.clock[0] += 0.25
            said.append(word)
            if not heard(word):
                break
        return Transcript("".join(said), "en", [TimedText(0.0, 1.0, "one two")])

    def close(self) -> None:
        self.closed = True


class Collected:
    """A sink that keeps what it gets; it may cancel at a response."""

    def __init__(self, leaves_at: int = -1) -> None:
        self.responses: list[InferenceResponse] = []
        self.finals: list[bool] = []
        self.leaves_at = leaves_at

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        self.responses.append(response)
        self.finals.append(final)
        if len(self.responses) == self.leaves_at:
            request.cancel()


def context(tmp_path: Path, **config: Any) -> ModelContext:
    plain = ModelContext("ear", 1, tmp_path, {"backend": "llm", **config})
    return ModelContext("ear", 1, tmp_path, backend.completed_config(plain, checkpoint.TRANSCRIBE))


def asked(sink: Any, seconds: float = 2, **given: Any) -> InferenceRequest:
    tensors = [from_array("audio", np.zeros(int(16_000 * seconds), np.float32))]
    for name, value in given.items():
        if isinstance(value, str):
            value = np.array([value.encode()], tensor.BYTES.numpy)
        elif isinstance(value, bool):
            value = np.array([value])
        tensors.append(from_array(name, value))
    return InferenceRequest(RequestHeader("ear", "1", [spec for spec, _ in tensors]), [d for _, d in tensors], sink, 0)


def texts(response: InferenceResponse) -> dict[str, str]:
    assert response.header is not None
    pairs = zip(response.header.outputs, response.data, strict=True)
    return {spec.name: to_array(spec, data)[0].decode() for spec, data in pairs}


@pytest.fixture
def clock() -> list[float]:
    return [100.0]


@pytest.fixture
def instance(tmp_path: Path, clock: list[float]) -> TranscriptionInstance:
    return TranscriptionInstance(context(tmp_path), Scripted(clock), lambda: clock[0])


def reading(name: str) -> Any:
    (found,) = [family for family in STORE.collect() if family.name == name]
    (sample,) = [sample for sample in found.samples if dict(sample[0])["model"] == "ear"]
    return sample


def test_one_response(instance: TranscriptionInstance) -> None:
    (response,) = instance.execute([asked(Collected())], ExecutionTimes())
    assert response is not None
    found = texts(response)
    assert (found["text_output"], found["language"]) == (" one two", "en")
    assert json.loads(found["segments"]) == [{"start": 0.0, "end": 1.0, "text": "one two"}]
    assert json.loads(found["words"]) == []


def test_a_stream(instance: TranscriptionInstance) -> None:
    sink = Collected()
    assert instance.execute([asked(sink, stream=True)], ExecutionTimes()) == [None]
    assert [texts(each)["text_output"] for each in sink.responses] == [" one", " two", ""]
    assert sink.finals == [False, False, True]
    assert "segments" not in texts(sink.responses[0])
    assert json.loads(texts(sink.responses[-1])["segments"])[0]["text"] == "one two"


def test_a_caller_that_leaves(instance: TranscriptionInstance) -> None:
    sink = Collected(leaves_at=1)
    (response,) = instance.execute([asked(sink, stream=True)], ExecutionTimes())
    assert response is not None
    assert isinstance(response.error, Cancelled)
    assert len(sink.responses) == 1


def test_figures(instance: TranscriptionInstance) -> None:
    names = ("audio_seconds_total", "first_text_seconds", "real_time_factor")
    before = [reading(f"nerite_transcription_{name}")[1] for name in names]
    instance.execute([asked(Collected(), seconds=4)], ExecutionTimes())
    after = [reading(f"nerite_transcription_{name}")[1] for name in names]
    assert [new - old for new, old in zip(after, before, strict=True)] == pytest.approx([4, 0.25, 0.75 / 4])
    instance.close()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"seconds": 0}, "'audio' is empty"),
        ({"seconds": 3601}, "the maximum is 57600000: send it in parts"),
        ({"task": "sing"}, "'task' is 'sing'"),
        ({"timestamps": "letter"}, "'timestamps' is 'letter'"),
        ({"temperature": np.array([np.nan], np.float32)}, "'temperature' is nan"),
    ],
)
def test_what_is_refused(instance: TranscriptionInstance, given: dict[str, Any], text: str) -> None:
    (response,) = instance.execute([asked(Collected(), **given)], ExecutionTimes())
    assert response is not None
    assert response.error is not None
    assert text in response.error.message


def test_a_stream_needs_a_decoupled_model(tmp_path: Path, clock: list[float]) -> None:
    config = context(tmp_path, model_transaction_policy={"decoupled": False})
    (response,) = TranscriptionInstance(config, Scripted(clock)).execute(
        [asked(Collected(), stream=True)], ExecutionTimes()
    )
    assert response is not None
    assert response.error is not None
    assert "omit 'stream'" in response.error.message


def test_settings() -> None:
    text = {name: np.array([value], object) for name, value in (("language", b"en"), ("task", b"translate"))}
    settings = read_settings({**text, "temperature": np.array([0.5], np.float32), "prompt": np.array([b""], object)})
    assert settings == TranscriptionSettings("en", "translate", "", 0.5, "none")


def test_batches_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="takes one recording in each request"):
        context(tmp_path, max_batch_size=4)


def test_files(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "config.json").write_text('{"architectures": ["WhisperForConditionalGeneration"]}')
    plain = ModelContext("ear", 1, tmp_path, {"backend": "llm", "parameters": {}})
    assert checkpoint.task_of(plain) == checkpoint.TRANSCRIBE
    with pytest.raises(Exception, match=r"has no openvino_encoder_model.xml, openvino_decoder_model.xml"):
        options.check_files(plain, checkpoint.TRANSCRIBE)

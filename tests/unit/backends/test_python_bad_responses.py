"""A response that cannot be sent fails its own request; the others of the batch are answered."""

from __future__ import annotations

from pathlib import Path

import pytest

from nerite.core.errors import Internal
from python_model_cases import CLASS, IMPORTS, executing, method
from python_model_files import execute, instance_of, model_on_disk, request
from triton_python_backend_utils import TritonError

FAILED = "Failed to process the request(s) for model 'm_0', message: "
NO_RESPONSE = f"{FAILED}Expected an 'InferenceResponse' object in the execute function return list, found type "
UNSENDABLE = f"{FAILED}The response cannot be sent. "
BROKEN = (
    "class Broken(pb_utils.InferenceResponse):\n    def __init__(self):\n        pass\n\n\n"
    "def changed(tensor):\n    tensors = []\n    response = pb_utils.InferenceResponse(tensors)\n"
    "    response._tensors.append(tensor)\n    return response\n"
)
GOOD = "pb_utils.InferenceResponse([pb_utils.Tensor('OUTPUT0', np.ones(1, np.float32))])"


def with_parameters(parameters: str) -> str:
    return f"pb_utils.InferenceResponse([], parameters={parameters})"


BAD = {
    "a number": ("5", f"{NO_RESPONSE}'<class 'int'>'."),
    "a tensor": (
        "pb_utils.Tensor('OUTPUT0', np.ones(1))",
        f"{NO_RESPONSE}'<class 'c_python_backend_utils.Tensor'>'.",
    ),
    "an error": ("pb_utils.TritonError('x')", f"{NO_RESPONSE}'<class 'c_python_backend_utils.TritonError'>'."),
    "nothing": ("None", f"{NO_RESPONSE}'<class 'NoneType'>'."),
    "a class that is not initialized": ("Broken()", f"{UNSENDABLE}AttributeError: "),
    "something among the tensors": ("changed(5)", f"{UNSENDABLE}AttributeError: "),
    "an integer beyond 64 bits": (
        with_parameters("{'a': 2**64}"),
        f"{UNSENDABLE}Parameter 'a' is an integer beyond 64 bits. Pass it as a string.",
    ),
    "a negative integer beyond 64 bits": (
        with_parameters("{'fine': -(2**63), 'b': -(2**63) - 1}"),
        f"{UNSENDABLE}Parameter 'b' is an integer beyond 64 bits. Pass it as a string.",
    ),
    "half a character": (
        with_parameters("{'a': 'half \\ud800'}"),
        f"{UNSENDABLE}Parameter 'a' is not valid UTF-8 at character 5.",
    ),
    "half a character in a name": (
        with_parameters("{'\\ud800': 1}"),
        f"{UNSENDABLE}The name of a parameter is not valid UTF-8 at character 0.",
    ),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("place", range(3))
def test_neighbours_are_answered(tmp_path: Path, name: str, place: int) -> None:
    bad, text = BAD[name]
    listed = ", ".join(bad if index == place else GOOD for index in range(3))
    source = executing(f"return [{listed}][: len(requests)]", top=BROKEN)
    instance = instance_of(model_on_disk(tmp_path, source))
    for _ in range(2):
        answers = execute(instance, request(), request(), request())
        failure = answers.pop(place).error
        assert isinstance(failure, Internal)
        assert failure.message.startswith(text)
        assert [bytes(answer.data[0]) for answer in answers] == [b"\0\0\x80?"] * 2


def test_integers_of_64_bits_are_sent(tmp_path: Path) -> None:
    lines = (f"return [{with_parameters('{chr(97): -(2**63), chr(98): 2**64 - 1, chr(99): True}')}]",)
    (answer,) = execute(instance_of(model_on_disk(tmp_path, executing(*lines))))
    assert answer.header is not None
    assert answer.header.parameters == {"a": -(2**63), "b": 2**64 - 1, "c": True}


@pytest.mark.parametrize(
    ("output", "names"),
    [
        ("b'OUTPUT0'", ["OUTPUT0"]),
        ("bytearray(b'OUTPUT0')", ["OUTPUT0"]),
        ("np.str_('OUTPUT0')", ["OUTPUT0"]),
        ("b'another'", []),
    ],
)
def test_names_of_outputs_may_be_bytes(tmp_path: Path, output: str, names: list[str]) -> None:
    line = f"return [pb_utils.InferenceResponse([pb_utils.Tensor({output}, np.ones(1, np.float32))])]"
    (answer,) = execute(instance_of(model_on_disk(tmp_path, executing(line))))
    assert answer.header is not None
    assert [spec.name for spec in answer.header.outputs] == names
    assert all(type(spec.name) is str for spec in answer.header.outputs)


@pytest.mark.parametrize(
    ("message", "told"), [("b'no'", "no"), ("b'no \\xff'", "no \\xff"), ("'no \\ud800'", "no \\ud800")]
)
def test_the_message_of_an_error_is_never_lost(tmp_path: Path, message: str, told: str) -> None:
    line = f"return [pb_utils.InferenceResponse(error=pb_utils.TritonError({message}))]"
    (answer,) = execute(instance_of(model_on_disk(tmp_path, executing(line))))
    assert answer.error is not None
    assert answer.error.message == told


def test_a_response_keeps_the_tensors_that_it_was_given(tmp_path: Path) -> None:
    """A model may use one list for all its responses."""
    lines = (
        "tensors, responses = [], []",
        "for request in requests:",
        "    tensors.append(pb_utils.Tensor('OUTPUT0', request.inputs()[0].as_numpy()))",
        "    responses.append(pb_utils.InferenceResponse(tensors))",
        "    tensors.clear()",
        "return responses",
    )
    answers = execute(instance_of(model_on_disk(tmp_path, executing(*lines))), request([1.0]), request([2.0]))
    assert [len(answer.data) for answer in answers] == [1, 1]


def test_states_that_cannot_be_sent_end_their_request_only(tmp_path: Path) -> None:
    source = IMPORTS + CLASS + method(
        "execute",
        "requests[0].set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)",
        "return [pb_utils.InferenceResponse([], parameters={'a': 2**64}), pb_utils.InferenceResponse([])]",
    )  # fmt: skip
    batching = {"iterative_sequence": True}
    instance = instance_of(model_on_disk(tmp_path, source, sequence_batching=batching))
    bad, good = execute(instance, request(), request())
    assert (bad.again, good.again) == (False, False)
    assert bad.error is not None
    assert "beyond 64 bits" in bad.error.message
    assert good.error is None


def test_codes_stay(tmp_path: Path) -> None:
    line = "return [pb_utils.InferenceResponse(error=pb_utils.TritonError(b'x', pb_utils.TritonError.NOT_FOUND))]"
    (answer,) = execute(instance_of(model_on_disk(tmp_path, executing(line))))
    assert answer.error is not None
    assert answer.error.code == TritonError.NOT_FOUND.name

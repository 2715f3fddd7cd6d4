"""What clients and operators read of a Python model that goes wrong, against what Triton says."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.python import PythonBackend
from nerite.core.errors import BY_CODE, Internal
from python_model_cases import CHOICES, DEVIATIONS, EXECUTE_ERRORS, LOAD_ERRORS, OUTPUTS, answering, sending
from python_model_files import execute, failure, instance_of, model_on_disk, request


@pytest.fixture
def recursion_limit() -> Iterator[None]:
    """Put back what a model of the test changes."""
    before = sys.getrecursionlimit()
    yield
    sys.setrecursionlimit(before)


_FAILED = "Failed to process the request(s) for model 'm_0', message: "


def _expected(text: str, context: ModelContext) -> str:
    return text.replace("{file}", str(context.version_directory / "model.py"))


@pytest.mark.parametrize("name", LOAD_ERRORS)
def test_load_error(name: str, tmp_path: Path) -> None:
    source, text = LOAD_ERRORS[name]
    context = model_on_disk(tmp_path, source)
    with pytest.raises(Internal) as refused:
        model = PythonBackend().open(context)
        try:
            model.instance(InstanceContext("m_0"))
        finally:
            model.close()
    assert refused.value.message == _expected(text, context)


@pytest.fixture(params=[*EXECUTE_ERRORS, *DEVIATIONS])
def failing(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    name = request.param
    yield EXECUTE_ERRORS[name] if name in EXECUTE_ERRORS else (DEVIATIONS[name].source, DEVIATIONS[name].ours)


@pytest.mark.filterwarnings("ignore:coroutine")
def test_execute_error(failing: tuple[str, str], tmp_path: Path) -> None:
    source, text = failing
    context = model_on_disk(tmp_path, source)
    instance = instance_of(context)
    message = failure(instance)
    instance.close()
    assert message == _FAILED + _expected(text, context)


def test_a_batch_of_two_is_counted(tmp_path: Path) -> None:
    instance = instance_of(model_on_disk(tmp_path, answering("[]").replace("return responses", "return []")))
    with pytest.raises(Internal, match=r"InferenceRequest\(s\) size is:2, and InferenceResponse\(s\) size is:0\n$"):
        execute(instance, request(), request())


def test_each_deviation_has_a_reason() -> None:
    for name, deviation in DEVIATIONS.items():
        assert deviation.ours != deviation.triton, name
        assert deviation.reason, name


@pytest.mark.filterwarnings("ignore:the matrix subclass")
@pytest.mark.parametrize("name", OUTPUTS)
def test_output(name: str, tmp_path: Path) -> None:
    array, datatype, shape, wire = OUTPUTS[name]
    (response,) = execute(instance_of(model_on_disk(tmp_path, sending(array))))
    assert response.error is None
    assert response.header is not None
    (spec,) = response.header.outputs
    assert (spec.name, spec.datatype.name, list(spec.shape)) == ("OUTPUT0", datatype, shape)
    assert bytes(response.data[0]).hex() == wire
    assert len(response.data[0]) == len(wire) // 2


@pytest.mark.parametrize("name", CHOICES)
def test_choice_of_outputs(name: str, tmp_path: Path) -> None:
    answer, asked, names = CHOICES[name]
    (response,) = execute(instance_of(model_on_disk(tmp_path, answering(answer))), request(outputs=asked))
    assert response.header is not None
    assert [spec.name for spec in response.header.outputs] == names
    assert len(response.data) == len(names)
    assert (response.header.model_name, response.header.model_version) == ("m", "1")


@pytest.mark.parametrize("code", BY_CODE)
def test_error_of_one_response(code: str, tmp_path: Path) -> None:
    source = answering(f'[], pb_utils.TritonError("no such row", pb_utils.TritonError.{code})')
    (response,) = execute(instance_of(model_on_disk(tmp_path, source)))
    assert type(response.error) is BY_CODE[code]
    assert response.error.message == "no such row"


def test_error_is_internal_by_default_and_tensors_beside_it_are_ignored(tmp_path: Path) -> None:
    source = answering('[pb_utils.Tensor("OUTPUT0", np.zeros(1))], pb_utils.TritonError("both")')
    (response,) = execute(instance_of(model_on_disk(tmp_path, source)))
    assert type(response.error) is Internal
    assert response.error.message == "both"
    assert response.header is None


def test_text_that_is_no_unicode_reaches_the_client_escaped(tmp_path: Path) -> None:
    source = answering('[], pb_utils.TritonError("caf\\ud8e9")')
    (response,) = execute(instance_of(model_on_disk(tmp_path, source)))
    assert response.error is not None
    assert response.error.message == "caf\\ud8e9"


DEEP = """
import sys

def deep(level):
    if level == 5_000:
        raise ValueError("bottom")
    deep(level + 1)

"""


@pytest.mark.parametrize("raising", ['raise ValueError("x" * 10_000_000)', "sys.setrecursionlimit(10_000); deep(0)"])
def test_an_exception_is_told_at_a_bounded_length(
    raising: str, tmp_path: Path, recursion_limit: None, caplog: pytest.LogCaptureFixture
) -> None:
    source = DEEP + answering("[]").replace("responses = []", raising)
    with pytest.raises(Internal, match="message: ValueError: ") as refused:
        execute(instance_of(model_on_disk(tmp_path, source)))
    assert len(refused.value.message) < 20_000
    assert sum(len(record.getMessage()) for record in caplog.records) < 40_000


def test_an_exception_that_cannot_be_printed(tmp_path: Path) -> None:
    top = "class Mute(Exception):\n    def __str__(self):\n        raise OSError\n"
    source = top + answering("[]").replace("responses = []", "raise Mute()")
    with pytest.raises(Internal, match="message: Mute: <MESSAGE UNAVAILABLE>\n\nAt:\n"):
        execute(instance_of(model_on_disk(tmp_path, source)))


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"default_model_filename": "net.py"}, "Python model file not found in '{version}/net.py'"),
        ({"default_model_filename": "net.txt"}, "Model name must end with '.py'. Model name is \"net.txt\"."),
    ],
)
def test_file_of_the_model(config: dict[str, str], text: str, tmp_path: Path) -> None:
    context = model_on_disk(tmp_path, "", {"1/net.txt": ""}, **config)
    with pytest.raises(Internal) as refused:
        PythonBackend().open(context)
    assert refused.value.message == text.replace("{version}", str(context.version_directory))


def test_an_error_on_import_names_the_files_of_the_model_only(tmp_path: Path) -> None:
    context = model_on_disk(tmp_path, "import near\n", {"1/near.py": "import missing_far\n"})
    with pytest.raises(Internal) as refused:
        PythonBackend().open(context)
    version = context.version_directory
    assert refused.value.message == (
        "ModuleNotFoundError: No module named 'missing_far'\n\nAt:\n"
        f"  {version}/near.py(1): <module>\n  {version}/model.py(1): <module>\n"
    )


def test_an_error_while_strings_are_sent_shows_the_line_of_the_model(tmp_path: Path) -> None:
    context = model_on_disk(tmp_path, sending('np.array(["\\ud800"], dtype=object)'))
    with pytest.raises(Internal) as refused:
        execute(instance_of(context))
    assert refused.value.message == _FAILED + (
        "UnicodeEncodeError: 'utf-8' codec can't encode character '\\ud800' in position 0: surrogates not allowed"
        f"\n\nAt:\n  {context.version_directory}/model.py(9): execute\n"
    )

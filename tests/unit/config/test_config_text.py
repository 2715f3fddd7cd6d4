from __future__ import annotations

import dataclasses
import math
import re

import pytest
from config_strategies import configs
from google.protobuf import text_format
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2

from nerite.config.json_form import read_json, to_json
from nerite.config.mistake import Mistake, mistake_text
from nerite.config.model_config import ModelConfig, ModelDynamicBatching, ModelInput, ModelParameter, ModelQueuePolicy
from nerite.config.text import parse_text, to_text

FILE = "models/m/config.pbtxt"


def read(text: str) -> ModelConfig:
    parsed = parse_text(text, FILE)
    assert [str(mistake) for mistake in parsed.mistakes] == []
    assert parsed.doubtful == frozenset()
    return parsed.config


def mistakes_in(text: str) -> list[str]:
    """Return the mistakes as people see them, without the file's name."""
    return [str(mistake).removeprefix(f"{FILE}:") for mistake in parse_text(text, FILE).mistakes]


# What is read.


def test_a_configuration_as_people_write_it() -> None:
    config = read(
        """
        # the name may be left out
        name: "resnet", backend: 'onnxruntime';
        max_batch_size : 0x8
        input [
          { name: "image" data_type: TYPE_FP32, dims: [ 3, 224, -1 ] },
          { name: "mask", data_type: 1; dims: 07 dims: 2 optional: t }
        ]
        dynamic_batching: < preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100 >
        parameters { key: "a" value { string_value: "x" } }
        parameters [ { key: "b" value: { string_value: "y" "z" } } ]
        """
    )
    assert config == ModelConfig(
        name="resnet",
        backend="onnxruntime",
        max_batch_size=8,
        input=(
            ModelInput(name="image", data_type="TYPE_FP32", dims=(3, 224, -1)),
            ModelInput(name="mask", data_type="TYPE_BOOL", dims=(7, 2), optional=True),
        ),
        dynamic_batching=ModelDynamicBatching(preferred_batch_size=(4, 8), max_queue_delay_microseconds=100),
        parameters={"a": ModelParameter(string_value="x"), "b": ModelParameter(string_value="yz")},
    )


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (r'"a\nb\t\"\'\\\?"', "a\nb\t\"'\\?"),
        (r"'\a\b\f\r\v'", "\a\b\f\r\v"),
        (r'"\101\x41\X4a\7"', "AAJ\x07"),
        (r'"é\u00e9\303\251\U0001F600"', "ééé😀"),
        ('"a" \'b\'  # and more\n "c"', "abc"),
    ],
)
def test_strings(written: str, said: str) -> None:
    assert read(f"name: {written}").name == said


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("0.5", 0.5),
        (".5", 0.5),
        ("5e-1", 0.5),
        ("1f", 1.0),
        ("0.25F", 0.25),
        ("1", 1.0),
        ("-1.", -1.0),
        ("inf", math.inf),
        ("- Infinity", -math.inf),
        ("0.1", 0.10000000149011612),
        ("1e400", math.inf),
    ],
)
def test_floats_are_single_precision(written: str, value: float) -> None:
    config = read(f"sequence_batching {{ direct {{ minimum_slot_utilization: {written} }} }}")
    assert config.sequence_batching is not None
    assert config.sequence_batching.direct is not None
    assert config.sequence_batching.direct.minimum_slot_utilization == value


@pytest.mark.parametrize("word", ["true", "True", "t", "1", "0x1"])
@pytest.mark.parametrize("not_word", ["false", "False", "f", "0", "00"])
def test_booleans(word: str, not_word: str) -> None:
    policy = read(f"instance_group {{ passive: {word} }} instance_group {{ passive: {not_word} }}").instance_group
    assert [group.passive for group in policy] == [True, False]


def test_a_map_entry_may_lack_either_half_and_the_last_of_a_key_wins() -> None:
    config = read(
        "dynamic_batching { priority_queue_policy { value { max_queue_size: 1 } } priority_queue_policy { key: 2 }"
        " priority_queue_policy { key: 2 value { max_queue_size: 3 } } }"
    )
    assert config.dynamic_batching is not None
    assert config.dynamic_batching.priority_queue_policy == {
        0: ModelQueuePolicy(max_queue_size=1),
        2: ModelQueuePolicy(max_queue_size=3),
    }


def test_empty_lists_and_empty_messages() -> None:
    config = read("input [ ] output: [ ] parameters [ ] dynamic_batching { } optimization: { }")
    assert (config.input, config.output, config.parameters) == ((), (), {})
    assert config.dynamic_batching == ModelDynamicBatching()
    assert config.optimization is not None


def test_every_part_has_its_position() -> None:
    source = parse_text(
        'name: "m"\ninput [\n  {\n    name: "A"\n    dims: [ 1, 2 ]\n  }\n]\n'
        'parameters { key: "k" value { string_value: "v" } }\nmax_batch_size:\n  8\n'
    ).source
    assert source.locate(("name",)) == (1, 7)
    assert source.locate(("input",)) == (2, 1)
    assert source.locate(("input", 0)) == (3, 3)
    assert source.locate(("input", 0, "name")) == (4, 11)
    assert source.locate(("input", 0, "dims", 1)) == (5, 16)
    assert source.locate(("input", 0, "data_type")) == (3, 3), "what is missing is looked for where it belongs"
    assert source.locate(("parameters", "k")) == (8, 19)
    assert source.locate(("parameters", "k", "string_value")) == (8, 45)
    assert source.locate(("max_batch_size",)) == (10, 3)
    assert source.locate(("backend",)) == (1, 1)


# The mistakes that people make.


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "instance_group [{ count: 2-4 }]",
            ["1:27: Expected identifier, got: -\n    'count' is one number, not a range: write count: 2 or count: 4."],
        ),
        (
            "input [\n  {\n    dims: [ 3, 224, 224\n  }\n]",
            ['4:3: Expected ",", found "}".\n    Write ] where the list that begins in line 3 is to end.'],
        ),
        (
            "input { dims: [ 3, 224, 224\n data_type: TYPE_FP32 }",
            ['2:2: Expected ",", found "data_type".\n    Write ] where the list that begins in line 1 is to end.'],
        ),
        (
            "input { data_type: FP32 }",
            ['1:20: Unknown enumeration value of "FP32" for field "data_type".\n    Write TYPE_FP32.'],
        ),
        (
            "input { data_type: float32 }",
            ['1:20: Unknown enumeration value of "float32" for field "data_type".\n    Write TYPE_FP32.'],
        ),
        (
            "input { data_type: BYTES }",
            ['1:20: Unknown enumeration value of "BYTES" for field "data_type".\n    Write TYPE_STRING.'],
        ),
        ('max_batch_size: "8"', ['1:17: Expected integer, got: "8"\n    Write 8 without quotes.']),
        ("max_batch_size: 8.0", ["1:17: Expected integer, got: 8.0\n    Write a whole number: 8."]),
        (
            "instance_group { kind: GPU }",
            ['1:24: Unknown enumeration value of "GPU" for field "kind".\n    Write KIND_GPU.'],
        ),
        ("backend: python", ['1:10: Expected string, got: python\n    Put it in quotes: "python".']),
        ("name: my-model.v2", ['1:7: Expected string, got: my\n    Put it in quotes: "my-model.v2".']),
        (
            "dynamic_batching: true",
            [
                '1:19: Expected "{", found "true".\n'
                "    Write dynamic_batching { }, with what is to be set inside of the braces."
            ],
        ),
        (
            "dynamic_batching: false",
            [
                '1:19: Expected "{", found "false".\n'
                "    Remove 'dynamic_batching' to have none, or write dynamic_batching { … }."
            ],
        ),
        (
            "maxBatchSize: 8",
            ['1:1: Message type "inference.ModelConfig" has no field named "maxBatchSize".\n    Write max_batch_size.'],
        ),
        (
            "inputs { }",
            ['1:1: Message type "inference.ModelConfig" has no field named "inputs".\n    Did you mean input?'],
        ),
        (
            "preferred_batch_size: [ 4 ]",
            [
                '1:1: Message type "inference.ModelConfig" has no field named "preferred_batch_size".\n'
                "    'preferred_batch_size' is not part of this. "
                "It belongs to dynamic_batching or sequence_batching.oldest."
            ],
        ),
        (
            '{ "backend": "python", "max_batch_size": 8 }',
            [
                "1:1: Expected identifier, got: {\n"
                "    This looks like JSON. Leave out the outer braces and write fields as in: max_batch_size: 8"
            ],
        ),
        (
            '"max_batch_size": 8,',
            [
                '1:1: Expected identifier, got: "max_batch_size"\n'
                "    Write the name of a field without quotes: max_batch_size."
            ],
        ),
        ("input { dims: [ 3, ] }", ['1:20: Expected integer, got: ]\n    Remove the comma before this "]".']),
        ("input [ { }, ]", ['1:14: Expected "{", found "]".\n    Remove the comma before this "]".']),
        ("max_batch_size: 8,,", ["1:19: Expected identifier, got: ,\n    Remove this ','."]),
        ("max_batch_size = 8", ['1:16: Expected ":", found "=".\n    Write a colon: max_batch_size: …']),
        ("max_batch_size 8", ['1:16: Expected ":", found "8".\n    Write a colon: max_batch_size: …']),
        (
            "max_batch_size:\nbackend: ''",
            ["1:15: Expected integer, got: backend\n    'max_batch_size:' has no value. Write a whole number."],
        ),
        (
            "max_batch_size:\ninput [ { dims: 1 } ]\noutput { dims: }",
            [
                "1:15: Expected integer, got: input\n    'max_batch_size:' has no value. Write a whole number.",
                "3:14: Expected integer, got: }\n    'dims:' has no value. Write a whole number.",
            ],
        ),
        ("// note\nmax_batch_size: 8", ["1:1: Expected identifier, got: /\n    A comment begins with #."]),
        ("/* a\nnote */ max_batch_size: 8", ["1:1: Expected identifier, got: /\n    A comment begins with #."]),
        (
            'parameters { key: "a" value: "b" }',
            ['1:30: Expected "{", found ""b"".\n    Write value { string_value: "b" }.'],
        ),
        (
            'parameters { threads: "4" }',
            [
                '1:14: Message type "inference.ModelConfig.ParametersEntry" has no field named "threads".\n'
                '    An entry of parameters is written: parameters { key: "threads" value: { … } }'
            ],
        ),
        (
            "dynamic_batching {\n",
            [
                "2:1: Expected identifier, got: \n"
                "    Write } before this: what begins in line 1, column 18 is still open."
            ],
        ),
        (
            'input [ { name: "A" ]',
            [
                "1:21: Expected identifier, got: ]\n"
                "    Write } before this: what begins in line 1, column 9 is still open."
            ],
        ),
        (
            "version_policy { all { } latest { num_versions: 2 } }",
            [
                '1:26: Field "latest" is specified along with field "all", another member of oneof "policy_choice".\n'
                "    'all' is given in line 1: keep one of the two."
            ],
        ),
        (
            "backend: \u201cpython\u201d",
            ['1:10: Interpreting non ascii codepoint 226.\n    Write plain quotes: "…".'],
        ),
    ],
)
def test_a_usual_mistake_has_a_place_and_a_remedy(text: str, told: list[str]) -> None:
    assert mistakes_in(text) == told


UNFILLED = "is an unfilled placeholder of a template: fill the template in, or replace it."


@pytest.mark.parametrize(
    ("text", "places"),
    [
        (
            "max_batch_size: ${max_batch_size}\ninput [ {\n  data_type: ${dtype}\n  dims: [ -1, ${w} ]\n} ]\n"
            "model_transaction_policy { decoupled: ${decoupled} }\ninstance_group [ { count: ${n} kind: ${kind} } ]\n",
            ["1:17", "3:14", "4:15", "6:39", "7:27", "7:38"],
        ),
        ("max_batch_size: $(SIZE)\nname: model-$NAME.a\nbackend: %(backend)s", ["1:17", "2:7", "3:10"]),
        ("max_batch_size: @SIZE@\ninput { name: <NAME> dims: [ <the width> ] }", ["1:17", "2:15", "2:30"]),
        ("max_batch_size: {{ size }}\ninput [{{ inputs }}]\n{{ more | default(4) }}\n", ["1:17", "2:8", "3:1"]),
        ("${name}: 4\n@NAME@ { a: 1 }\nmax_batch_size: ${x}\n", ["1:1", "2:1", "3:17"]),
        ("max_batch_size: #SIZE\ninput [ { data_type: #DTYPE\n dims: 1 } ]\n", ["1:15", "2:20"]),
        ("instance_group [ { count: #COUNT } ]\nmax_batch_size: ${x}\n", ["1:25", "2:17"]),
        ("max_batch_size: MAX_BATCH\ninput { dims: [ BATCH, 3 ] }", ["1:17", "2:17"]),
        ("model_transaction_policy { decoupled: DECOUPLED }", ["1:39"]),
    ],
)
def test_an_unfilled_placeholder_is_one_mistake(text: str, places: list[str]) -> None:
    told = mistakes_in(text)
    assert [each.split(": ")[0] for each in told] == places
    assert all(UNFILLED in each for each in told), told


def test_a_statement_of_a_template_is_one_mistake() -> None:
    told = mistakes_in("{% for x in inputs %}\ninput { name: {{ x }} }\n{% endfor %}\n")
    assert [each.split(": ")[0] for each in told] == ["1:1", "2:15", "3:1"]
    assert "{% endfor %} is a statement of a template: render the template." in told[2]


def test_a_remedy_says_what_is_to_stand_in_the_place_of_a_placeholder() -> None:
    assert mistakes_in("max_batch_size: ${max_batch_size}") == [
        f"1:17: Expected integer, got: ${{max_batch_size}}\n    ${{max_batch_size}} {UNFILLED} Write a whole number."
    ]


@pytest.mark.parametrize(
    "text",
    [
        'parameters { key: "a" value { string_value: "${a} {{ b }} @c@ <d>" } }',
        "dims: #NCHW\n[ 1 ]",
        "max_batch_size: #SIZE\n8",
        "dynamic_batching < max_queue_delay_microseconds: 1 >",
    ],
)
def test_what_only_looks_like_a_placeholder_is_read(text: str) -> None:
    read(f"input {{ {text} }}" if text.startswith("dims") else text)


@pytest.mark.parametrize(
    ("text", "places"),
    [
        # A bracket that is not closed swallows what follows.
        (
            'input [ { name: "A" dims: [ 1 ]\noutput [ { name: "B" dims: [ 1 ] } ]\nbackend: python\n',
            ["2:1", "3:10"],
        ),
        ("input [\n  {\n    dims: [ 3, 224\n    data_type: X\n  }\n]\nbackend: python\n", ["4:5", "7:10"]),
        ("unheard_of { a: 1\nbackend: python\n", ["1:1", "2:10"]),
        # Words that are no fields.
        ("Dear reader,\nthis is no configuration - it is a letter:\nyours\nbackend: python\n", ["1:1", "4:10"]),
        ("<html>\n<body class='x'>\n<p>Not found</p></body></html>\n", ["1:1"]),
        ("platform: onnxruntime onnx of course\nmax_batch_size: x\n", ["1:11", "2:17"]),
        ("dynamic_batching: a b c { } ] }\nmax_batch_size: x\n", ["1:19", "2:17"]),
        ("input [ } ] ] }\nmax_batch_size: x\n", ["1:9", "2:17"]),
        ("input " * 100, ["1:7"]),
    ],
)
def test_one_mistake_makes_no_others(text: str, places: list[str]) -> None:
    assert [each.split(": ")[0] for each in mistakes_in(text)] == places


def test_of_very_many_mistakes_the_first_are_told_and_how_many_there_are_more() -> None:
    mistakes = parse_text("".join(f"unheard_of_{number}: 1\n" for number in range(5000)), FILE).mistakes
    assert len(mistakes) == 5000
    *first, last = mistake_text(mistakes)
    assert len(first) == 20
    assert "The fields here are: name, " in first[0]
    assert all(each.endswith("Remove it: it is none of the fields that are listed above.") for each in first[1:])
    assert last == f"{FILE}: 4980 more mistakes\n    Correct those above first."


def test_every_mistake_of_a_text_is_told_in_order() -> None:
    told = mistakes_in(
        'maxBatchSize: 8\nbackend: python\ninput [ { data_type: FP32 dims: [ "3" ] } ]\n'
        "instance_group [{ count: 2-4 kind: GPU }]\ndynamic_batching { preserve_ordering: yes }\n"
    )
    assert [line.split(": ")[0] for line in told] == ["1:1", "2:10", "3:22", "3:35", "4:27", "4:36", "5:39"]


def test_a_client_is_told_what_triton_tells() -> None:
    (mistake,) = parse_text("max_batch_size: -", FILE).mistakes
    error = mistake.as_error()
    assert (error.message, error.code) == (f"failed to read text proto from {FILE}", "INTERNAL")


def test_what_was_wrong_is_doubtful_and_nothing_else() -> None:
    parsed = parse_text('maxBatchSize: 8 input { dims: "x" } backend: "python"')
    assert parsed.doubtful == {"max_batch_size", "input"}
    assert parsed.trusts(("backend", "output"))
    assert not parsed.trusts(("backend", "input"))
    assert not parse_text("{").trusts(())


def test_a_mistake_without_a_text_names_the_part() -> None:
    assert str(Mistake(message="wrong", remedy="Write 8.", path=("input", 0, "dims", 2), file="c")) == (
        "c: input[0].dims[2]: wrong\n    Write 8."
    )


# Against the reference implementation of the format.


@given(configs())
@settings(max_examples=150)
def test_what_is_printed_reads_back_the_same(config: ModelConfig) -> None:
    text = to_text(config)
    assert read(text) == config


@given(configs())
@settings(max_examples=100)
def test_protobuf_reads_what_we_print_and_we_read_what_protobuf_prints(config: ModelConfig) -> None:
    theirs = text_format.Parse(to_text(config), model_config_pb2.ModelConfig())
    assert read(text_format.MessageToString(theirs)) == config
    assert read(text_format.MessageToString(theirs, as_one_line=True, as_utf8=True)) == config


VALID = to_text(
    dataclasses.replace(
        ModelConfig(name="m", backend="python", max_batch_size=8),
        input=(ModelInput(name="A", data_type="TYPE_FP32", dims=(3, -1)),),
        parameters={"k": ModelParameter(string_value="v w")},
        dynamic_batching=ModelDynamicBatching(
            preferred_batch_size=(4, 8), priority_queue_policy={1: ModelQueuePolicy(timeout_action="DELAY")}
        ),
    )
)


@pytest.mark.filterwarnings("ignore:.*invalid escape sequence:DeprecationWarning")
@given(st.data())
@settings(max_examples=300)
def test_a_damaged_text_gives_mistakes_and_never_an_exception(data: st.DataObject) -> None:
    text = VALID
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(start, min(len(text), start + 6)))
        inserted = data.draw(st.text("{}[]<>()\"'\\:;,-/*#.0x9e aA_\n\té\ud800\udcff", max_size=4))
        text = text[:start] + inserted + text[end:]
    parsed = parse_text(text, FILE)
    assert isinstance(parsed.config, ModelConfig)
    for mistake in parsed.mistakes:
        assert mistake.message
        assert mistake.remedy
        assert 1 <= mistake.line <= text.count("\n") + 1
        assert mistake.column >= 1
    _refused_by_protobuf_as_well(text, bool(parsed.mistakes))


@given(st.text(max_size=60))
@example("{" * 5000)
@example("input " * 3000)
@example("a-" * 30_000)
@example("{%" * 30_000)
@example("9" * 5000)
@example("max_batch_size: " + "9" * 5000)
@example('name: "' + "\\x" * 100)
def test_no_text_is_too_odd(text: str) -> None:
    parsed = parse_text(text)
    assert all(mistake.message for mistake in parsed.mistakes)
    read_json(to_json(parsed.config))


def _refused_by_protobuf_as_well(text: str, refused: bool) -> None:
    """Check that what protobuf refuses is refused.

    Its Python parser is stricter than the one in C++ in one point (a blank behind a minus) and more lenient in others,
    so only its refusals bind us.
    """
    joined = re.sub(r"-(?:\s|#[^\n]*\n)+(?=[0-9.a-zA-Z])", "-", text)
    try:
        text_format.Parse(joined, model_config_pb2.ModelConfig())
    except (text_format.ParseError, ValueError, SystemError):  # the last for half a surrogate pair, which it trips over
        assert refused, text

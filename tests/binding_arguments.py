"""What a model may pass for each parameter of ``triton_python_backend_utils``, and what becomes of it.

A table of types, and the parameters that are of them. A probe runs as a program in the model ``lab`` of the exam: the
unit tests hold our package to the table, and the exam has Triton confirm it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Values = Mapping[str, str]
"""By an argument, as Python text: the ``repr`` of what the function made of it, or the class of the error."""

REFUSED = "TypeError"


def refused(*values: str, by: str = REFUSED) -> Values:
    return dict.fromkeys(values, by)


TEXT: Values = {
    "'a'": "'a'",
    "b'a'": "'a'",
    "bytearray(b'a')": "'a'",
    "np.str_('a')": "'a'",
    "np.bytes_(b'a')": "'a'",
    "Text('a')": "'a'",
    "Bytes(b'a')": "'a'",
    "'\\u00e9'": "'\u00e9'",
    "b'\\xc3\\xa9'": "'\u00e9'",
    **refused(
        "5",
        "None",
        "True",
        "1.5",
        "['a']",
        "memoryview(b'a')",
        "np.array('a')",
        "pathlib.Path('a')",
    ),
}
HALF_A_CHARACTER: Values = refused("'\\ud800'")
FIVE = (
    "5",
    "np.int64(5)",
    "np.uint8(5)",
    "np.float32(5)",
    "np.array(5)",
    "Five.FIVE",
    "Index()",
    "Whole()",
    "decimal.Decimal(5)",
    "fractions.Fraction(5)",
)


def integer(least: int, most: int) -> Values:
    return {
        **dict.fromkeys(FIVE, "5"),
        "True": "1",
        "np.bool_(True)": "1",
        str(least): str(least),
        str(most): str(most),
        **refused(str(least - 1), str(most + 1)),
        **refused("5.0", "np.float64(5)", "'5'", "b'5'", "None", "5j", "[5]", "np.array([5, 6])"),
    }


INT64 = integer(-(2**63), 2**63 - 1)
UINT32 = integer(0, 2**32 - 1)
UINT64 = integer(0, 2**64 - 1)
NUMBER: Values = {
    **dict.fromkeys([value for value in FIVE if value != "Whole()"], "5.0"),
    "5.0": "5.0",
    "np.float64(5)": "5.0",
    "True": "1.0",
    "np.bool_(True)": "1.0",
    "2**64": "1.8446744073709552e+19",
    **refused("'5'", "b'5'", "bytearray(b'5')", "None", "5j", "[5]", "Whole()", "2**1024", "np.array([5, 6])"),
}
FLAG: Values = {
    **dict.fromkeys(("True", "1", "1.0", "np.bool_(True)", "np.int64(1)", "np.array(True)", "Truth()"), "True"),
    **dict.fromkeys(("False", "0", "np.bool_(False)"), "False"),
    **refused("None", "'x'", "b''", "[]", "np.array([True, False])"),
}
TEXTS: Values = {
    **dict.fromkeys(("[]", "()"), "[]"),
    **dict.fromkeys(
        (
            "['a']",
            "('a',)",
            "[b'a']",
            "[bytearray(b'a')]",
            "[np.str_('a')]",
            "['a', b'a']",
            "np.array(['a'])",
            "np.array([b'a'])",
            "np.array(['a'], object)",
            "collections.deque(['a'])",
            "collections.UserList(['a'])",
        ),
        "['a']",
    ),
    "['b', b'a']": "['a', 'b']",
    **refused("None", "'ab'", "b'ab'", "bytearray(b'ab')", "''", "5", "[5]", "[None]", "[['a']]", "['\\ud800']"),
    **refused("{'a'}", "{'a': 1}", "{'a': 1}.keys()", "iter(['a'])", "(each for each in 'ab')", "range(2)"),
}
TENSORS: Values = {
    **dict.fromkeys(("[]", "()", "range(0)", "np.zeros(0)"), "0"),
    **dict.fromkeys(
        ("[T]", "(T,)", "np.array([T], object)", "collections.deque([T])", "collections.UserList([T])"), "1"
    ),
    **refused("[None]", "[T, None]", by="TritonModelException"),
    **refused("None", "T", "5", "[5]", "[T, 5]", "'a'", "''", "b''", "{T}", "{'a': T}", "{}", "set()", "iter([T])"),
    **refused("[pb_utils.InferenceResponse([])]"),
}
CORRELATION_ID: Values = {
    "'a'": "'a'",
    "Text('a')": "'a'",
    "np.str_('a')": "'a'",
    "''": "''",
    "5": "5",
    "True": "1",
    "Five.FIVE": "5",
    str(2**64 - 1): str(2**64 - 1),
    **refused("None"),
    **refused("b'a'", "np.int64(5)", "5.0", "np.bool_(True)", "Index()", "['a']", by="TritonModelException"),
}
PARAMETERS: Values = {
    **dict.fromkeys(("None", "{}"), "'{}'"),
    **dict.fromkeys(("{'a': 1}", "{np.str_('a'): 1}", "collections.OrderedDict(a=1)"), "'{\"a\": 1}'"),
    "{'a': True}": "'{\"a\": true}'",
    "{'a': Five.FIVE}": "'{\"a\": 5}'",
    "{'a': Text('x')}": '\'{"a": "x"}\'',
    "{'a': 2**64}": f"'{{\"a\": {2**64}}}'",
    "{'a': '\\ud800'}": '\'{"a": "\\\\ud800"}\'',
    **refused("{b'a': 1}", "{1: 1}", "{'a': b'x'}", "{'a': 1.5}", "{'a': None}", by="TritonModelException"),
    **refused("{'a': np.int64(1)}", "{'a': np.bool_(True)}", "5", "[]", "'{}'", by="TritonModelException"),
}


@dataclass(frozen=True)
class Parameter:
    """One parameter, and the table that it has."""

    made: str
    """What is done with ``value``, as Python text."""
    values: Values
    read: bool = True
    """Whether ``made`` tells what became of the value; else that is only known not to fail."""

    @property
    def expected(self) -> list[str]:
        """What the probe says."""
        return [
            f"{value} -> {outcome if self.read or outcome.endswith(('Error', 'Exception')) else 'taken'}"
            for value, outcome in self.values.items()
        ]

    @property
    def program(self) -> str:
        """The probe."""
        return f"{HELP}\nprobe(lambda value: {self.made}, {list(self.values)!r})"


def without(values: Values, *outcomes: str) -> Values:
    return {value: outcome for value, outcome in values.items() if outcome not in outcomes}


ERROR_CODE: Values = {
    "pb_utils.TritonError.NOT_FOUND": "2",
    **refused("2", "None", "'NOT_FOUND'", "np.int64(2)", "Five.FIVE"),
}
KIND: Values = {"pb_utils.MetricFamily.GAUGE": "taken", **refused("1", "None", "'GAUGE'", "np.int64(1)")}
LEVEL: Values = {
    "pb_utils.Logger.WARNING": "taken",
    "pb_utils.Logger.LogLevel.INFO": "taken",
    **refused("0", "None", "True", "'INFO'", "np.int64(0)"),
}
MEMORY: Values = {
    "pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU)": "taken",
    **refused("None", "5", "pb_utils.TRITONSERVER_MEMORY_CPU"),
}
MEMORY_TYPE: Values = {"pb_utils.TRITONSERVER_MEMORY_CPU": "taken", **refused("1", "None", "np.int64(1)")}
ERROR: Values = {
    "None": "False",
    "pb_utils.TritonError('x')": "True",
    **refused("'x'", "5", "ValueError('x')", "pb_utils.TritonModelException('x')", "pb_utils.InferenceResponse([])"),
}
RESPONSE: Values = refused("5", "'a'", "[]", "pb_utils.TritonError('a')", "pb_utils.InferenceResponse")
LABELS: Values = {
    **dict.fromkeys(("None", "{}", "{'a': 'b'}", "{'a': np.str_('b')}", "{True: 'b'}", "{'a': ''}"), "taken"),
    **refused("{b'a': 'b'}", "{'a': b'b'}"),
    **refused("[]", "5", "'a'", by="TritonModelException"),
}
BUCKETS: Values = {
    **dict.fromkeys(("[]", "[1, 2]", "[1.5]", "[True]", "[np.float32(1)]", "[np.int64(1)]", "[2**64]"), "taken"),
    **refused("(1, 2)", "5", "'a'", by="TritonModelException"),
}
FILES: Values = {
    **dict.fromkeys(("None", "{}"), "taken"),
    **refused("{'file:1/model.py': 'x'}", "{'file:1/model.py': bytearray(b'x')}", "{'file:1/model.py': None}"),
    **refused("5", "[]", "[('file:1/model.py', b'x')]", by="TritonModelException"),
}
RESPONSES: Values = {
    value: {"True": "'ResponseIterator'", "False": "'InferenceResponse'"}.get(outcome, outcome)
    for value, outcome in FLAG.items()
}
ALL_TEXT = {**TEXT, **HALF_A_CHARACTER}
KEPT_TEXT = {**ALL_TEXT, "''": "''", "b''": "''"}
PROBES: Mapping[str, Parameter] = {
    "Tensor: name": Parameter(
        "pb_utils.Tensor(value, np.zeros(2)).name()", {**ALL_TEXT, **refused("''", "b''", by="TritonModelException")}
    ),
    "Tensor: array": Parameter(
        "pb_utils.Tensor('a', value).shape()",
        {
            "np.zeros(2)": "[2]",
            "np.matrix([[1]])": "[1, 1]",
            **refused("[1.0]", "3.0", "None", "np.float32(1)", "b'a'", "T"),
        },
    ),
    "TritonError: message": Parameter(
        "pb_utils.TritonError(value).message()", {**TEXT, "''": "''", "'a\\0b'": "'a\\x00b'"}
    ),
    "TritonError: code": Parameter("int(pb_utils.TritonError('x', value).code())", ERROR_CODE),
    "InferenceRequest: request_id": Parameter("asking(request_id=value).request_id()", KEPT_TEXT),
    "InferenceRequest: model_name": Parameter("asking(model_name=value)", KEPT_TEXT, read=False),
    "InferenceRequest: requested_output_names": Parameter(
        "sorted(asking(requested_output_names=value).requested_output_names())",
        {**TEXTS, **refused("['']", "[b'']", by="TritonModelException")},
    ),
    "InferenceRequest: inputs": Parameter("len(asking(inputs=value).inputs())", TENSORS),
    "InferenceRequest: correlation_id": Parameter("asking(correlation_id=value).correlation_id()", CORRELATION_ID),
    "InferenceRequest: model_version": Parameter("asking(model_version=value)", INT64, read=False),
    "InferenceRequest: flags": Parameter("asking(flags=value).flags()", UINT32),
    "InferenceRequest: timeout": Parameter("asking(timeout=value).timeout()", UINT64),
    "InferenceRequest: preferred_memory": Parameter("asking(preferred_memory=value)", MEMORY, read=False),
    "InferenceRequest: trace": Parameter(
        "asking(trace=value)", {"request.trace()": "taken", **refused("None", "5", "'a'")}, read=False
    ),
    "InferenceRequest: parameters": Parameter("asking(parameters=value).parameters()", PARAMETERS),
    "set_flags": Parameter("flags(value)", UINT32),
    "set_release_flags": Parameter("(request.set_release_flags(value), request.set_release_flags(1))", UINT32, False),
    "exec: decoupled": Parameter("type(asking(model_name='missing').exec(value)).__name__", RESPONSES),
    "exec: decoupled by name": Parameter("type(asking().exec(decoupled=value)).__name__", RESPONSES),
    "async_exec: decoupled": Parameter("type(asyncio.run(awaited(value))).__name__", RESPONSES),
    "InferenceResponse: output_tensors": Parameter("len(pb_utils.InferenceResponse(value).output_tensors())", TENSORS),
    "InferenceResponse: error": Parameter("pb_utils.InferenceResponse([], error=value).has_error()", ERROR),
    "send: response": Parameter("request.get_response_sender().send(value)", RESPONSE, False),
    "send: flags": Parameter("unsupported(value)", without(UINT32, "0", "1"), False),
    "PreferredMemory: type": Parameter("pb_utils.PreferredMemory(value)", MEMORY_TYPE, False),
    "PreferredMemory: device": Parameter(
        "pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, value)", INT64, False
    ),
    "log: message": Parameter("pb_utils.Logger.log(value)", TEXT, False),
    "log: level": Parameter("pb_utils.Logger.log('a', value)", LEVEL, False),
    "log_info": Parameter("pb_utils.Logger.log_info(value)", TEXT, False),
    "log_warn": Parameter("pb_utils.Logger.log_warn(value)", TEXT, False),
    "log_error": Parameter("pb_utils.Logger.log_error(value)", TEXT, False),
    "log_verbose": Parameter("pb_utils.Logger.log_verbose(value)", TEXT, False),
    "MetricFamily: name": Parameter(
        "pb_utils.MetricFamily(value, 'x', pb_utils.MetricFamily.COUNTER)",
        {value: outcome for value, outcome in ALL_TEXT.items() if outcome != "'\u00e9'"},
        False,
    ),
    "MetricFamily: description": Parameter("family(description=value)", ALL_TEXT, False),
    "MetricFamily: kind": Parameter("family(kind=value)", KIND, False),
    "Metric: labels": Parameter("COUNTERS.Metric(labels=value)", LABELS, False),
    "Metric: buckets": Parameter("with_buckets(value)", BUCKETS, False),
    "increment": Parameter("counted('COUNTER', 'increment', value)", NUMBER),
    "set": Parameter("counted('GAUGE', 'set', value)", NUMBER),
    "observe": Parameter("HISTOGRAM.observe(value)", NUMBER, False),
    "is_model_ready: model_name": Parameter("done(pb_utils.is_model_ready(value))", KEPT_TEXT, False),
    "is_model_ready: model_version": Parameter(
        "done(pb_utils.is_model_ready('echo', value))",
        {"'1'": "taken", "b'1'": "taken", "''": "taken", "np.str_('1')": "taken", **refused("1", "None", "1.0")},
        False,
    ),
    "unload_model: model_name": Parameter("pb_utils.unload_model(value)", ALL_TEXT, False),
    "unload_model: unload_dependents": Parameter("pb_utils.unload_model('missing', value)", FLAG, False),
    "load_model: model_name": Parameter(
        "pb_utils.load_model(value)",
        {"b'late'": "taken", "np.str_('late')": "taken", **refused("5", "None", "['late']", "'\\ud800'")},
        False,
    ),
    "load_model: config": Parameter(
        "pb_utils.load_model('late', value)",
        {"CONFIG": "taken", "CONFIG.encode()": "taken", "''": "taken", **refused("5", "None", "{}")},
        False,
    ),
    "load_model: files": Parameter("pb_utils.load_model('late', CONFIG, value)", FILES, False),
}
"""By name, each parameter that Triton treats as the table says."""

OF_OUR_OWN: Mapping[str, Parameter] = {
    "the name of a tensor": Parameter("pb_utils.Tensor(value, np.zeros(2)).name()", refused("b'\\xff'")),
    "the id of a request": Parameter("asking(request_id=value)", refused("b'\\xff'")),
    "the name of a model": Parameter("asking(model_name=value)", refused("b'\\xff'")),
    "names of outputs": Parameter("asking(requested_output_names=value)", refused("[b'\\xff']")),
    "messages": Parameter(
        "pb_utils.TritonError(value).message()", {"b'a\\xff'": "'a\\\\xff'", "'a\\ud800'": "'a\\\\ud800'"}
    ),
    "lines of the log": Parameter("pb_utils.Logger.log_info(value)", {"b'\\xff'": "", "'\\ud800'": ""}, False),
    "correlation ids": Parameter(
        "asking(correlation_id=value)", refused("-1", "2**64", "'\\ud800'", by="TritonModelException")
    ),
    "buckets": Parameter("with_buckets(value)", refused("['a']", "[None]", "[1j]", "[[1]]", by="TritonModelException")),
    "paths of files": Parameter("pb_utils.load_model('late', CONFIG, value)", refused("{5: b'x'}")),
}
"""What Triton takes, or refuses by an error that does not tell what is wrong."""

UNASKED: Mapping[str, Parameter] = {
    "from_dlpack: name": Parameter(
        "pb_utils.Tensor.from_dlpack(value, np.zeros(2)).name()",
        {**ALL_TEXT, **refused("b'\\xff'"), **refused("''", "b''", by="TritonModelException")},
    ),
    "MetricFamily: name that cannot be": Parameter(
        "pb_utils.MetricFamily(value, 'x', pb_utils.MetricFamily.COUNTER)",
        {**refused("b'\\xff'"), **refused("''", "b''", "'\\u00e9'", "'a\\0b'", by="TritonModelException")},
    ),
    "Metric: labels that cannot be": Parameter(
        "COUNTERS.Metric(labels=value)",
        {
            **refused("{'a': 1}", "{'a': None}", "{'a': '\\ud800'}", by="TritonModelException"),
            **refused("{1: 'b'}", "{'__a': 'b'}", "{'': 'b'}", by="TritonModelException"),
        },
    ),
    "Metric: buckets out of order": Parameter(
        "with_buckets(value)", refused("[2, 1]", "[1, 1]", by="TritonModelException")
    ),
    "load_model: path that is not UTF-8": Parameter(
        "pb_utils.load_model('late', CONFIG, value)", refused("{b'\\xff': b'x'}")
    ),
}
"""What may end Triton, or its process for models."""

HELP = """
import asyncio, collections, decimal, enum, fractions, itertools, json, pathlib, time

class Text(str): pass
class Bytes(bytes): pass
class Five(enum.IntEnum): FIVE = 5
class Index:
    def __index__(self): return 5
class Whole:
    def __int__(self): return 5
class Truth:
    def __bool__(self): return True

T = pb_utils.Tensor("IN", np.zeros(2, np.float32))
TENSORS = [{"name": name, "data_type": "TYPE_FP32", "dims": [-1]} for name in ("IN", "OUT")]
CONFIG = json.dumps({"backend": "python", "input": TENSORS[:1], "output": TENSORS[1:]})
NUMBERS = itertools.count(time.time_ns())

def probe(make, values):
    for text in values:
        try:
            made = make(eval(text, globals()))
        except Exception as error:
            say(text, "->", type(error).__name__)
        else:
            said = isinstance(made, (str, int, float, list))
            say(text, "->", repr(made) if said else "taken")

def asking(**more):
    return pb_utils.InferenceRequest(
        **{"model_name": "missing", "requested_output_names": ["OUT"], "inputs": [T], **more}
    )

async def awaited(value):
    return await asking().async_exec(value)

def flags(value):
    asked = asking()
    asked.set_flags(value)
    return asked.flags()

def done(_):
    pass

def unsupported(value):
    try:
        request.get_response_sender().send(None, value)
    except pb_utils.TritonModelException as error:
        assert "Unsupported flag" in str(error)

def family(description="x", kind=pb_utils.MetricFamily.COUNTER):
    return pb_utils.MetricFamily(f"probe_{next(NUMBERS)}", description, kind)

COUNTERS = family()
HISTOGRAMS = family(kind=pb_utils.MetricFamily.HISTOGRAM)
HISTOGRAM = HISTOGRAMS.Metric(labels={}, buckets=[1.0, 2.0])

def with_buckets(buckets):
    own = family(kind=pb_utils.MetricFamily.HISTOGRAM)
    own.Metric(labels={}, buckets=buckets).observe(1)

def counted(kind, method, value):
    own = family(kind=getattr(pb_utils.MetricFamily, kind))
    metric = own.Metric(labels={})
    getattr(metric, method)(value)
    return metric.value()
"""

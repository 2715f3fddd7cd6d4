"""Python models that go wrong in every way, and what Triton 2.51 says of each: recorded there, word for word.

``{file}`` stands for the path of model.py. Where we say something else on purpose, the case is in ``DEVIATIONS``, with
Triton's words, ours, and why.
"""

from __future__ import annotations

from textwrap import indent
from typing import NamedTuple

IMPORTS = "import numpy as np\nimport triton_python_backend_utils as pb_utils\n"
CLASS = "\n\nclass TritonPythonModel:\n"


def method(name: str, *lines: str) -> str:
    """Return a method of the model; ``async`` belongs to the name."""
    coroutine, _, bare = name.rpartition(" ")
    argument = "requests" if bare == "execute" else "args"
    start = f"    {coroutine} def" if coroutine else "    def"
    return f"{start} {bare}(self, {argument}):\n" + indent("\n".join(lines) + "\n", "        ")


def executing(*lines: str, top: str = "") -> str:
    """Return a model whose ``execute`` consists of ``lines``; the first of them is line 7."""
    return IMPORTS + top + CLASS + method("execute", *lines)


def initializing(*lines: str, top: str = "") -> str:
    """Return a model whose ``initialize`` consists of ``lines``; the first of them is line 7."""
    return IMPORTS + top + CLASS + method("initialize", *lines) + "\n" + method("execute", "return []")


def answering(response: str) -> str:
    """Return a model that answers each request with the expression ``response``, on line 9."""
    return executing(
        "responses = []",
        "for request in requests:",
        f"    responses.append(pb_utils.InferenceResponse({response}))",
        "return responses",
    )


def sending(array: str) -> str:
    """Return a model that answers with the expression ``array`` as OUTPUT0, on line 9."""
    return answering(f'[pb_utils.Tensor("OUTPUT0", {array})]')


# --- What keeps a model from being loaded. The server puts "Internal: " before it.

_DEEP = "def helper(x):\n    return {}[x]\n"
_CUSTOM = "class Bad(Exception):\n    def __str__(self):\n        return 'custom text'\n"

LOAD_ERRORS: dict[str, tuple[str, str]] = {
    "an error in initialize": (
        initializing('raise ValueError("no weights")'),
        "ValueError: no weights\n\nAt:\n  {file}(7): initialize\n",
    ),
    "an error below initialize": (
        initializing('helper("key")', top=_DEEP),
        "KeyError: 'key'\n\nAt:\n  {file}(4): helper\n  {file}(9): initialize\n",
    ),
    "an error without a message": (
        initializing("raise ValueError"),
        "ValueError: <EMPTY MESSAGE>\n\nAt:\n  {file}(7): initialize\n",
    ),
    "a message of several lines": (
        initializing('raise ValueError("one\\ntwo")'),
        "ValueError: one\ntwo\n\nAt:\n  {file}(7): initialize\n",
    ),
    "an error with a cause": (
        initializing(
            "try:", "    1 / 0", "except ZeroDivisionError as error:", "    raise OSError('outer') from error"
        ),
        "OSError: outer\n\nAt:\n  {file}(10): initialize\n",
    ),
    "an error of the package": (
        initializing('raise pb_utils.TritonModelException("not today")'),
        "TritonModelException: not today\n\nAt:\n  {file}(7): initialize\n",
    ),
    "an error of the model's own class": (
        initializing("raise Bad(1, 2)", top=_CUSTOM),
        "Bad: custom text\n\nAt:\n  {file}(10): initialize\n",
    ),
    "an exit": (initializing("raise SystemExit(3)"), "SystemExit: 3\n\nAt:\n  {file}(7): initialize\n"),
    "an error in the constructor": (
        "class TritonPythonModel:\n    def __init__(self):\n        raise RuntimeError('no')\n",
        "RuntimeError: no\n\nAt:\n  {file}(3): __init__\n",
    ),
    "a constructor with arguments": (
        "class TritonPythonModel:\n    def __init__(self, x):\n        pass\n",
        "TypeError: TritonPythonModel.__init__() missing 1 required positional argument: 'x'",
    ),
    "initialize without arguments": (
        "class TritonPythonModel:\n    def initialize(self):\n        pass\n",
        "TypeError: TritonPythonModel.initialize() takes 1 positional argument but 2 were given",
    ),
    "a syntax error": (
        "class TritonPythonModel:\n    def execute(self, requests)\n        return []\n",
        "SyntaxError: expected ':' (model.py, line 2)",
    ),
    "a wrong indentation": (
        "class TritonPythonModel:\n    def execute(self, requests):\n    return []\n",
        "IndentationError: expected an indented block after function definition on line 2 (model.py, line 3)",
    ),
    "no class": ("x = 1\n", "AttributeError: module '1.model' has no attribute 'TritonPythonModel'"),
}

# --- What fails a whole batch. The server puts "Failed to process the request(s) for model 'INSTANCE', message: "
# before it.

_INNER = "def inner():\n    raise KeyError('x')\n\n\ndef outer():\n    inner()\n"
_RESPONSE = "pb_utils.InferenceResponse([])"
_COUNT = (
    "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
    "InferenceRequest(s) size is:1, and InferenceResponse(s) size is:{}\n"
)
_LIST = "Expected a list in the execute return, found type '{}'."
_OBJECT = "Expected an 'InferenceResponse' object in the execute function return list, found type '{}'."
_BINDING = (
    "TypeError: __init__(): incompatible constructor arguments. The following argument types are supported:\n"
    "    1. c_python_backend_utils.{}\n\nInvoked with: {}\n\nAt:\n  {{file}}(9): execute\n"
)
_TENSOR = "Tensor(arg0: str, arg1: numpy.ndarray)"
_ERROR = "TritonError(message: str, code: c_python_backend_utils.TritonError.__ErrorCode = <__ErrorCode.INTERNAL: 1>)"
_NO_DTYPE = "TritonModelException: NumPy dtype is not supported.\n\nAt:\n  {file}(9): execute\n"

EXECUTE_ERRORS: dict[str, tuple[str, str]] = {
    "an error": (
        executing('raise ValueError("bad batch")'),
        "ValueError: bad batch\n\nAt:\n  {file}(7): execute\n",
    ),
    "an error below execute": (
        executing("outer()", top=_INNER),
        "KeyError: 'x'\n\nAt:\n  {file}(4): inner\n  {file}(8): outer\n  {file}(13): execute\n",
    ),
    "an error in a coroutine": (
        IMPORTS + CLASS + method("async execute", 'raise ValueError("bad batch")'),
        "ValueError: bad batch\n\nAt:\n  {file}(7): execute\n",
    ),
    "no execute": (
        "class TritonPythonModel:\n    pass\n",
        "Python model {file} does not implement `execute` method.",
    ),
    "execute without arguments": (
        "class TritonPythonModel:\n    def execute(self):\n        return []\n",
        "TypeError: TritonPythonModel.execute() takes 1 positional argument but 2 were given",
    ),
    "a tuple": (executing(f"return ({_RESPONSE},)"), _LIST.format("<class 'tuple'>")),
    "a dictionary": (executing("return {}"), _LIST.format("<class 'dict'>")),
    "no response": (executing("return []"), _COUNT.format(0)),
    "too many responses": (executing(f"return [{_RESPONSE}] * 2"), _COUNT.format(2)),
    "a number for a response": (executing("return [1]"), _OBJECT.format("<class 'int'>")),
    "an array for a response": (executing("return [np.zeros(2)]"), _OBJECT.format("<class 'numpy.ndarray'>")),
    "a single response": (
        executing(f"return {_RESPONSE}"),
        _LIST.format("<class 'c_python_backend_utils.InferenceResponse'>"),
    ),
    "a tensor for a response": (
        executing('return [pb_utils.Tensor("OUTPUT0", np.zeros(2))]'),
        _OBJECT.format("<class 'c_python_backend_utils.Tensor'>"),
    ),
    "complex numbers": (sending("np.zeros(2, np.complex64)"), _NO_DTYPE),
    "unicode strings": (sending('np.array(["a", "bc"])'), _NO_DTYPE),
    "big-endian numbers": (sending('np.arange(3, dtype=">f4")'), _NO_DTYPE),
    "long doubles": (sending("np.zeros(2, np.longdouble)"), _NO_DTYPE),
    "dates": (sending('np.zeros(2, "datetime64[s]")'), _NO_DTYPE),
    "records": (sending('np.zeros(2, [("a", "f4")])'), _NO_DTYPE),
    "raw memory": (sending('np.zeros(2, "V4")'), _NO_DTYPE),
    "a list for an array": (sending("[1.0, 2.0]"), _BINDING.format(_TENSOR, "'OUTPUT0', [1.0, 2.0]")),
    "a number for an array": (sending("3.0"), _BINDING.format(_TENSOR, "'OUTPUT0', 3.0")),
    "bytes for an array": (sending('b"abc"'), _BINDING.format(_TENSOR, "'OUTPUT0', b'abc'")),
    "nothing for an array": (sending("None"), _BINDING.format(_TENSOR, "'OUTPUT0', None")),
    "a number for a name": (
        answering("[pb_utils.Tensor(3, np.zeros(1, np.float32))]"),
        _BINDING.format(_TENSOR, "3, array([0.], dtype=float32)"),
    ),
    "an empty name": (
        answering('[pb_utils.Tensor("", np.zeros(2))]'),
        "TritonModelException: Tensor name cannot be an empty string.\n\nAt:\n  {file}(9): execute\n",
    ),
    "nothing for a tensor": (
        answering("[None]"),
        "TritonModelException: Output tensor for inference response should not be empty.\n\nAt:\n"
        "  {file}(9): execute\n",
    ),
    "a number for an error's code": (
        answering('error=pb_utils.TritonError("x", 3)'),
        _BINDING.format(_ERROR, "'x', 3"),
    ),
    "nothing for an error's message": (
        answering("error=pb_utils.TritonError(None)"),
        _BINDING.format(_ERROR, "None"),
    ),
}

# --- What a client gets to see of one output tensor: type, shape, bytes in wire form.

OUTPUTS: dict[str, tuple[str, str, list[int], str]] = {
    "uint16": ("np.arange(3, dtype=np.uint16)", "UINT16", [3], "000001000200"),
    "half precision": ("np.arange(3, dtype=np.float16)", "FP16", [3], "0000003c0040"),
    "booleans": ("np.array([True, False])", "BOOL", [2], "0100"),
    "long long": ("np.arange(2, dtype=np.longlong)", "INT64", [2], "00000000000000000100000000000000"),
    "another type than declared": ("np.zeros(1, np.int64)", "INT64", [1], "0000000000000000"),
    "more dimensions than declared": ("np.zeros((1, 2), np.float32)", "FP32", [1, 2], "0000000000000000"),
    "no dimension": ("np.array(3.0, np.float32)", "FP32", [], "00004040"),
    "a transposed array": (
        "np.arange(6, dtype=np.uint8).reshape(2, 3).T",
        "UINT8",
        [3, 2],
        "000301040205",
    ),
    "every second element": ("np.arange(6, dtype=np.uint8)[::2]", "UINT8", [3], "000204"),
    "a reversed array": ("np.arange(3, dtype=np.uint8)[::-1]", "UINT8", [3], "020100"),
    "a column-major array": (
        "np.asfortranarray(np.arange(6, dtype=np.uint8).reshape(2, 3))",
        "UINT8",
        [2, 3],
        "000102030405",
    ),
    "a broadcast array": ("np.broadcast_to(np.uint8(1), (2, 2))", "UINT8", [2, 2], "01010101"),
    "a read-only array": ('np.frombuffer(b"\\0\\0\\x80?", np.float32)', "FP32", [1], "0000803f"),
    "a matrix": ("np.matrix([[1, 2]], dtype=np.uint8)", "UINT8", [1, 2], "0102"),
    "nothing": ("np.zeros(0, np.float32)", "FP32", [0], ""),
    "a dimension of zero": ("np.zeros((2, 0, 3), np.float32)", "FP32", [2, 0, 3], ""),
    "no strings": ("np.zeros(0, object)", "BYTES", [0], ""),
    "no strings in two rows": ("np.zeros((2, 0), object)", "BYTES", [2, 0], ""),
    "str": ('np.array(["a", "bc\\u00e9"], dtype=object)', "BYTES", [2], "0100000061040000006263c3a9"),
    "bytes": ('np.array([b"a", b"\\xff"], dtype=object)', "BYTES", [2], "010000006101000000ff"),
    "bytes of fixed width": ('np.array([b"a", b"bc\\0d\\0"])', "BYTES", [2], "01000000610400000062630064"),
    "bytes with zeros": ('np.array([b"a\\0b\\0"], dtype=object)', "BYTES", [1], "0400000061006200"),
    "one string without dimension": ('np.array(b"x", dtype=object)', "BYTES", [], "0100000078"),
    "objects of all kinds": (
        'np.array([1, None, 2.5, b"x", "y", np.float32(3)], dtype=object)',
        "BYTES",
        [6],
        "0100000031040000004e6f6e6503000000322e350100000078010000007903000000332e30",
    ),
}

# --- Which outputs a client gets: the response, what the request asked for, and what comes, in order.

_ONE = 'pb_utils.Tensor("OUTPUT1", np.ones(1, np.float32))'
_ZERO = 'pb_utils.Tensor("OUTPUT0", np.zeros(1, np.float32))'
_OTHER = 'pb_utils.Tensor("OTHER", np.zeros(1, np.float32))'

CHOICES: dict[str, tuple[str, list[str], list[str]]] = {
    "all, in the model's order": (f"[{_ONE}, {_ZERO}]", [], ["OUTPUT1", "OUTPUT0"]),
    "the model's order, not the request's": (
        f"[{_ONE}, {_ZERO}]",
        ["OUTPUT0", "OUTPUT1"],
        ["OUTPUT1", "OUTPUT0"],
    ),
    "the one asked for": (f"[{_ONE}, {_ZERO}]", ["OUTPUT0"], ["OUTPUT0"]),
    "one that is not declared": (f"[{_OTHER}, {_ZERO}]", [], ["OUTPUT0"]),
    "one left out": (f"[{_ONE}]", [], ["OUTPUT1"]),
    "none": ("[]", [], []),
    "one twice": (f"[{_ZERO}, {_ZERO}]", [], ["OUTPUT0", "OUTPUT0"]),
    "a tuple of tensors": (f"({_ZERO},)", [], ["OUTPUT0"]),
    "by keyword": (f"output_tensors=[{_ZERO}]", [], ["OUTPUT0"]),
}


# --- Where we say something else.


class Deviation(NamedTuple):
    """A model, what Triton says when it executes, what we say, and why."""

    source: str
    triton: str
    ours: str
    reason: str


_RESPONSE_TYPES = (
    "InferenceResponse(output_tensors: List[c_python_backend_utils.Tensor] = [], "
    "error: c_python_backend_utils.TritonError = None{})"
)
_OLD = _RESPONSE_TYPES.format("")
_NEW = _RESPONSE_TYPES.format(", parameters: object = None")
_PARAMETERS = "Triton's later releases, which have response parameters, print the longer signature"
_AWAIT = "import asyncio\n\n\nasync def inner():\n    await asyncio.sleep(0)\n    raise KeyError('x')\n"

DEVIATIONS: dict[str, Deviation] = {
    "an error below a coroutine": Deviation(
        IMPORTS + _AWAIT + CLASS + method("async execute", "await inner()"),
        "KeyError: 'x'\n\nAt:\n  {file}(8): inner\n",
        "KeyError: 'x'\n\nAt:\n  {file}(8): inner\n  {file}(13): execute\n",
        "Triton loses the frames that wait; they are half of the way to the mistake",
    ),
    "a generator": Deviation(
        executing("yield 1"),
        "RuntimeError: Task got bad yield: 1\n\nAt:\n  {file}(7): execute\n",
        _LIST.format("<class 'generator'>"),
        "Triton takes generators for coroutines, and runs them as such",
    ),
    "text for an error": Deviation(
        answering('error="text"'),
        _BINDING.format(_OLD, "kwargs: error='text'"),
        _BINDING.format(_NEW, "kwargs: error='text'"),
        _PARAMETERS,
    ),
    "an exception for an error": Deviation(
        answering("error=pb_utils.TritonModelException('x')"),
        _BINDING.format(_OLD, "kwargs: error=TritonModelException('x')"),
        _BINDING.format(_NEW, "kwargs: error=TritonModelException('x')"),
        _PARAMETERS,
    ),
    "text for tensors": Deviation(
        answering('"abc"'), _BINDING.format(_OLD, "'abc'"), _BINDING.format(_NEW, "'abc'"), _PARAMETERS
    ),
    "nothing for tensors": Deviation(
        answering("None"), _BINDING.format(_OLD, "None"), _BINDING.format(_NEW, "None"), _PARAMETERS
    ),
    "an array for a tensor": Deviation(
        answering("[np.zeros(2)]"),
        _BINDING.format(_OLD, "[array([0., 0.])]"),
        _BINDING.format(_NEW, "[array([0., 0.])]"),
        _PARAMETERS,
    ),
    "a numpy number for an array": Deviation(
        sending("np.float32(3)"),
        _BINDING.format(_TENSOR, "'OUTPUT0', 3.0"),
        _BINDING.format(_TENSOR, "'OUTPUT0', np.float32(3.0)"),
        "it is numpy that prints the number, and since numpy 2 it says what kind of number it is",
    ),
    "a tensor by keyword": Deviation(
        answering('[pb_utils.Tensor(name="OUTPUT0", numpy_array=np.zeros(1))]'),
        _BINDING.format(_TENSOR, "kwargs: name='OUTPUT0', numpy_array=array([0.])"),
        "TypeError: Tensor.__init__() got some positional-only arguments passed as keyword arguments: "
        "'name, numpy_array'\n\nAt:\n  {file}(9): execute\n",
        "Python refuses these arguments before our code sees them",
    ),
    "an unknown keyword": Deviation(
        answering("outputs=[]"),
        _BINDING.format(_OLD, "kwargs: outputs=[]"),
        "TypeError: InferenceResponse.__init__() got an unexpected keyword argument 'outputs'\n\nAt:\n"
        "  {file}(9): execute\n",
        "Python refuses these arguments before our code sees them",
    ),
    "a masked array": Deviation(
        sending("np.ma.array([1, 2], mask=[0, 1])"),
        "AttributeError: 'numpy.ndarray' object has no attribute 'c_contiguous'\n\nAt:\n  {file}(9): execute\n",
        "TritonModelException: Tensor 'OUTPUT0' is a masked array, but a mask cannot be sent. Fill it first: "
        "array.filled(value)\n\nAt:\n  {file}(9): execute\n",
        "Triton's text is an accident",
    ),
    "no return": Deviation(
        executing("pass"),
        "",
        _LIST.format("<class 'NoneType'>"),
        "Triton never answers the request",
    ),
    "nothing for a response": Deviation(
        executing("return [None]"),
        "",
        _OBJECT.format("<class 'NoneType'>"),
        "Triton never answers the request",
    ),
}

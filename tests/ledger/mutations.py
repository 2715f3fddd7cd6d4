"""For each entry of the ledger, a change of the source that takes its effect away.

The test that an entry names has to fail then: ``make mutations`` sees whether it does (``ledger.mutate``). Most changes
follow from the kind of the entry, and the others are listed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import UnionType
from typing import Any, Final, NamedTuple, get_args, get_origin, get_type_hints

from nerite.config import model_config
from nerite.transports.http.routes import ENDPOINTS


class Edit(NamedTuple):
    """A change of one file."""

    file: str
    """Below ``src``."""
    new: str
    """Appended to the file; or, if ``old`` is not empty, in place of that, which occurs once."""
    old: str = ""

    def apply(self, text: str) -> str:
        """Return the changed text. Raises ``ValueError`` if the file does not have what is to be replaced once."""
        if not self.old:
            return f"{text}\n\n{self.new}\n"
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has {self.old!r} {text.count(self.old)} times")
        return text.replace(self.old, self.new)


def mutation(section: str, name: str) -> tuple[Edit, ...]:
    """Return what takes the effect of an entry away, by the title of its section."""
    return _LISTED.get((section, name)) or _KINDS[section](name)


# Fields of configurations: a message is made as if the field were not set.


def _field(name: str) -> tuple[Edit, ...]:
    message: Any = model_config.ModelConfig
    *path, last = name.split(".")
    for step in path:
        scope = {**vars(model_config), **vars(message)}
        message = _message(get_type_hints(message, scope)[_attribute(message, step)])
    owner, field = message.__qualname__, _attribute(message, last)
    return (
        Edit(
            "nerite/config/model_config.py",
            f"_unset, _made = {owner}(), {owner}.__init__\n"
            "def _without(self, **given):\n"
            "    _made(self, **given)\n"
            f"    object.__setattr__(self, {field!r}, _unset.{field})\n"
            f"{owner}.__init__ = _without",
        ),
    )


def _attribute(message: Any, name: str) -> str:
    return name if name in message.__dataclass_fields__ else f"{name}_"


def _message(hint: Any) -> Any:
    """Return the message in the type of a field, which may be optional, repeated, or the values of a map."""
    while get_origin(hint) is not None or isinstance(hint, UnionType):
        hint = next(each for each in get_args(hint) if each not in (type(None), Ellipsis, str))
    return hint


# Flags: what is given is passed over.


def _flag(name: str) -> tuple[Edit, ...]:
    return (
        Edit(
            "nerite/cli/command_line.py",
            "_read = _values\n"
            "def _values(given, warnings):\n"
            f"    return _read((each for each in given if each.flag.name != {name[2:]!r}), warnings)",
        ),
    )


# HTTP and gRPC: the method is unknown.


def _endpoint(name: str) -> tuple[Edit, ...]:
    method, path = name.split(" ")
    (found,) = (each for each in ENDPOINTS if each.path == path and method in each.methods)
    others = " ".join(each for each in found.methods if each != method) or "NONE"
    beginning = f'_endpoint("{found.name}", "'
    return (
        Edit(
            "nerite/transports/http/routes.py",
            f'{beginning}{others}", ',
            f'{beginning}{" ".join(found.methods)}", ',
        ),
    )


def _cloud(router: str, method: str, path: str) -> tuple[Edit, ...]:
    """Take a path away from a port of a cloud; ``path`` is an expression of ``head.path``."""
    return (
        Edit(
            "nerite/transports/clouds.py",
            f"_target = {router}.target\n"
            "def _without(self, head):\n"
            f"    if head.method == {method!r} and {path}:\n"
            "        return HttpTarget(reply.BAD_REQUEST)\n"
            "    return _target(self, head)\n"
            f"{router}.target = _without",
        ),
    )


def _call(name: str) -> tuple[Edit, ...]:
    return (Edit("nerite/transports/grpc/methods.py", f'_SERVICE}}{name}None": ', f'_SERVICE}}{name}": '),)


# Parameters of requests: they are passed over.

_BODIES: Final = "nerite/transports/http/request_bodies.py"
_MESSAGES: Final = "nerite/transports/grpc/infer_request.py"


def _parameter(name: str) -> tuple[Edit, ...]:
    return (
        Edit(
            _BODIES,
            "_all = read_parameters\n"
            "def read_parameters(value):\n"
            "    if isinstance(value, dict):\n"
            f"        value = {{k: v for k, v in value.items() if k != {name!r}}}\n"
            "    return _all(value)",
        ),
        Edit(
            _MESSAGES,
            "_all = _parameters\n"
            "def _parameters(parameters):\n"
            f"    return _all({{k: v for k, v in parameters.items() if k != {name!r}}})",
        ),
    )


def _tensor_parameter(name: str) -> tuple[Edit, ...]:
    """Take away a parameter of an input or output."""
    name = name.partition(": ")[2]
    return (
        Edit(
            _BODIES,
            "_all, _place = _parameters_of, _shared_place\n"
            "def _parameters_of(item):\n"
            f"    return {{k: v for k, v in _all(item).items() if k != {name!r}}}\n"
            "def _shared_place(parameters):\n"
            f"    return _place({{k: v for k, v in parameters.items() if k != {name!r}}})",
        ),
        Edit(
            _MESSAGES,
            "_all, _place = _output, _shared_place\n"
            "def _bare(tensor):\n"
            "    copy = type(tensor)()\n"
            "    copy.CopyFrom(tensor)\n"
            f"    copy.parameters.pop({name!r}, None)\n"
            "    return copy\n"
            "def _output(output):\n"
            "    return _all(_bare(output))\n"
            "def _shared_place(tensor):\n"
            "    return _place(_bare(tensor))",
        ),
    )


_REFUSES_UNKNOWN: Final = Edit(
    _BODIES,
    "_all = _parameters_of\n"
    "def _parameters_of(item):\n"
    "    for name in _all(item):\n"
    '        if not name.startswith(("binary_data", "classification", "shared_memory")):\n'
    '            raise InvalidArgument(f"unknown parameter {name}")\n'
    "    return _all(item)",
)


def _admin(method: str, kept: str) -> tuple[Edit, ...]:
    """Take parameters of a load or an unload away, but those of which an expression of ``name`` is true."""
    return (
        Edit(
            "nerite/server.py",
            f"_all = InferenceServer.{method}\n"
            "async def _without(self, model, parameters):\n"
            f"    await _all(self, model, {{name: value for name, value in parameters.items() if {kept}}})\n"
            f"InferenceServer.{method} = _without",
        ),
    )


# Python models: functions do nothing and return nothing, constants are None.

_MODULE: Final = "triton_python_backend_utils/__init__.py"


def _member(name: str) -> tuple[Edit, ...]:
    owner, _, member = name.rpartition(".")
    if not owner:
        return (Edit(_MODULE, f"{member} = (lambda *_, **__: None) if callable({member}) else None"),)
    return (
        Edit(
            _MODULE,
            "from inspect import getattr_static as _static_of\n"
            "def _take_away(cls, name):\n"
            "    own = _static_of(cls, name)\n"
            "    static = isinstance(own, (staticmethod, classmethod))\n"
            "    idle = (lambda *_, **__: None) if static or callable(own) else None\n"
            "    for each in cls.__subclasses__():\n"
            "        _take_away(each, name)\n"
            "    type.__setattr__(cls, name, staticmethod(idle) if static else idle)\n"
            f"_take_away({owner}, {member!r})",
        ),
    )


# Metrics: they are 0, and histograms and summaries are gone.


def _metric(name: str) -> tuple[Edit, ...]:
    return (
        Edit(
            "nerite/observability/exposition.py",
            "_written = Page._sample\n"
            "def _zero(self, name, of, value):\n"
            f"    if name != {name!r}:\n"
            "        return _written(self, name, of, value)\n"
            "    return _line(name, of, 0) if isinstance(value, (int, float)) else ''\n"
            "Page._sample = _zero",
        ),
    )


_KINDS: Final[Mapping[str, Callable[[str], tuple[Edit, ...]]]] = {
    "Fields of `config.pbtxt`": _field,
    "Flags": _flag,
    "HTTP": _endpoint,
    "gRPC": _call,
    "Parameters of requests": lambda name: _tensor_parameter(name) if ": " in name else _parameter(name),
    "Python models": _member,
    "Metrics": _metric,
}
_INSTANCE: Final = "nerite/backends/python/instance.py"
_RPC: Final = "nerite/transports/grpc/methods.py"
_SERVICE: Final = "nerite/transports/grpc/service.py"
_MODEL: Final = "len(head.path.split('/')) == 3 and head.path.startswith('/models/')"
_LISTED: Final[Mapping[tuple[str, str], tuple[Edit, ...]]] = {
    **{
        ("HTTP", f"{method} {path}"): _cloud("SagemakerRouter", method, where)
        for method, path, where in (
            ("GET", "/ping", "head.path == '/ping'"),
            ("POST", "/invocations", "head.path == '/invocations'"),
            ("GET", "/models", "head.path == '/models'"),
            ("POST", "/models", "head.path == '/models'"),
            ("GET", "/models/{model}", _MODEL),
            ("DELETE", "/models/{model}", _MODEL),
            ("POST", "/models/{model}/invoke", "head.path.endswith('/invoke')"),
        )
    },
    ("Flags", "--help"): (Edit("nerite/cli/command_line.py", 'def usage(entry, width=0):\n    return ""'),),
    # A policy that selects nothing is one that selects all.
    ("Fields of `config.pbtxt`", "version_policy.all"): (
        Edit(
            "nerite/config/model_config.py",
            "_made = ModelConfig.__init__\n"
            "def _without(self, **given):\n"
            "    if (policy := given.get('version_policy')) and policy.all:\n"
            "        given['version_policy'] = None\n"
            "    _made(self, **given)\n"
            "ModelConfig.__init__ = _without",
        ),
    ),
    ("HTTP", "GET $AIP_HEALTH_ROUTE"): _cloud("VertexRouter", "GET", "head.path == self._options.health_route"),
    ("HTTP", "POST $AIP_PREDICT_ROUTE"): _cloud("VertexRouter", "POST", "head.path == self._options.predict_route"),
    ("HTTP", "GET /metrics"): (
        Edit(
            "nerite/transports/http/metrics_service.py",
            'if head.path == "/none":',
            'if head.path in ("/metrics", "/metrics/") and head.method == "GET":',
        ),
    ),
    ("gRPC", "Check"): (Edit(_RPC, 'Health/CheckNone": "health"', 'Health/Check": "health"'),),
    ("gRPC", "StreamCoreMetrics"): (Edit(_RPC, '    METHOD + "None": "statistics",', '    METHOD: "statistics",'),),
    **{
        ("Parameters of requests", name): edits
        for name, edits in {
            "id": (Edit(_BODIES, 'def checked_id(value):\n    return ""'),),
            "headers": (Edit("nerite/transports/access.py", "def forwarded(fields, pattern):\n    return {}"),),
            "(any other)": (
                Edit(_BODIES, "_all = read_parameters\ndef read_parameters(value):\n    return _all(value)[0], {}"),
                Edit(_MESSAGES, "_all = _parameters\ndef _parameters(parameters):\n    return _all(parameters)[0], {}"),
            ),
            "inputs: (any other)": (_REFUSES_UNKNOWN,),
            "outputs: (any other)": (_REFUSES_UNKNOWN,),
            "load: config": _admin("load", "name != 'config'"),
            "load: file:<path>": _admin("load", "not name.startswith('file:')"),
            "unload: unload_dependents": _admin("unload", "False"),
            "index: ready": (
                Edit(
                    "nerite/transports/http/administration.py",
                    "ready = False",
                    'ready = _json_object(body).get("ready", False)',
                ),
            ),
            "header Inference-Header-Content-Length": (
                Edit(
                    "nerite/transports/http/handler.py",
                    "text = None",
                    'text = head.headers.get("inference-header-content-length")',
                ),
            ),
            "header Content-Encoding": (
                Edit(
                    "nerite/transports/http/inference_router.py",
                    'encoding = "identity"\n            accepts',
                    'encoding = head.headers.get("content-encoding", "identity")\n            accepts',
                ),
            ),
            "header Accept-Encoding": (
                Edit("nerite/transports/http/content_coding.py", 'def accepted(header):\n    return ""'),
            ),
            "metadata grpc-timeout": (
                Edit("nerite/transports/grpc/messages.py", "def timeout_seconds(value):\n    return None"),
            ),
            "metadata grpc-encoding": (
                Edit(
                    _SERVICE,
                    'b"identity".decode("latin-1")',
                    '(headers.get(b"grpc-encoding") or b"identity").decode("latin-1")',
                ),
            ),
            "metadata triton_grpc_error": (
                Edit(_SERVICE, "errors_end_it = False", 'errors_end_it = headers.get(b"triton_grpc_error") == b"true"'),
            ),
        }.items()
    },
    **{
        ("Python models", name): edits
        for name, edits in {
            "TritonPythonModel.auto_complete_config": (
                Edit(
                    "nerite/backends/python/backend.py",
                    "hook = None",
                    'hook = getattr(model_class, "auto_complete_config", None)',
                ),
            ),
            "TritonPythonModel.initialize": (
                Edit(_INSTANCE, "pass", "self._finished(self.model.initialize(_arguments(model, context)))"),
            ),
            "TritonPythonModel.execute": (Edit(_INSTANCE, "returned = None", "returned = self.model.execute(served)"),),
            "TritonPythonModel.is_ready": (
                Edit(_INSTANCE, "ready = True", "ready = self._finished(self.model.is_ready(), READY_LIMIT)"),
            ),
            "TritonPythonModel.finalize": (Edit(_INSTANCE, "pass", "self._finished(self.model.finalize())"),),
            "parameters: EXECUTION_ENV_PATH": (
                Edit(
                    "nerite/backends/python/environments.py",
                    "    return None\n    environment = locate_environment(context)",
                    "    environment = locate_environment(context)",
                ),
            ),
            "parameters: FORCE_CPU_ONLY_INPUT_TENSORS": (
                Edit(
                    "nerite/models/device_inputs.py",
                    'FORCE_CPU: Final = "NONE"',
                    'FORCE_CPU: Final = "FORCE_CPU_ONLY_INPUT_TENSORS"',
                ),
            ),
        }.items()
    },
}  # fmt: skip
"""Changes that do not follow from the kind of the entry."""

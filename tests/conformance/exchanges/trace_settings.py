"""The trace extension: what is traced, of all models and of one, told and changed while the server runs."""

from conformance.exchange import Eventually, Grpc, Http, get, infer, post, tensor
from conformance.exchanges.scenes import TRACED
from nerite.wire import grpc_service as pb

SCENE = TRACED
ALL = "/v2/trace/setting"
ECHO = "/v2/models/echo/trace/setting"
CLEAR = dict.fromkeys(("trace_level", "trace_rate", "trace_count", "log_frequency"))
BACK = [post(ECHO, CLEAR), post(ALL, CLEAR)]
"""To how the server was started."""


def change(**settings):
    return [post(ALL, settings), get(ALL), *BACK]


def raw(body):
    return [post(ALL, body), get(ALL), *BACK]


def from_off(*levels):
    return [post(ALL, {"trace_level": ["OFF"]}), post(ALL, {"trace_level": list(levels)}), *BACK]


def model(*steps):
    """Settings of a model; those of the server where a step is a pair that begins with None."""
    asked = []
    for step in steps:
        of_server = isinstance(step, tuple)
        asked += [post(ALL if of_server else ECHO, step[1] if of_server else step), get(ALL), get(ECHO)]
    return [*asked, *BACK]


def setting(name="", **settings):
    request = pb.TraceSettingRequest(model_name=name)
    for key, values in settings.items():
        request.settings[key].value.extend(values)
    return Grpc("TraceSetting", request)


def grpc(name="", **settings):
    return [setting(name, **settings), *BACK]


ASKED = infer("echo", tensor("IN", "INT32", [1, 2], [1, 2]))
NUMBERS = ("trace_rate", "trace_count", "log_frequency")

EXCHANGES = {
    "as it is": get(ALL),
    "as it is for a model": get(ECHO),
    "of a model that is not loaded": get("/v2/models/pair/trace/setting"),
    "of a model that there is not": get("/v2/models/nobody/trace/setting"),
    "of a version": get("/v2/models/echo/versions/1/trace/setting"),
    "a slash too many": get(f"{ALL}/"),
    "half the path": get("/v2/trace"),
    "another method": Http("PUT", ALL),
    "nothing changed": change(),
    "no body": raw(b""),
    "broken": raw(b"{"),
    "a list": raw(b"[1]"),
    "changed for a model that there is not": post("/v2/models/nobody/trace/setting", {"trace_rate": "3"}),
    "broken for a model that there is not": post("/v2/models/nobody/trace/setting", b"{"),
    **{f"{name}: a text": change(**{name: "3"}) for name in NUMBERS},
    **{f"{name}: a number": change(**{name: 3}) for name in NUMBERS},
    **{f"{name}: a list": change(**{name: ["3"]}) for name in NUMBERS},
    **{f"{name}: an object": change(**{name: {}}) for name in NUMBERS},
    **{f"{name}: true": change(**{name: True}) for name in NUMBERS},
    **{f"{name}: null": change(**{name: None}) for name in NUMBERS},
    **{f"{name}: zero": change(**{name: "0"}) for name in NUMBERS},
    **{f"{name}: letters": change(**{name: "abc"}) for name in NUMBERS},
    **{f"{name}: nothing": change(**{name: ""}) for name in NUMBERS},
    **{f"{name}: letters behind": change(**{name: "4x"}) for name in NUMBERS},
    **{f"{name}: a blank and a sign": change(**{name: " +4"}) for name in NUMBERS},
    **{f"{name}: minus one": change(**{name: "-1"}) for name in NUMBERS},
    **{f"{name}: minus two": change(**{name: "-2"}) for name in NUMBERS},
    **{f"{name}: the largest": change(**{name: "2147483647"}) for name in NUMBERS},
    **{f"{name}: too large": change(**{name: "2147483648"}) for name in NUMBERS},
    **{f"{name}: far too large": change(**{name: "99999999999999999999"}) for name in NUMBERS},
    **{f"{name}: far too small": change(**{name: "-99999999999999999999"}) for name in NUMBERS},
    "the file": change(trace_file="/tmp/trace"),
    "the file, null": change(trace_file=None),
    "the file and a rate that is none": change(trace_rate="x", trace_file="/tmp/trace"),
    "the mode": change(trace_mode="opentelemetry"),
    "level: off": change(trace_level=["OFF"]),
    "level: tensors": change(trace_level=["TENSORS"]),
    "level: both": change(trace_level=["TENSORS", "TIMESTAMPS"]),
    "level: the same twice": change(trace_level=["TENSORS", "TENSORS"]),
    "level: off and another": change(trace_level=["OFF", "TIMESTAMPS"]),
    "level: another and off": change(trace_level=["TIMESTAMPS", "OFF"]),
    "level: off twice": change(trace_level=["OFF", "OFF"]),
    "level: a text": change(trace_level="OFF"),
    "level: a number": change(trace_level=3),
    "level: an object": change(trace_level={}),
    "level: a list of numbers": change(trace_level=[3]),
    "level: a list of null": change(trace_level=[None]),
    "level: null": change(trace_level=None),
    **{
        f"level from off: {' '.join(levels) or 'none'}": from_off(*levels)
        for levels in (
            (),
            ("MIN",),
            ("MAX",),
            ("min",),
            ("timestamps",),
            ("nothing",),
            ("nothing", "TENSORS"),
            ("TENSORS", "nothing"),
            ("TIMESTAMPS", "MAX"),
            ("OFF", "nothing"),
        )
    },
    "an unknown setting": change(colour="red"),
    "a known one and an unknown one": change(trace_rate="9", colour="red"),
    "the name in capitals": change(TRACE_RATE="9"),
    "a good one and a bad one": change(trace_rate="9", trace_count="x"),
    "two bad ones": change(trace_count="x", trace_rate="y"),
    "two other bad ones": change(log_frequency="x", trace_count="y"),
    "a bad level and a bad rate": change(trace_rate="x", trace_level="OFF"),
    "off, and what would be wrong": change(trace_level=["OFF"], trace_rate="0", trace_count="0"),
    "on again, with what is wrong": [
        post(ALL, {"trace_level": ["OFF"], "trace_rate": "0"}),
        *change(trace_level=["TENSORS"]),
    ],
    "of a model over that of all": model({"trace_rate": "30"}, (None, {"trace_rate": "21"}), {"trace_rate": None}),
    "of all under that of a model": model({"trace_rate": "30"}, (None, {"trace_level": ["TENSORS"]}), (None, CLEAR)),
    "a model that is off": model({"trace_level": ["OFF"]}, {"trace_rate": "5"}, {"trace_level": None}),
    "a model that is on": model((None, {"trace_level": ["OFF"]}), {"trace_level": ["TENSORS"]}, (None, CLEAR)),
    "a model that cannot be on": model(
        (None, {"trace_level": ["OFF"], "trace_rate": "0"}), {"trace_level": ["TENSORS"]}
    ),
    "a model of which the rate goes": model(
        (None, {"trace_level": ["OFF"], "trace_rate": "0"}),
        {"trace_level": ["TENSORS"], "trace_rate": "3"},
        {"trace_rate": None},
    ),
    "a rate of all that a model cannot have": model(
        (None, {"trace_level": ["OFF"]}), {"trace_level": ["TENSORS"]}, (None, {"trace_rate": "0"})
    ),
    "a count that is used up": [
        post(ALL, {"trace_rate": "1", "trace_count": "2"}),
        ASKED,
        get(ALL),
        ASKED,
        get(ALL),
        ASKED,
        get(ALL),
        get(ECHO),
        *BACK,
    ],
    "a count that is used up, and asked for again": [
        post(ALL, {"trace_rate": "1", "trace_count": "2"}),
        ASKED,
        post(ALL, {"trace_count": "5"}),
        ASKED,
        get(ALL),
        *BACK,
    ],
    "a count of a model": [
        post(ECHO, {"trace_rate": "1", "trace_count": "2"}),
        ASKED,
        get(ALL),
        get(ECHO),
        post(ECHO, {"trace_rate": "2"}),
        post(ECHO, {"trace_count": None}),
        *BACK,
    ],
    "a rate counts": [post(ALL, {"trace_rate": "2"}), ASKED, get(ALL), ASKED, get(ALL), ASKED, get(ALL), *BACK],
    "a model that is unloaded and loaded again": [
        post(ECHO, {"trace_rate": "77"}),
        post("/v2/repository/models/echo/unload"),
        Eventually(get("/v2/models/echo/ready"), lambda answer: answer["status"] != 200),
        get(ECHO),
        post(ECHO, {"trace_rate": "1"}),
        setting("echo"),
        post("/v2/repository/models/echo/load"),
        get(ECHO),
        *BACK,
    ],
    "gRPC: as it is": grpc(),
    "gRPC: as it is for a model": grpc("echo"),
    "gRPC: of a model that there is not": grpc("nobody"),
    "gRPC: bad, of a model that there is not": grpc("nobody", trace_rate=["x"]),
    "gRPC: a rate": grpc(trace_rate=["3"]),
    "gRPC: a rate of a model": [setting("echo", trace_rate=["3"], trace_level=["OFF"]), setting(), *BACK],
    "gRPC: cleared": [setting(trace_rate=["3"]), setting(trace_rate=[]), *BACK],
    "gRPC: two values": grpc(trace_rate=["3", "4"]),
    "gRPC: two counts": grpc(trace_count=["3", "4"]),
    "gRPC: letters": grpc(trace_rate=["x"]),
    "gRPC: zero": grpc(trace_rate=["0"]),
    "gRPC: too large": grpc(log_frequency=["2147483648"]),
    "gRPC: a count below": grpc(trace_count=["-3"]),
    "gRPC: the file": grpc(trace_file=["x"]),
    "gRPC: the file cleared": grpc(trace_file=[]),
    "gRPC: levels": grpc(trace_level=["TENSORS", "TIMESTAMPS"]),
    "gRPC: off and another": grpc(trace_level=["OFF", "TENSORS"]),
    "gRPC: an unknown level": [setting(trace_level=["OFF"]), setting(trace_level=["nothing"]), *BACK],
    "gRPC: no level": [setting(trace_level=["OFF"]), setting(trace_level=[]), *BACK],
    "gRPC: the mode": grpc(trace_mode=["opentelemetry"]),
    "gRPC: an unknown setting": grpc(colour=["red"]),
    "gRPC: a good one and a bad one": grpc(trace_rate=["5"], trace_count=["x"]),
}

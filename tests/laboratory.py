"""A model that does what its request says: the text of a program, which says what it finds out."""

from __future__ import annotations

import json
from pathlib import Path

from serving import IDENTITY, Serving, pbtxt, python_model

_TEXT = (
    'backend: "python"\nmax_batch_size: 0\n'
    'input [{ name: "PROGRAM" data_type: TYPE_STRING dims: [ 1 ] }]\n'
    'output [{ name: "SAID" data_type: TYPE_STRING dims: [ 1 ] }]\n'
)
_HELP = """
def ask(model="echo", value=(1.0, 2.0), **more):
    value = np.array([value], np.float32)
    return pb_utils.InferenceRequest(
        model_name=model, requested_output_names=["OUTPUT0"], inputs=[pb_utils.Tensor("INPUT0", value)], **more
    )

def tell(response):
    if response.has_error():
        say(response.error().code().name, response.error().message())
    else:
        say(*[tensor.as_numpy().tolist() for tensor in response.output_tensors()] or ["nothing"])
"""
_LAB = f'''
HELP = """{_HELP}"""

def program(self, request):
    import textwrap
    said = []
    known = {{**globals(), "self": self, "request": request}}
    known["say"] = lambda *what: said.append(" ".join(map(str, what)))
    exec(textwrap.dedent(self.HELP), known)
    return request.inputs()[0].as_numpy()[0].decode(), said, known

def answer(self, said):
    said = np.array(["\\n".join(said).encode()], dtype=object)
    return pb_utils.InferenceResponse([pb_utils.Tensor("SAID", said)])
'''
_ONE_BY_ONE = """
def execute(self, requests):
    answers = []
    for request in requests:
        text, said, known = self.program(request)
        exec(text, known)
        answers.append(self.answer(said))
    return answers
"""
_ASYNC = """
async def execute(self, requests):
    import asyncio, textwrap
    answers = []
    for request in requests:
        text, said, known = self.program(request)
        exec("import asyncio\\nasync def main():\\n" + textwrap.indent(text, "    "), known)
        await known["main"]()
        answers.append(self.answer(said))
    return answers
"""
COUNTER = """
def execute(self, requests):
    for request in requests:
        sender = request.get_response_sender()
        for number in range(int(request.inputs()[0].as_numpy()[0, 0])):
            if sender.is_cancelled():
                break
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.array([[number]], np.float32))]))
            print("sent", number, flush=True)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        print("cancelled" if sender.is_cancelled() else "counted", flush=True)
"""
PATIENT = """
def execute(self, requests):
    print("waiting", flush=True)
    while not requests[0].is_cancelled():
        time.sleep(0.001)
    print("cancelled", flush=True)
    return [pb_utils.InferenceResponse([]) for _ in requests]
"""


def laboratory(models: Path, *, instances: int = 1) -> Path:
    """Write the models ``lab`` and ``alab``, whose ``execute`` is a coroutine, and some that they may call."""
    group = f"instance_group [{{ kind: KIND_CPU count: {instances} }}]\n"
    python_model(models, "lab", _LAB + _ONE_BY_ONE, _TEXT + group)
    python_model(models, "alab", _LAB + _ASYNC, _TEXT + group)
    python_model(models, "echo", IDENTITY)
    python_model(models, "patient", PATIENT, pbtxt(batch=1, more=""))
    python_model(models, "counter", COUNTER, pbtxt(batch=1, more="model_transaction_policy { decoupled: true }"))
    return models


def waiting_for(file: Path) -> str:
    """Return a piece of program that goes on when there is a file."""
    return f"while not os.path.exists({str(file)!r}):\n    time.sleep(0.001)"


def said(server: Serving, program: str, model: str = "lab", **fields: object) -> list[str]:
    """Have a program run; return the lines that it said. Raises ``RuntimeError`` with what went wrong."""
    tensor = {"name": "PROGRAM", "shape": [1], "datatype": "BYTES", "data": [program]}
    status, _, body = server.ask("POST", f"/v2/models/{model}/infer", {"inputs": [tensor], **fields})
    if status != 200:
        raise RuntimeError(f"{status}: {body.decode()}")
    text: str = json.loads(body)["outputs"][0]["data"][0]
    return text.splitlines()

"""Models that call other models, and load and unload them."""

from typing import Any

from conformance.exchange import Step, get, infer, tensor
from conformance.exchanges.scenes import CALLS

SCENE = CALLS


def told(program: str, model: str = "lab", **top: Any) -> Step:
    """Have a model do something, and tell what came of it."""
    return infer(model, tensor("PROGRAM", "BYTES", [1], [program]), **top)


def awaited(program: str) -> Step:
    """The same in a coroutine."""
    return told(program, "alab")


EACH = "for each in {}:\n    tell(each)"
ANSWERS = EACH.format("ask({}).exec(decoupled=True)")
NESTED = """
inner = 'tell(ask(value=[5.0]).exec())'
inputs = [pb_utils.Tensor("PROGRAM", np.array([inner.encode()], dtype=object))]
tell(pb_utils.InferenceRequest(model_name="alab", requested_output_names=["SAID"], inputs=inputs).exec())
"""
LOADED = """
say(pb_utils.is_model_ready("late"))
say(pb_utils.load_model("late"), pb_utils.is_model_ready("late"))
tell(ask("late").exec())
say(pb_utils.unload_model("late"))
"""
CONFIGURED = """
import json
tensors = [{"name": name, "data_type": "TYPE_FP32", "dims": [-1]} for name in ("IN", "OUT")]
config = {"backend": "python", "max_batch_size": 2, "input": tensors[:1], "output": tensors[1:]}
say(pb_utils.load_model(model_name="late", config=json.dumps(config)))
tell(ask("late", [[1.0]]).exec())
say(pb_utils.unload_model("late"))
"""
BINDING = """
import c_python_backend_utils as binding
own_use = {"SharedMemory", "shared_memory", "async_event_future_done_callback"}
say(sorted(name for name in {*dir(binding)} - own_use if name[0] != "_"))
say(all(getattr(pb_utils, name) is getattr(binding, name) for name in ("Tensor", "TritonModelException", "Logger")))
say(pb_utils.Tensor, pb_utils.InferenceRequest, pb_utils.TritonError, pb_utils.ModelConfig)
"""
NUMBERS = """
numbers = [pb_utils.TritonError.NOT_FOUND, pb_utils.Logger.INFO, pb_utils.MetricFamily.GAUGE]
for number in (*numbers, pb_utils.TRITONSERVER_MEMORY_CPU):
    say(number, repr(number), f"{number}", number.name, int(number), number.value, number == int(number))
"""
UNKEPT_METRIC = """
family = pb_utils.MetricFamily("unkept", "x", pb_utils.MetricFamily.GAUGE)
metric = family.Metric(labels={})
metric.set(1)
say(metric.value())
del family
for what in ("set(1)", "increment(1)", "value()"):
    try:
        say(eval(f"metric.{what}"))
    except pb_utils.TritonModelException as error:
        say(str(error).partition(" Keep it")[0])
"""
FORKED = """
import multiprocessing
processes = multiprocessing.get_context("fork")
here, there = processes.Pipe()
def child():
    try:
        there.send(str(ask("info").exec().has_error()))
    except pb_utils.TritonModelException as error:
        there.send(str(error))
process = processes.Process(target=child)
process.start()
say(here.recv() if here.poll(30) else "nothing")
process.join()
"""

CALLS_THAT_FAIL = {
    "an unknown model": "'nobody'",
    "a model that is not loaded": "'late'",
    "an unknown version": "model_version=7",
    "version 0": "model_version=0",
    "an unknown input": "name='X'",
    "a wrong shape": "value=[[1.0]]",
    "an unknown output": "outputs=['X']",
    "a model that raises": "'fails'",
    "a model that answers with an error": "'errs'",
    "a decoupled model": "'counter', [2.0]",
}

EXCHANGES: dict[str, Any] = {
    "one": told("tell(ask().exec())"),
    "version 1": told("tell(ask(model_version=1).exec())"),
    "no output named": told("tell(ask(outputs=[]).exec())"),
    "twice the same": told("request = ask()\ntell(request.exec())\ntell(request.exec())"),
    "in a call": told(NESTED),
    "large": told("(out,) = ask(value=range(200_000)).exec().output_tensors()\nsay(float(out.as_numpy().sum()))"),
    "what it says": told(
        "tell(ask('info', request_id='a', correlation_id=5, flags=3, timeout=77, parameters={'p': 1, 'q': 'x'}).exec())"
    ),
    "what it does not say": told("tell(ask('info').exec())"),
    "what it inherits": told("tell(ask('info').exec())", parameters={"timeout": 60_000_000}),
    "a sequence by text": told("tell(ask('info', correlation_id='text').exec())"),
    "with a trace": told("tell(ask(trace=request.trace()).exec())"),
    "flags that there are not": told("tell(ask(flags=99).exec())"),
    "a negative timeout": told("ask(timeout=-1)"),
    "an id that is a number": told("ask(request_id=5)"),
    "decoupled is a text": told("ask().exec(decoupled='x')"),
    **{f"{name}": told(f"tell(ask({call}).exec())") for name, call in CALLS_THAT_FAIL.items()},
    **{f"async: {name}": awaited(f"tell(await ask({call}).async_exec())") for name, call in CALLS_THAT_FAIL.items()},
    "no inputs": told(
        "tell(pb_utils.InferenceRequest(model_name='echo', requested_output_names=['OUT'], inputs=[]).exec())"
    ),
    "async": awaited("tell(await ask().async_exec())"),
    "async: many": awaited(
        EACH.format("await asyncio.gather(*[ask(value=[number]).async_exec() for number in range(8)])")
    ),
    "async: too slow": awaited(
        "try:\n    await asyncio.wait_for(asyncio.sleep(1), 0.01)\nexcept asyncio.TimeoutError:\n    tell(ask().exec())"
    ),
    "async: several answers": awaited(EACH.format("await ask('counter', [2.0]).async_exec(decoupled=True)")),
    "async without a loop": told("ask().async_exec()"),
    "async in a loop of its own": told(
        "import asyncio\nasync def main():\n    tell(await ask().async_exec())\nasyncio.run(main())"
    ),
    "several answers": told(ANSWERS.format("'counter', [2.0]")),
    "no answer": told(ANSWERS.format("'counter', [0.0]")),
    "an error among the answers": told(ANSWERS.format("'counter', [3.0]")),
    "the end with the last answer": told(ANSWERS.format("'counter', [4.0]")),
    "several of a model with one": told(ANSWERS.format("")),
    "several of an unknown model": told(ANSWERS.format("'nobody'")),
    "several with an unknown input": told(ANSWERS.format("'counter', name='X'")),
    "next": told("answers = ask('counter', [1.0]).exec(decoupled=True)\nfor _ in range(3):\n    tell(next(answers))"),
    "answers once more": told(
        "answers = ask('counter', [1.0]).exec(decoupled=True)\n"
        + EACH.format("answers")
        + "\nsay('again')\n"
        + EACH.format("answers")
    ),
    "in a process that the model forks": told(FORKED),
    "the binding": told(BINDING),
    "numbers with names": told(NUMBERS),
    "a metric without its family": told(UNKEPT_METRIC),
    "who is ready": told(
        "for each in (('echo',), ('nobody',), ('late',), ('',), ('echo', '1'), ('echo', '2')):\n"
        "    say(pb_utils.is_model_ready(*each))"
    ),
    "load": told(LOADED),
    "load with a configuration": told(CONFIGURED),
    "async: load": awaited(LOADED),
    "load a number": told("say(pb_utils.load_model(5))"),
    "load files that are text": told("say(pb_utils.load_model('late', files={'file:1/model.py': 'x'}))"),
    "unload an unknown model": told("say(pb_utils.unload_model('nobody'))"),
    "statistics of the caller": get("/v2/models/lab/stats"),
    "statistics of the called": get("/v2/models/echo/stats"),
    # Triton mostly answers these, with the same text, and ends every now and then.
    "load an unknown model": told("say(pb_utils.load_model('nobody'))"),
    "load no name": told("say(pb_utils.load_model(''))"),
    "load a path": told("say(pb_utils.load_model('../echo'))"),
    "load with a broken configuration": told("say(pb_utils.load_model('late', config='nonsense'))"),
    "load files without a configuration": told("say(pb_utils.load_model('late', files={'file:1/model.py': b'x'}))"),
    "a version that is none": told("say(pb_utils.is_model_ready('echo', 'x'))"),
}

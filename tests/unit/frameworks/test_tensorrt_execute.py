"""TensorRT engines, opened and run: on stand-ins for TensorRT and for CUDA, which have the functions that are used.

What the libraries themselves make of it is for ``benchmarks/gpu_exam.py``, on a machine with a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nerite.backends.interface import ExecutionTimes, InstanceContext, ModelContext
from nerite.core.errors import Internal, InvalidArgument, Unavailable, Unsupported
from nerite.devices import cuda
from nerite.frameworks.tensorrt import TensorRtBackend, engine
from opened import context, decoded, request

STAND_INS = Path(__file__).resolve().parents[2] / "stand_ins"
PROFILES = [{"IN": [[1, 4], [2, 4], [4, 4]]}, {"IN": [[1, 4], [16, 4], [32, 4]]}]


def tensor(name: str, mode: str, dims: list[int], datatype: str = "FLOAT", **more: Any) -> dict[str, Any]:
    return {"name": name, "mode": mode, "type": datatype, "dims": dims, **more}


DOUBLE = {
    "computes": "double",
    "tensors": [tensor("IN", "INPUT", [-1, 4]), tensor("OUT", "OUTPUT", [-1, 4])],
    "profiles": PROFILES,
}
POSITIVE = {
    "computes": "positive",
    "tensors": [tensor("IN", "INPUT", [-1]), tensor("OUT", "OUTPUT", [-1])],
    "profiles": [{"IN": [[1], [8], [64]]}],
}
ZEROS = {
    "computes": "zeros",
    "tensors": [tensor("SIZES", "INPUT", [2], "INT32", host=True), tensor("OUT", "OUTPUT", [-1, -1])],
    "profiles": [{}],
}


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def forget() -> None:
        cuda.runtime.cache_clear()
        engine.tensorrt.cache_clear()
        for name in [name for name in sys.modules if name.partition(".")[0] in ("cuda", "tensorrt")]:
            del sys.modules[name]

    for library in ("cuda", "tensorrt"):
        monkeypatch.syspath_prepend(str(STAND_INS / library))
    forget()
    yield
    forget()


class Served:
    """A model with an engine, completed and opened."""

    def __init__(
        self,
        directory: Path,
        said: dict[str, Any],
        config: dict[str, Any] | None = None,
        settings: dict[str, str] | None = None,
        **parameters: str,
    ) -> None:
        import tensorrt

        (directory / "1").mkdir()
        (directory / "1" / "model.plan").write_bytes(tensorrt.plan(said))
        before = context(directory, config, settings, **parameters)
        backend = TensorRtBackend()
        self.config = dict(backend.complete(before))
        self.context: ModelContext = replace(before, config=self.config)
        self.model = backend.open(self.context)
        self.instances: list[Any] = []

    def instance(self, name: str = "m_0", device: int = 0) -> Any:
        self.instances.append(self.model.instance(InstanceContext(name, "GPU", device)))
        return self.instances[-1]

    def close(self) -> None:
        for instance in self.instances:
            instance.close()
        self.model.close()


def asked(instance: Any, **arrays: Any) -> dict[str, Any]:
    return decoded(instance.execute([request(**arrays)], ExecutionTimes())[0])


def rows(count: int, value: float = 1.0) -> Any:
    return np.full((count, 4), value, np.float32)


def test_batches_of_changing_sizes(tmp_path: Path) -> None:
    served = Served(tmp_path, DOUBLE)
    instance = served.instance()
    for count in (1, 3, 1, 4, 2):
        answers = instance.execute([request(IN=rows(1, each)) for each in range(count)], ExecutionTimes())
        for each, answer in enumerate(answers):
            assert decoded(answer)["OUT"].tolist() == [[2.0 * each] * 4]
    assert asked(instance, IN=rows(2, 5))["OUT"].tolist() == rows(2, 10).tolist()


def test_answers_are_not_the_memory_of_the_next(tmp_path: Path) -> None:
    instance = Served(tmp_path, DOUBLE).instance()
    first = instance.execute([request(IN=rows(1, 1))], ExecutionTimes())[0]
    instance.execute([request(IN=rows(1, 9))], ExecutionTimes())
    assert decoded(first)["OUT"].tolist() == [[2.0] * 4]


def test_profiles_of_an_instance(tmp_path: Path) -> None:
    import tensorrt

    groups = [{"name": "both", "profile": ["0", "1"], "kind": "KIND_GPU", "gpus": [0]}]
    served = Served(tmp_path, DOUBLE, {"instance_group": groups, "max_batch_size": 32})
    before = len(tensorrt.made)
    instance = served.instance("both_0")
    small, large = tensorrt.made[before:]
    assert [(each.profile, each.strategy.name) for each in (small, large)] == [(0, "STATIC"), (1, "STATIC")]
    assert asked(instance, IN=rows(2))["OUT"].shape == (2, 4)
    assert asked(instance, IN=rows(20))["OUT"].shape == (20, 4)
    assert (small.runs, large.runs) == (1, 1)
    with pytest.raises(InvalidArgument, match=r"between 1 and 4 but received 40. None of the profiles 0, 1 takes it"):
        asked(instance, IN=rows(40))


def test_graphs_are_captured_the_second_time(tmp_path: Path) -> None:
    import tensorrt
    from cuda.stand_in.process import process

    served = Served(tmp_path, DOUBLE, {"optimization": {"cuda": {"graphs": True}, "priority": "PRIORITY_MAX"}})
    before, launched, alive = len(tensorrt.made), len(process().launches), len(process().graphs_alive)
    instance = served.instance()
    (made,) = tensorrt.made[before:]
    assert [stream.priority for stream in process().streams.values()] == [-5]
    for value in range(5):
        assert asked(instance, IN=rows(1, value))["OUT"].tolist() == [[2.0 * value] * 4]
    assert (made.runs, len(process().launches) - launched) == (1, 4)
    # A larger batch moves the memory, and what was captured with it.
    for value in range(3):
        assert asked(instance, IN=rows(3, value))["OUT"].tolist() == rows(3, 2 * value).tolist()
        assert asked(instance, IN=rows(1, value))["OUT"].tolist() == [[2.0 * value] * 4]
    assert made.runs == 3
    served.close()
    assert len(process().graphs_alive) == alive


def test_an_output_whose_size_the_data_decides(tmp_path: Path) -> None:
    served = Served(tmp_path, POSITIVE, {"optimization": {"cuda": {"graphs": True}}, "max_batch_size": 0})
    # The engine's only dimension is no batch.
    served.config.update(max_batch_size=0)
    served.config.pop("dynamic_batching", None)
    for side in ("input", "output"):
        served.config[side] = [{"name": served.config[side][0]["name"], "data_type": "TYPE_FP32", "dims": [-1]}]
    served.model = TensorRtBackend().open(served.context)
    instance = served.instance()
    for values, positive in (([1, -2, 3], [1, 3]), ([-1], []), ([4] * 9, [4] * 9), ([1, -2, 3], [1, 3])):
        assert asked(instance, IN=np.array(values, np.float32))["OUT"].tolist() == positive


def test_sizes_as_values(tmp_path: Path) -> None:
    served = Served(tmp_path, ZEROS)
    assert served.config["input"][0]["is_shape_tensor"] is True
    instance = served.instance()
    for sizes in ((2, 3), (1, 4), (5, 1)):
        assert asked(instance, SIZES=np.array(sizes, np.int32))["OUT"].shape == sizes


def test_an_engine_for_each_gpu_and_nothing_left(tmp_path: Path) -> None:
    import tensorrt
    from cuda.stand_in.process import process

    groups = [{"name": "m", "kind": "KIND_GPU", "gpus": [0, 1], "count": 2}]
    served = Served(tmp_path, DOUBLE, {"instance_group": groups})
    before = len(tensorrt.made)
    instances = [served.instance(f"m_{number}", number // 2) for number in range(4)]
    made = tensorrt.made[before:]
    assert [each.engine.device for each in made] == [0, 0, 1, 1]
    assert made[0].engine is made[1].engine
    for instance in instances:
        assert asked(instance, IN=rows(1))["OUT"].tolist() == [[2.0] * 4]
    assert process().current == 1
    assert process().memory.allocated()
    served.close()
    assert not process().memory.allocated()
    assert not process().streams


def test_a_plan_of_another_tensorrt(tmp_path: Path) -> None:
    import tensorrt

    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.plan").write_bytes(tensorrt.plan(DOUBLE, (8, 6, 1, 6)))
    with pytest.raises(Internal) as refusal:
        TensorRtBackend().complete(context(tmp_path))
    assert refusal.value.message == (
        f"unable to create TensorRT engine: Version tag does not match. That is '{tmp_path}/1/model.plan', of model "
        "'m'. It was made with TensorRT 8.6.1.6, and 10.9.0.34 is installed: make it again, or for a plan that was "
        "made with --versionCompatible set --backend-config=tensorrt,version-compatible=true"
    )
    assert TensorRtBackend().complete(context(tmp_path, settings={"version-compatible": "true"}))["input"]


def test_a_plugin_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"unable to load TensorRT plugin '/p/a.so': cannot open /p/a.so"):
        Served(tmp_path, DOUBLE, settings={"plugins": '"/p/a.so;/p/b.so"'})


def test_tensors_that_clients_cannot_send(tmp_path: Path) -> None:
    odd = {**DOUBLE, "tensors": [tensor("IN", "INPUT", [-1, 4], "FP8"), tensor("OUT", "OUTPUT", [-1, 4])]}
    with pytest.raises(Unsupported, match="tensor 'IN' is of TensorRT's type FP8, which the protocol does not have"):
        Served(tmp_path, odd)


def test_tensors_that_are_not_linear(tmp_path: Path) -> None:
    odd = {**DOUBLE, "tensors": [tensor("IN", "INPUT", [-1, 4], format="CHW4"), tensor("OUT", "OUTPUT", [-1, 4])]}
    with pytest.raises(Unsupported, match=r"tensor 'IN' is laid out as CHW4. Build the engine with linear inputs"):
        Served(tmp_path, odd)


def test_instances_are_on_gpus(tmp_path: Path) -> None:
    model = Served(tmp_path, DOUBLE).model
    with pytest.raises(InvalidArgument, match="TensorRT backend supports only GPU device: instance 'm_0' is of KIND_"):
        model.instance(InstanceContext("m_0"))
    with pytest.raises(Unsupported, match="there is no GPU 2, but 2 of them"):
        model.instance(InstanceContext("m_0", "GPU", 2))


def test_an_engine_that_fails(tmp_path: Path) -> None:
    instance = Served(tmp_path, {**DOUBLE, "works": False}).instance()
    with pytest.raises(Internal, match="TensorRT failed to run the engine: TensorRT gives no reason"):
        asked(instance, IN=rows(1))


def test_no_memory_left(tmp_path: Path) -> None:
    memory = cuda.CudaMemory()
    with pytest.raises(Unavailable, match="CUDA error: out of memory"):
        memory.reserve(2 << 30)
    memory.free()


def test_types_have_to_agree(tmp_path: Path) -> None:
    declared = {
        "input": [{"name": "IN", "data_type": "TYPE_FP16", "dims": [4]}],
        "output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [4]}],
        "max_batch_size": 4,
    }
    with pytest.raises(InvalidArgument, match="configuration expects datatype TYPE_FP16 for input 'IN'"):
        Served(tmp_path, DOUBLE, declared)

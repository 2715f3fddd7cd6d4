"""Executing models of each kind: names, types, batches, and memory that nobody writes into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch_models import AddSub, Opened, Scaled, declared, entry, export, export_scaled, python, script

from nerite.backends.interface import InstanceContext
from nerite.core.errors import Internal, InvalidArgument
from nerite.frameworks.pytorch import modules
from nerite.frameworks.pytorch.program import Program
from opened import decoded, request

ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)


def one(directory: Path, config: dict[str, Any], **arrays: Any) -> dict[str, Any]:
    """Open a model, send it one request, and return the answer."""
    opened = Opened(directory, config)
    [answer] = opened.answers(request(**arrays))
    opened.close()
    return answer


# ---- Names ----


@pytest.mark.parametrize("names", [("b", "a"), ("x__1", "y__0"), ("INPUT__1", "INPUT__0"), ("ARGS[1]", "ARGS[0]")])
def test_inputs_by_name_and_by_position(tmp_path: Path, names: tuple[str, str]) -> None:
    script(tmp_path, AddSub())
    answer = one(tmp_path, declared(names, ["DIFFERENCE__1"]), **{names[0]: ROWS[0], names[1]: ROWS[1]})
    np.testing.assert_array_equal(answer["DIFFERENCE__1"], ROWS[1] - ROWS[0])


def test_names_of_one_s_own_go_by_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    script(tmp_path, AddSub())
    answer = one(tmp_path, declared(["first", "second"], ["sum", "difference"]), first=ROWS[0], second=ROWS[1])
    np.testing.assert_array_equal(answer["difference"], ROWS[0] - ROWS[1])
    assert "Falling back to enforcing strict ordering" in caplog.text


class Dictionaries(nn.Module):
    def forward(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sum": x["a"] + x["b"], "difference": x["a"] - x["b"]}


def test_torchscript_of_dictionaries(tmp_path: Path) -> None:
    script(tmp_path, Dictionaries())
    answer = one(tmp_path, declared(["b", "a"], ["difference", "OUTPUT__0"]), a=ROWS[0], b=ROWS[1])
    np.testing.assert_array_equal(answer["difference"], ROWS[0] - ROWS[1])
    np.testing.assert_array_equal(answer["OUTPUT__0"], ROWS[0] + ROWS[1])


class Nested(nn.Module):
    def forward(self, x: Tensor, more: dict[str, Tensor], *, scale: Tensor) -> Any:
        return {"plain": x * scale, "pair": (x, more["y"] + 1)}


def test_an_exported_program_of_nested_structures(tmp_path: Path) -> None:
    export(tmp_path, Nested(), (torch.zeros(4), {"y": torch.zeros(4)}), {"scale": torch.zeros(1)})
    names = {"ARGS[1][y]": ROWS[0], "KWARGS[scale]": np.full(1, 3, np.float32), "INPUT__0": ROWS[1]}
    config = declared(
        ["ARGS[1][y]", entry("KWARGS[scale]", [1]), "INPUT__0"], ["RESULT[pair][1]", "plain", "OUTPUT__1"]
    )
    answer = one(tmp_path, config, **names)
    np.testing.assert_array_equal(answer["RESULT[pair][1]"], ROWS[0] + 1)
    np.testing.assert_array_equal(answer["plain"], ROWS[1] * 3)
    np.testing.assert_array_equal(answer["OUTPUT__1"], ROWS[1])


def test_an_output_that_there_is_not_is_named_when_the_model_has_run(tmp_path: Path) -> None:
    script(tmp_path, Dictionaries())
    with pytest.raises(InvalidArgument) as refused:
        one(tmp_path, declared(["a", "b"], ["OUTPUT__7"]), a=ROWS[0], b=ROWS[1])
    assert refused.value.message == (
        "The output OUTPUT__7 in the model configuration refers to an output index which doesn't exist. This model has "
        "2 outputs: sum, difference"
    )


class Optional(nn.Module):
    def forward(self, x: Tensor, scale: float = 2.0, bias: Tensor | None = None) -> Tensor:
        return x * scale if bias is None else x * scale + bias


def test_an_optional_input_may_be_there_and_may_be_away(tmp_path: Path) -> None:
    script(tmp_path, Optional())
    opened = Opened(tmp_path, declared(["x", entry("bias", optional=True)], ["OUTPUT__0"]))
    without, with_it = opened.answers(request(x=ROWS[0]), request(bias=ROWS[1], x=ROWS[0]))
    np.testing.assert_array_equal(without["OUTPUT__0"], ROWS[0] * 2)
    np.testing.assert_array_equal(with_it["OUTPUT__0"], ROWS[0] * 2 + ROWS[1])


# ---- Batches ----


@pytest.mark.parametrize("kind", ["torchscript", "exported", "python"])
def test_a_batch_is_computed_at_once(tmp_path: Path, kind: str) -> None:
    if kind == "torchscript":
        script(tmp_path, Scaled())
    elif kind == "exported":
        export_scaled(tmp_path)
    else:
        python(tmp_path, "class Net(nn.Module):\n    def forward(self, x):\n        return x * 2\n")
    opened = Opened(tmp_path, declared(["x"], ["OUTPUT__0"], 8))
    parts = [ROWS, ROWS[:1] + 10, ROWS + 20]
    answers = opened.answers(*(request(x=part) for part in parts))
    for part, answer in zip(parts, answers, strict=True):
        np.testing.assert_array_equal(answer["OUTPUT__0"], part * 2)
    [alone] = opened.answers(request(x=ROWS))
    np.testing.assert_array_equal(alone["OUTPUT__0"], ROWS * 2)
    opened.close()


def test_shapes_that_an_exported_program_does_not_allow_are_refused_each_time(tmp_path: Path) -> None:
    size = torch.export.Dim("size", max=16)
    export(tmp_path, AddSub(), (torch.zeros(3), torch.zeros(3)), dynamic_shapes=({0: size}, {0: size}))
    opened = Opened(tmp_path, declared([entry("a", [-1]), entry("b", [-1])], [entry("y__0", [-1])]))
    for length in (4, 2, 4):
        [answer] = opened.answers(request(a=np.ones(length, np.float32), b=np.ones(length, np.float32)))
        assert answer["y__0"].tolist() == [2.0] * length
    for lengths in ((4, 5), (4, 5), (17, 17)):
        a, b = (np.ones(length, np.float32) for length in lengths)
        with pytest.raises((InvalidArgument, Internal), match=r"^PyTorch execute failure: "):
            opened.execute(request(a=a, b=b))


def test_what_a_program_raises_is_said(tmp_path: Path) -> None:
    script(tmp_path, AddSub())
    with pytest.raises(Internal, match=r"(?s)^PyTorch execute failure: .*must match the size of tensor b \(3\)"):
        one(tmp_path, declared([entry("a", [-1]), entry("b", [-1])], ["x__0"]), a=ROWS[0], b=ROWS[0][:3])


# ---- Types ----

SAMPLES: list[Any] = [
    np.array([True, False, True]),
    *(np.array([0, 1, 200 % np.iinfo(kind).max], kind) for kind in ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8")),
    *(np.array([0.5, -1, 3], kind) for kind in ("f2", "f4", "f8")),
]


class Same(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.dtype.name)
def test_every_type_passes(tmp_path: Path, sample: Any) -> None:
    script(tmp_path, Same())
    kind = {"b": "BOOL", "u": "UINT", "i": "INT", "f": "FP"}[sample.dtype.kind]
    datatype = f"TYPE_{kind}{'' if kind == 'BOOL' else sample.itemsize * 8}"
    answer = one(tmp_path, declared([entry("x", [3], datatype)], [entry("y__0", [3], datatype)]), x=sample)
    np.testing.assert_array_equal(answer["y__0"], sample)
    assert answer["y__0"].dtype == sample.dtype


def test_bfloat16(tmp_path: Path) -> None:
    export(tmp_path, Scaled().bfloat16(), (torch.zeros(2, 4).bfloat16(),), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    opened = Opened(tmp_path)
    assert opened.config["input"] == [entry("x", [4], "TYPE_BF16")]
    words = torch.tensor(ROWS).bfloat16().view(torch.uint16).numpy()
    [answer] = opened.answers(request(bfloat16=True, x=words))
    doubled = torch.from_numpy(answer["OUTPUT__0"].copy()).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(doubled, ROWS * 2)


def test_an_output_of_another_type_than_declared(tmp_path: Path) -> None:
    script(tmp_path, Same())
    with pytest.raises(InvalidArgument) as refused:
        one(tmp_path, declared(["x"], [entry("y__0", [4], "TYPE_INT64")]), x=ROWS[0])
    assert refused.value.message == (
        "configuration expects datatype TYPE_INT64 for output 'y__0', model provides TYPE_FP32. Set data_type: "
        "TYPE_FP32"
    )


class Texts(nn.Module):
    def forward(self, words: list[str], numbers: Tensor) -> tuple[list[str], Tensor]:
        return [word + "!" for word in words], numbers + len(words)


def test_lists_of_strings(tmp_path: Path) -> None:
    script(tmp_path, Texts())
    text = entry("words", [1], "TYPE_STRING")
    opened = Opened(
        tmp_path, declared([text, entry("numbers", [1])], [{**text, "name": "t__0"}, entry("n__1", [1])], 8)
    )
    number = np.zeros((1, 1), np.float32)
    answers = opened.answers(
        request(words=np.array([["ja"]], object), numbers=number),
        request(words=np.array([["né"]], object), numbers=number),
    )
    assert [answer["t__0"].tolist() for answer in answers] == [[[b"ja!"]], [["né!".encode()]]]
    assert [answer["n__1"].tolist() for answer in answers] == [[[2.0]], [[2.0]]]


class Counts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum()


def test_a_scalar_is_one_element(tmp_path: Path) -> None:
    script(tmp_path, Counts())
    assert one(tmp_path, declared(["x"], [entry("y__0", [1])]), x=ROWS[0])["y__0"].tolist() == [6.0]


# ---- Memory ----

LARGE = np.arange(4096, dtype=np.float32).reshape(1, 4096)
LARGE_IN, LARGE_OUT = entry("x", [4096]), entry("y__0", [4096])


class Writes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


@pytest.mark.parametrize("kind", ["torchscript", "python", "exported"])
def test_a_model_that_writes_into_its_input_writes_into_a_copy(tmp_path: Path, kind: str) -> None:
    if kind == "python":
        python(tmp_path, "class Net(nn.Module):\n    def forward(self, x):\n        return x.add_(1)\n")
    elif kind == "exported":
        export(tmp_path, Writes(), (torch.zeros(1, 4096),))
    else:
        script(tmp_path, Writes())
    opened = Opened(tmp_path, declared([entry("x", [1, 4096])], [entry("y__0", [1, 4096])]))
    asked = request(x=LARGE)
    for _ in range(2):
        [answer] = opened.answers(asked)
        np.testing.assert_array_equal(answer["y__0"], LARGE + 1)
    np.testing.assert_array_equal(np.frombuffer(asked.data[0], np.float32), LARGE[0])
    opened.close()


def test_an_input_is_a_view_and_so_is_an_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    open_torchscript = modules.open_torchscript

    def watched(*arguments: Any) -> Program:
        program = open_torchscript(*arguments)

        def bind(names: Sequence[str]) -> Any:
            forward = program.bind(names)
            return lambda values: seen.append(values[0]) or seen.append(forward(values)) or seen[-1]

        return replace(program, bind=bind)

    monkeypatch.setattr(modules, "open_torchscript", watched)
    script(tmp_path, Scaled())
    opened = Opened(tmp_path, declared(["x"], ["y__0"], 4096))
    rows = np.ones((4096, 4), np.float32)
    asked = request(x=rows)
    [response] = opened.execute(asked)
    assert seen[0].data_ptr() == np.frombuffer(asked.data[0], np.uint8).ctypes.data
    assert seen[1].data_ptr() == np.frombuffer(response.data[0], np.uint8).ctypes.data


def test_a_tensor_that_begins_anywhere_is_copied(tmp_path: Path) -> None:
    script(tmp_path, Scaled())
    opened = Opened(tmp_path, declared(["x"], ["y__0"]))
    asked = request(x=ROWS[0])
    asked.data = [memoryview(b"!" + bytes(asked.data[0]))[1:]]
    [answer] = opened.answers(asked)
    np.testing.assert_array_equal(answer["y__0"], ROWS[0] * 2)


def test_an_input_that_comes_back_is_no_view_on_memory_that_is_used_again(tmp_path: Path) -> None:
    script(tmp_path, Same())
    opened = Opened(tmp_path, declared([entry("x", [1 << 20])], [entry("y__0", [1 << 20])], 64))
    # So large that batches are joined in a buffer of the instance's.
    first = opened.execute(*(request(x=np.full((5, 1 << 20), 1, np.float32)) for _ in range(2)))
    opened.execute(*(request(x=np.full((5, 1 << 20), 2, np.float32)) for _ in range(2)))
    assert {decoded(response)["y__0"].max() for response in first} == {1.0}


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4096))

    def forward(self, x: Tensor) -> Tensor:
        self.total += x[0]
        return self.total


def test_what_a_model_gives_out_it_does_not_change_later(tmp_path: Path) -> None:
    script(tmp_path, Remembers())
    opened = Opened(tmp_path, declared([entry("x", [1, 4096])], [entry("y__0", [4096])]))
    [first] = opened.answers(request(x=LARGE))
    [second] = opened.answers(request(x=LARGE))
    np.testing.assert_array_equal(first["y__0"], LARGE[0])
    np.testing.assert_array_equal(second["y__0"], LARGE[0] * 2)


@pytest.mark.parametrize(
    ("module", "sharing", "same"),
    [(Scaled(), "", True), (Scaled(), "false", False), (Remembers(), "", False), (Remembers(), "true", True)],
)
def test_instances_share_what_does_not_change(tmp_path: Path, module: nn.Module, sharing: str, same: bool) -> None:
    script(tmp_path, module)
    parameters = {"ENABLE_WEIGHT_SHARING": sharing} if sharing else {}
    opened = Opened(tmp_path, declared([entry("x", [-1, -1])], [entry("y__0", [-1])], **parameters))
    other = opened.model.instance(InstanceContext("m_1"))
    assert (other.compute.program is opened.instance.compute.program) == same


def test_the_number_of_threads_is_the_instance_s_own(tmp_path: Path) -> None:
    python(tmp_path, "class Net(nn.Module):\n    def forward(self, x):\n        return x + torch.get_num_threads()\n")
    for threads in ("1", "2", "1"):
        opened = Opened(tmp_path, declared(["x"], ["y__0"], INTRA_OP_THREAD_COUNT=threads))
        assert opened.answers(request(x=np.zeros(4, np.float32)))[0]["y__0"][0] == int(threads)
        opened.close()


def test_only_wanted_outputs_are_answered(tmp_path: Path) -> None:
    script(tmp_path, AddSub())
    opened = Opened(tmp_path, declared(["a", "b"], ["SUM__0", "DIFFERENCE__1"]))
    [answer] = opened.answers(request(["DIFFERENCE__1"], a=ROWS[0], b=ROWS[1]))
    assert list(answer) == ["DIFFERENCE__1"]


def test_inference_mode_and_switches(tmp_path: Path) -> None:
    python(
        tmp_path,
        "class Net(nn.Module):\n    def forward(self, x):\n        return x + torch.is_inference_mode_enabled()\n",
    )
    for mode, expected in (("true", 1.0), ("false", 0.0)):
        config = declared(
            ["x"], ["y__0"], INFERENCE_MODE=mode, DISABLE_OPTIMIZED_EXECUTION="1", ENABLE_JIT_EXECUTOR="1"
        )
        answer = one(tmp_path, config, x=np.zeros(4, np.float32))
        assert answer["y__0"][0] == expected
    torch._C._set_graph_executor_optimize(True)


def test_ragged_rows(tmp_path: Path) -> None:
    class Sums(nn.Module):
        def forward(self, x: Tensor, ends: Tensor) -> Tensor:
            totals = torch.cumsum(x, 0)[ends.long() - 1]
            return torch.diff(totals, prepend=torch.zeros(1)).unsqueeze(1)

    script(tmp_path, Sums())
    config = declared([entry("x", [-1], allow_ragged_batch=True)], [entry("y__0", [1])], 8)
    config["batch_input"] = [
        {
            "kind": "BATCH_ACCUMULATED_ELEMENT_COUNT",
            "target_name": ["ends"],
            "data_type": "TYPE_FP32",
            "source_input": ["x"],
        }
    ]
    opened = Opened(tmp_path, config)
    answers = opened.answers(*(request(x=np.ones((1, length), np.float32)) for length in (3, 1, 4)))
    assert [answer["y__0"].tolist() for answer in answers] == [[[3.0]], [[1.0]], [[4.0]]]

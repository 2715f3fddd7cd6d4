"""The playbook of a hot tenant: one floods the platform, and gets a quota that leaves room to the others."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from playbooks import Playbook, clients, platform
from serving import eventually, pbtxt, python_model, serving

BODY = b'{"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1.0]}]}'
PATH = "/v2/models/work/infer"
WORK = """
def execute(self, requests):
    time.sleep(0.02)
    return [
        pb_utils.InferenceResponse(
            [pb_utils.Tensor("OUTPUT0", pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy())]
        )
        for request in requests
    ]
"""
SMALL = {"max_requests = 64\nqueue_length = 500": "max_requests = 2\nqueue_length = 4"}


def test_a_hot_tenant_gets_a_part_of_the_room(tmp_path: Path) -> None:
    playbook = Playbook("A hot tenant")
    (look,) = playbook.commands("Look")
    (lower,) = playbook.commands("Type")
    python_model(tmp_path / "models", "work", WORK, pbtxt(batch=0, more="", dims="-1, -1"))
    with ExitStack() as stack:
        servers = [stack.enter_context(serving(tmp_path / "models", tmp_path / f"log{number}")) for number in range(2)]
        stage = stack.enter_context(platform(tmp_path, servers, SMALL))
        others = stack.enter_context(clients(1, stage.router, PATH, BODY))
        hot = stack.enter_context(clients(16, stage.router, PATH, BODY, x_tenant="acme"))
        stage.pages(playbook)
        assert [each["tenant"] for each in stage.prometheus.firing(playbook.alert)] == ["acme"]
        rows = [line.replace("|", " ").split() for line in stage.enter(look).splitlines() if " work " in line]
        offered = {tenant: int(count) for _, tenant, _, count, *_ in rows}
        assert offered["acme"] > offered["default"]

        stage.enter(lower)
        eventually(lambda: stage.of_router("nerite_admission_refused", tenant="acme", reason="concurrency") > 20)
        full = stage.of_router("nerite_admission_refused", reason="queue_length")
        answered = hot.count(200), others.count(200)
        eventually(lambda: hot.count(200) > answered[0] + 50 and others.count(200) > answered[1] + 50)
        assert stage.of_router("nerite_admission_refused", reason="queue_length") == full
        stage.is_over(playbook)
    assert hot.found.keys() == {200, 429, 503}
    assert others.found.keys() <= {200, 503}

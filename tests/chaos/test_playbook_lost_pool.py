"""The playbook of a lost pool: both members are killed, and a third server takes over."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from playbooks import Playbook, clients, platform
from serving import IDENTITY, IN_PROCESS, eventually, pbtxt, python_model, serving

BODY = b'{"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1.0]}]}'


def test_a_lost_pool_gets_another_member(tmp_path: Path) -> None:
    playbook = Playbook("A lost pool")
    python_model(tmp_path / "models", "identity", IDENTITY, pbtxt(parameters=IN_PROCESS))
    with ExitStack() as stack:
        servers = [
            stack.enter_context(serving(tmp_path / "models", tmp_path / f"log{number}", clean=False))
            for number in range(3)
        ]
        stage = stack.enter_context(platform(tmp_path, servers))
        traffic = stack.enter_context(clients(2, stage.router, "/v2/models/identity/infer", BODY))
        eventually(lambda: traffic.count(200) > 20)
        for lost in servers[:2]:
            lost.process.kill()
            lost.process.wait()
        stage.pages(playbook)
        status, headers, body = stage.router.ask("POST", "/v2/models/identity/infer", BODY)
        assert (status, "Retry-After" in headers) == (503, True), body

        (look,) = playbook.commands("Look")
        said = stage.enter(look)
        assert 'nerite_router_members_ready{pool="main"} 0' in said
        assert said.count("nerite_router_member_ready{") == 2

        (add,) = playbook.commands("Type")
        stage.enter(add)
        eventually(lambda: stage.of_router("nerite_router_members_ready") == 1)
        answered = traffic.count(200)
        eventually(lambda: traffic.count(200) > answered + 20)
        stage.is_over(playbook)
        assert stage.of_router("nerite_router_members") == 3, "the lost ones are still looked for"
    assert traffic.found.keys() <= {200, 502, 503}

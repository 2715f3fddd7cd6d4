"""The playbook of a timeout storm: a member stands still, its clients give up, and it is drained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from playbooks import Platform, Playbook, clients, platform
from serving import Serving, eventually, pbtxt, python_model, serving

BODY = b'{"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1.0]}]}'
STANDS = """
def execute(self, requests):
    while os.path.exists(os.path.join(os.path.dirname(__file__), "stand")):
        time.sleep(0.005)
    time.sleep(0.03)
    return [
        pb_utils.InferenceResponse(
            [pb_utils.Tensor("OUTPUT0", pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy())]
        )
        for request in requests
    ]
"""
"""Stands still while there is a file of this name beside it."""
PATH = "/v2/models/work/infer"
PATIENCE = 0.5
"""Seconds for which clients wait."""


@contextmanager
def two(folder: Path, changes: Mapping[str, str] | None = None) -> Iterator[tuple[Platform, list[Serving], list[Path]]]:
    """Run the platform with two members; yield it, the members, and the files that make them stand still."""
    with ExitStack() as stack:
        servers, files = [], []
        for number in range(2):
            models = folder / f"models{number}"
            files.append(python_model(models, "work", STANDS, pbtxt(batch=0, more="", dims="-1, -1")) / "1" / "stand")
            servers.append(stack.enter_context(serving(models, folder / f"log{number}", clean=False)))
        try:
            yield stack.enter_context(platform(folder, servers, changes)), servers, files
        finally:
            for file in files:
                file.unlink(missing_ok=True)


def test_a_member_that_stands_still_is_drained(tmp_path: Path) -> None:
    playbook = Playbook("A timeout storm")
    drain, _ = playbook.commands("Type")
    (look,) = playbook.commands("Look")
    (restore,) = playbook.commands("Over")
    with two(tmp_path) as (stage, servers, files):
        with clients(6, stage.router, PATH, BODY, PATIENCE) as traffic:
            eventually(lambda: traffic.count(200) > 20)
            files[1].touch()
            stage.pages(playbook)
            lines = [line for line in stage.enter(look).splitlines() if not line.endswith(" 0")]
            assert lines and all(f'member="{servers[1].http}"' in line for line in lines), "it is one member"

            stage.enter(drain)
            eventually(lambda: stage.of_router("nerite_router_members_draining") == 1)
            eventually(lambda: stage.of_router("nerite_router_member_requests", member=servers[1].http) == 0)
            answered = traffic.count(200)
            eventually(lambda: traffic.count(200) > answered + 20)
            given_up = traffic.count(0)
            eventually(lambda: traffic.count(200) > answered + 100)
            assert traffic.count(0) == given_up
            stage.is_over(playbook)

            files[1].unlink()
            stage.enter(restore)
            before = stage.of_router("nerite_router_requests", member=servers[1].http, code="200")
            eventually(
                lambda: stage.of_router("nerite_router_requests", member=servers[1].http, code="200") > before + 20
            )
        assert traffic.found.keys() == {0, 200}


def test_retries_are_refused_while_all_members_stand_still(tmp_path: Path) -> None:
    playbook = Playbook("A timeout storm")
    _, refuse = playbook.commands("Type")
    with two(tmp_path, {"retry_fraction = 0.1": "retry_fraction = 1.0"}) as (stage, _, files):
        named = {"x_tenant": "acme", "x_stainless_retry_count": "1"}
        with (
            clients(3, stage.router, PATH, BODY, PATIENCE, x_tenant="acme"),
            clients(3, stage.router, PATH, BODY, PATIENCE, **named) as retries,
        ):
            for file in files:
                file.touch()
            stage.pages(playbook)
            assert retries.count(429) == 0
            stage.enter(refuse)
            eventually(lambda: retries.count(429) > 20)
            assert stage.of_router("nerite_admission_refused", tenant="acme", reason="retry_fraction") >= 20
            for file in files:
                file.unlink()
            stage.is_over(playbook)

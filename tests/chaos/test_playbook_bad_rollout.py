"""The playbook of a bad rollout: a version fails for a reason that no gate looks at, and an operator ends it."""

from __future__ import annotations

from pathlib import Path

from pages import run
from playbooks import Playbook, clients, with_names
from prometheus_server import short_rules
from replicas import BODY, FleetModel, cluster
from routing import pool, routing
from serving import eventually

FAILS = """
def execute(self, requests):
    values = [pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
    if any(7 in value for value in values):
        raise pb_utils.TritonModelException("broken weights")
    return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", value + 1)]) for value in values]
"""


def test_a_bad_rollout_is_aborted_on_all_servers(tmp_path: Path) -> None:
    playbook = Playbook("A bad rollout")
    (look,) = playbook.commands("Look")
    (abort,) = playbook.commands("Type")
    with cluster(tmp_path, 2, short_rules(tmp_path)) as two:
        model = FleetModel(two, "resnet", FAILS)
        servers = [replica.server for replica in model.replicas]
        with routing(tmp_path, pool(*(each.http for each in servers))) as router:
            with clients(3, router, "/v2/models/resnet/infer", BODY) as traffic:
                try:
                    command = model.start("--steps", "30,100", "--hold", "1h", "--gate", "p99=+1000%")
                    model.eventually("running", weight=30)
                    eventually(lambda: bool(two.prometheus.firing(playbook.alert)))
                    said = run(with_names(look, router, servers))
                    assert "RUNNING" in said and "weight 30 %" in said

                    run(with_names(abort, router, servers))
                    model.eventually("aborted")
                    assert command.wait() == 1
                    eventually(lambda: not two.prometheus.firing(playbook.alert))
                    bad, good = traffic.count(500), traffic.count(200)
                    eventually(lambda: traffic.count(200) > good + 100)
                    assert traffic.count(500) == bad > 0
                finally:
                    model.close()
            assert model.served() == [1.0, 1.0]

"""``[pool.rollout]`` of the cluster file: the keys of ``rollout.toml``, and its mistakes with their lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from nerite.cluster.cluster_file import parse_cluster
from nerite.config.rollout_spec import AtDeadline, RolloutSpec, WhenLost
from nerite.core.errors import InvalidArgument

POOL = '[[pool]]\nname = "main"\nmodels = "models"\n'
MODEL = POOL + '[pool.rollout.models.resnet]\nfrom = "1"\nto = "2"\n'
WHOLE = """
[pool.rollout]
unreachable = "go-on"
key = "x-key=@key"

[pool.rollout.models.resnet]
from = "1"
to = "2"
steps = [5, 50, 100]
hold = "10m"
requests = 100
deadline = "1h"
at-deadline = "rollback"
gate = ["errors", "p99=+20%"]
sticky = "tenant"
webhook = "http://hooks/"
record = true
force = true
"""


def test_the_whole_table() -> None:
    (pool,) = parse_cluster(POOL + WHOLE, "/etc/cluster.toml").pools
    assert pool.rollout is not None
    assert (pool.rollout.unreachable, pool.rollout.key) == (WhenLost.GO_ON, "x-key=@/etc/key")
    assert pool.rollout.models == {
        "resnet": RolloutSpec(
            "2", "1", (5.0, 50.0, 100.0), 0.0, 600.0, 100, 3600.0, AtDeadline.ROLL_BACK, ("errors", "p99=+20%"),
            "tenant", "http://hooks/", record=True, force=True,
        )
    }  # fmt: skip
    assert pool.rollout.server_flags == ("--rollout-baseline=resnet=1",)
    assert dict(pool.rollout.texts) == {
        "resnet": "version 1 to 2, 5, 50, 100 % of the requests, each held for 10m and 100 requests, gates errors, "
        "p99=+20%, rollback after 1h"
    }


def test_without_a_table_nothing_is_rolled_out() -> None:
    (pool,) = parse_cluster(POOL).pools
    assert pool.rollout is None


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (POOL + "[pool.rollout]\n", "cluster.toml:4: pool.1.rollout: must have a table for each model"),
        (POOL + "rollout = true\n", "cluster.toml:4: pool.1.rollout: must be a table"),
        (
            POOL + "[pool.rollout]\nmodel = 1\n",
            "cluster.toml:5: pool.1.rollout.model: is not known. Did you mean models?",
        ),
        (
            MODEL + 'hodl = "1m"\n',
            "cluster.toml:7: pool.1.rollout.models.resnet.hodl: is not known. Did you mean hold?",
        ),
        (MODEL + "steps = [5]\n", "cluster.toml:7: pool.1.rollout.models.resnet.steps: must end with 100"),
        (MODEL + 'shadow = "5%"\n', "cluster.toml:7: pool.1.rollout.models.resnet.shadow: has no effect"),
        (MODEL + 'gate = ["restarts<=0"]\n', "cluster.toml:7: pool.1.rollout.models.resnet.gate: has no gate that"),
        (MODEL.replace('from = "1"\n', ""), "cluster.toml:4: pool.1.rollout.models.resnet.from: is missing"),
        (
            MODEL + "[pool.rollout]\nunreachable = 'wait'\n",
            "cluster.toml:8: pool.1.rollout.unreachable: must be one",
        ),
        (MODEL + "[pool.placement]\n", "cluster.toml:4: pool.1.rollout: has no effect with placement"),
        (
            MODEL.replace('models = "models"', 'kind = "vllm"\nmembers = ["a:1"]'),
            "cluster.toml:5: pool.1.rollout: servers of kind vllm have no rollouts",
        ),
        (
            MODEL.replace('models = "models"', 'models = "models"\nflags = ["--rollout-state=/x"]'),
            "cluster.toml:4: pool.1.flags: has --rollout-state, where the state of all servers would be the same",
        ),
    ],
)
def test_mistakes_are_told_with_their_lines(text: str, complaint: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        parse_cluster(text)
    assert complaint in error.value.message


def test_what_the_repository_does_not_have_is_refused(tmp_path: Path) -> None:
    file = str(tmp_path / "cluster.toml")
    parse_cluster(MODEL, file)  # the repository is on other machines
    for folder in ("resnet/1", "resnet/10", "chat/1", ".git"):
        (tmp_path / "models" / folder).mkdir(parents=True)

    def complaint(text: str) -> str:
        with pytest.raises(InvalidArgument) as error:
            parse_cluster(text, file)
        return error.value.message.replace(str(tmp_path), "")

    assert complaint(MODEL) == (
        "/cluster.toml:6: pool.1.rollout.models.resnet.to: version 2 is not in /models/resnet. There are: 1, 10"
    )
    assert complaint(MODEL.replace("resnet", "resnte")) == (
        "/cluster.toml:4: pool.1.rollout.models.resnte: is not in /models. There are: chat, resnet"
    )
    (tmp_path / "models/resnet/2").mkdir()
    parse_cluster(MODEL, file)
    (tmp_path / "models/resnet/rollout.toml").write_text("")
    assert complaint(MODEL) == (
        "/cluster.toml:4: pool.1.rollout.models.resnet: /models/resnet/rollout.toml asks for a rollout of the model, "
        "too: remove one of them"
    )

"""The policy file: what it says, and what its mistakes are told as."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nerite.admission.policy import (
    AdmissionPolicy,
    ModelLimits,
    RateLimit,
    SharedQuotaSettings,
    digest_of,
    parse_policy,
)
from nerite.core.errors import InvalidArgument
from nerite.redis.settings import RedisSettings

PAGE = Path(__file__).resolve().parents[3] / "docs" / "admission.md"
TWO = """
header = "X-Tenant"
[classes.high]
order = 1
share = 3
ttft_seconds = 1.5
[classes.low]
order = 2
[tenants.acme]
keys = ["secret", "sha256:{digest}"]
header_values = ["acme"]
class = "high"
weight = 3
input_tokens_per_minute = 1000
output_tokens_per_minute = 600
output_tokens_burst = 100
concurrency = 4
retry_fraction = 0.25
sequence_share = 0.5
[default]
requests_per_minute = 60
[llms."*"]
max_sequences = 8
[llms.llama]
context_window = 4096
overcommit = 0.1
[models.resnet]
max_bytes = 1_000_000
max_requests = 2
queue_bytes = 5_000_000
""".replace("{digest}", digest_of("other").upper())


def test_what_a_file_says() -> None:
    policy = parse_policy(TWO)
    assert [(each.name, each.order, each.share, each.ttft_seconds) for each in policy.classes.values()] == [
        ("high", 1, 3, 1.5),
        ("low", 2, 1, 0.0),
    ]
    acme = policy.tenants["acme"]
    assert (acme.level, acme.weight, acme.concurrency, acme.retry_fraction) == ("high", 3, 4, 0.25)
    assert (acme.sequence_share, policy.everybody.sequence_share) == (0.5, 0.75)
    assert (acme.input_tokens, acme.output_tokens, acme.requests) == (
        RateLimit(1000, 1000),
        RateLimit(600, 100),
        RateLimit(),
    )
    assert policy.everybody.requests == RateLimit(60, 60)
    assert policy.everybody.level == "low"
    assert policy.limits_of("llama") == ModelLimits(max_running=8, context_window=4096, overcommit=0.1)
    assert policy.limits_of("mistral") == ModelLimits(max_running=8)
    assert policy.limits_of("resnet", tokens=False) == ModelLimits(
        tokens=False, max_input=1_000_000, max_running=2, queue_size=5_000_000
    )
    assert policy.limits_of("llama", tokens=False) == ModelLimits(tokens=False)


def test_who_somebody_is() -> None:
    policy = parse_policy(TWO)
    assert policy.header == "x-tenant"
    assert (
        policy.tenant_of("secret").name == policy.tenant_of("other").name == policy.tenant_of("", "acme").name == "acme"
    )
    assert policy.tenant_of("wrong").name == policy.tenant_of().name == policy.tenant_of("", "ACME").name == "default"
    assert policy.tenant_of("wrong", "acme").name == "acme"
    assert "secret" not in repr(policy)


def test_a_request_may_ask_for_a_lower_class() -> None:
    policy = parse_policy(TWO)
    acme, everybody = policy.tenants["acme"], policy.everybody
    assert policy.class_of(acme) is policy.class_of(acme, "high") is policy.classes["high"]
    assert policy.class_of(acme, "low") is policy.classes["low"]
    assert policy.class_of(everybody, "high") is None
    assert policy.class_of(acme, "middle") is None


def test_quotas_of_several_servers() -> None:
    policy = parse_policy(
        "[redis]\nurl = 'redis://me:secret@h:1/2'\noutage_share = 0.5\n[default]\ntokens_per_month = 9"
    )
    assert policy.shared == SharedQuotaSettings(RedisSettings("h", 1, "me", "secret", 2), 0.5)
    assert policy.everybody.tokens_per_month == 9
    assert "secret" not in repr(policy)
    other = RedisSettings("other", 6379)
    for text in ("", "[redis]\nurl = 'redis://h:1'"):
        assert parse_policy(text, redis=other).shared == SharedQuotaSettings(other)


def test_an_empty_file_limits_queues_alone() -> None:
    assert parse_policy("") == AdmissionPolicy(llms={"*": ModelLimits()}, models={"*": ModelLimits(tokens=False)})


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("clases = 1", "p:1: clases: is not known. Did you mean classes?"),
        ("classes = 1", "p:1: classes: must be tables, as in: [classes.name]"),
        ("[classes]\nhigh = 1", "p:2: classes.high: must be a table: write [classes.high] and its keys below"),
        ("[classes.a]\nordr = 1", "p:2: classes.a.ordr: is not known. Did you mean order?"),
        (
            "[classes.a]\nzzz = 1",
            "p:2: classes.a.zzz: is not known. There are: order, share, ttft_seconds.",
        ),
        ("[classes.a]\nshare = 0", "p:2: classes.a.share: must be an integer >= 1"),
        ("[classes.a]\nshare = true", "p:2: classes.a.share: must be an integer >= 1"),
        ("[classes.a]\nttft_seconds = -1", "p:2: classes.a.ttft_seconds: must be a number of seconds >= 0"),
        ("[classes.a]\nttft_seconds = inf", "p:2: classes.a.ttft_seconds: must be a number of seconds >= 0"),
        (
            "[classes.a]\norder = 1\n[classes.b]\norder = 1",
            "p:4: classes.b.order: is already used by class 'a'; each class needs an order of its own",
        ),
        (
            "[classes.gold]\n[tenants.t]\nclass = 'gol'",
            "p:3: tenants.t.class: 'gol' is not a class. Did you mean gold?",
        ),
        ("[tenants.t]\nwieght = 2", "p:2: tenants.t.wieght: is not known. Did you mean weight?"),
        ("tenants.t.wieght = 2", "p:1: tenants.t.wieght: is not known. Did you mean weight?"),
        ("tenants = {t = {wieght = 2}}", "p:1: tenants.t.wieght: is not known. Did you mean weight?"),
        ("[tenants.t]\nretry_fraction = 2", "p:2: tenants.t.retry_fraction: must be a number from 0 to 1"),
        ("[tenants.t]\nsequence_share = 0", "p:2: tenants.t.sequence_share: must be a number above 0, 1 at most"),
        ("[tenants.t]\nkeys = 'secret'", "p:2: tenants.t.keys: must be a list of non-empty strings"),
        (
            "[tenants.t]\nkeys = ['a', 'sha256:b']",
            "p:2: tenants.t.keys: entry 2 must have 64 hexadecimal digits after sha256:",
        ),
        (
            "[tenants.t]\nkeys = ['secret']\n[tenants.u]\nkeys = ['x', 'secret']",
            "p:4: tenants.u.keys: entry 2 already belongs to tenant 't'",
        ),
        (
            "[tenants.t]\nheader_values = ['a']",
            'p: tenants: header_values require the name of the header: write header = "x-tenant" at the top',
        ),
        (
            "[tenants.t]\nbytes_burst = 1",
            "p:2: tenants.t.bytes_burst: has no effect without bytes_per_minute",
        ),
        (
            "[tenants.default]",
            "p:1: tenants.default: is reserved for callers without a tenant of their own: write [default]",
        ),
        ("[default]\nkeys = ['a']", "p:2: default.keys: is not known. There are: class, weight,"),
        ("header = 'a b'", "p:1: header: must be the name of a header, as in: x-tenant"),
        ("[llms.l]\nmax_bytes = 1", "p:2: llms.l.max_bytes: is not known. "),
        ("[models.'a.b']\nmax_byte = 1", "p:2: models.a.b.max_byte: is not known. Did you mean max_bytes?"),
        (f"[classes.a]\nttft_seconds = 1{'0' * 400}", "p:2: classes.a.ttft_seconds: must be a number of seconds"),
        ("[classes.a]\nttft_seconds = 1e30", "p:2: classes.a.ttft_seconds: must be a number of seconds"),
        (f"[default]\nconcurrency = 1{'0' * 400}", "p:2: default.concurrency: must be an integer >= 0"),
        (f"x = {'[' * 5_000}", "p: maximum recursion depth exceeded"),
        (f"x = {'9' * 5_000}", "p: Exceeds the limit (4300 digits) for integer string conversion"),
        ("[redis]", 'p:1: redis: needs the address of Redis, as in: url = "redis://127.0.0.1:6379"'),
        ("[redis]\nurl = 'redis://h'\nshare = 1", "p:3: redis.share: is not known. "),
        ("[redis]\nurl = 'redis://h'\noutage_share = 2", "p:3: redis.outage_share: must be a number from 0 to 1"),
        ("[redis]\nurl = 'http://x:secret@h/1'", "p:2: redis.url: 'http://h:6379/1' is not an address of Redis: write"),
        ("[default]\ntokens_per_month = 1", "p:2: default.tokens_per_month: needs a Redis, which keeps the use"),
        ("[tenants.t]\ntokens_per_month = 1", "p:2: tenants.t.tokens_per_month: needs a Redis, which keeps the use"),
        ("[llms.l\n", "p: Expected ']' at the end of a table declaration (at line 1, column 8)"),
    ],
)
def test_mistakes(text: str, mistake: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_policy(text, "p")
    assert caught.value.message.startswith(mistake)
    assert "secret" not in caught.value.message


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_policy("[classes.a]\nshare = 0\n[llms.l]\nqueue_length = -1\nmax_sequences = 'many'", "p")
    assert [line.split(":")[1] for line in caught.value.message.splitlines()] == ["2", "4", "5"]


def test_the_example_of_the_page_is_right_and_complete() -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    policy = parse_policy(text)
    assert policy.header
    assert len(policy.classes) == 3
    assert policy.tenant_of("a-key-of-acme").name == "acme"
    tables = [*(f"{kind}.x" for kind in ("classes", "tenants", "llms", "models")), "redis"]
    with pytest.raises(InvalidArgument) as caught:
        parse_policy("\n".join(f"[{table}]\nzz = 1" for table in tables))
    known = re.findall(r"There are: (.*)\.$", caught.value.message, re.MULTILINE)
    assert len(known) == len(tables)
    keys = {key for line in known for key in line.split(", ")}
    assert [key for key in sorted(keys) if f"\n{key} = " not in text and f"# {key} = " not in text] == []


def test_the_example_for_several_servers_is_right(tmp_path: Path) -> None:
    """It is commented out on the page, because it needs a Redis."""
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "prices.toml").write_text('[[price]]\nmodel = "*"\nanswer-tokens = 1')
    policy = parse_policy(re.sub(r"^# (?=\[|\w+ = )", "", text, flags=re.MULTILINE), str(tmp_path / "policy.toml"))
    assert policy.shared == SharedQuotaSettings(RedisSettings("127.0.0.1", 6379), 0.25)
    assert policy.tenants["acme"].tokens_per_month == 500_000_000
    assert policy.tenants["acme"].money_per_month == 250_000_000

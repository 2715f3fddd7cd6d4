"""No dictionary that clients fill grows without a bound in bytes.

A *memo* here is a function with ``lru_cache`` or ``cache``, or a dictionary or set that starts empty, is an attribute
or stands in a module, and of which no entry is removed by its key. It either gets its entries from a ``ByteBudget``, or
stands below with the reason why it stays small.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

SOURCES: Final = Path(__file__).resolve().parents[2] / "src"
NOT_SERVING: Final = ("cli", "bench", "client", "intake", "analyze", "mlflow_plugin", "testing")
"""Packages that do not run in a server."""
MAKERS: Final = frozenset({"dict", "set", "OrderedDict", "defaultdict", "Counter", "Memo", "Kept"})
REMOVING: Final = frozenset({"discard", "pop", "popitem", "remove"})

BY_THE_PROGRAM: Final = {
    "backends/litert/session.py:_interpreter", "backends/llm/loop_engine.py:_totals",
    "backends/onnxruntime/framework.py:onnxruntime", "backends/openvino/framework.py:openvino",
    "backends/pytorch/framework.py:load", "backends/tensorflow/framework.py:tensorflow",
    "backends/tensorflow/schema.py:saved_model", "backends/tensorrt/context.py:_allocator_class",
    "backends/tensorrt/cuda.py:runtime", "backends/tensorrt/engine.py:_runtime", "backends/tensorrt/engine.py:tensorrt",
    "backends/trees/forest.py:treelite", "core/internal_errors.py:counts", "observability/otlp/wire.py:_event",
    "observability/record.py:_ESCAPES",
    "transports/bounds.py:closed", "transports/bounds.py:refused",
    "transports/grpc/status.py:head_with_encoding", "transports/openai/chat_template.py:_environment",
    "triton_python_backend_utils/data_types.py:_BY_NUMBER", "wire/schema.py:member", "wire/schema.py:methods",
    "wire/schema.py:pool",
}  # fmt: skip
"""What is in them is written in the program: modules that are imported, names of events, places."""
BY_THE_OPERATOR: Final = {
    "backends/arrays/feeds.py:_large", "backends/litert/computation.py:_shapes",
    "backends/llm/tensorrt_llm/engine.py:_arguments", "backends/llm/vllm/engine.py:_adapters",
    "backends/onnxruntime/session.py:_make_global_pool", "backends/openvino/backend.py:_compiled",
    "backends/openvino/framework.py:core", "backends/python/archive.py:_digest",
    "backends/python/environment.py:_check", "backends/pytorch/inductor.py:_folders", "backends/registry.py:_packaged",
    "backends/registry.py:_written_in_python", "backends/registry.py:backend",
    "backends/tensorrt/computation.py:_contexts", "backends/tensorrt/context.py:_allocators",
    "backends/tensorrt/context.py:_host", "backends/trees/backend.py:_engines",
    "backends/trees/engines/lightgbm.py:_prepared", "backends/trees/native.py:open_library",
    "config/cursor.py:doubtful", "config/cursor.py:listed", "config/schema.py:_schemas",
    "execution/host_policy.py:_settings",
    "execution/households.py:_shared", "execution/nursery.py:_lines", "execution/reception.py:_usages",
    "execution/orphans.py:_told", "repository/source.py:_unfit",
    "execution/ways.py:_told", "execution/ways.py:_ways", "execution/worker.py:_stretches",
    "observability/exposition.py:_buckets", "observability/exposition.py:_parted",
    "observability/exposition.py:label",
    "observability/load_times.py:_intervals", "observability/otlp/wire.py:form",
    "observability/trace_records.py:_mould", "observability/trace_settings.py:_models",
    "observability/trace_settings.py:_set", "repository/catalogue.py:_named", "repository/content.py:_known",
    "repository/ensemble_survey.py:_verdicts", "repository/loading_round.py:_circles",
    "repository/loading_round.py:_tasks", "repository/manager.py:_waits", "repository/remote/cache.py:_busy",
    "repository/watch.py:_missing", "repository/watch.py:_restless", "scheduling/rate_limiter.py:_amounts",
    "scheduling/rate_limiter.py:_limits", "scheduling/rate_limiter.py:_rivals", "scheduling/rate_limiter.py:_taken",
    "scheduling/tokens/account.py:_accounts", "scheduling/tokens/fair_queue.py:_levels",
    "scheduling/tokens/fair_queue.py:flows", "scheduling/tokens/forecast.py:_tenants",
    "scheduling/tokens/usage.py:_uses", "server_process.py:_key_files", "transports/openai/beside.py:_template",
    "transports/ports.py:_listeners", "transports/ports.py:opened",
}  # fmt: skip
"""What is in them are models, their versions, tensors, files and instances, resources, and tenants of the policy."""
SMALL: Final = {
    "backends/llm/openvino_genai/grammars.py:_good": "hashes, at most 4,096",
    "backends/llm/openvino_genai/image_tokens.py:_known": "pairs of numbers, at most 4,096",
    "backends/llm/openvino_genai/vocabulary.py:_known": "tokens, of which a model has so many",
    "backends/pytorch/exported.py:_seen": "shapes of a model's inputs, at most 256 of their sets",
    "core/internal_errors.py:_known": "lines of the program",
    "http2/compression.py:_decode_short": "texts of at most 64 bytes, at most 1,024",
    "http2/frames.py:block_start": "nine bytes, at most 128 times",
    "http2/headers.py:_checked": "fields of at most 128 bytes, at most 4,096",
    "scheduling/ensemble/graph.py:_plans": "steps of an ensemble by the outputs that are wanted, at most 64 times",
    "observability/own_metrics.py:_powers_up_to": "a few numbers for each size of batches",
    "observability/stage_times.py:exemplars": "one for each bucket of a histogram",
    "observability/statistics.py:batches": "one for each number of rows up to the largest batch",
    "scheduling/request_queue.py:_levels": "one for each priority of a model",
    "scheduling/tokens/pace.py:_decode": "one for each number of bits",
}
"""Why what is in them takes little, however much is asked."""
WITH_REQUESTS: Final = {
    "backends/llm/openvino_genai/engine.py:_held": "requests that run",
    "backends/llm/possible.py:_led": "references of the schema that is being looked at",
    "backends/llm/possible.py:_targets": "what these lead to",
    "backends/llm/openvino_genai/compiling.py:stop_token_ids": "of one request",
    "backends/python/replies.py:again": "requests of one batch",
    "core/request.py:replies": "filled by transports/http/infer_response.py, which has a budget",
    "execution/arena.py:_pieces": "places in memory that is lent to requests",
    "execution/calls.py:allowed": "instances of a worker",
    "execution/rationed_roster.py:_waiting": "instances",
    "execution/worker_batch.py:_since": "requests of a batch",
    "execution/worker_runner.py:_early": "requests of batches that run",
    "observability/custom_metrics.py:samples": "a reading that is thrown away when it was told",
    "observability/exposition.py:_families": "a page that is thrown away when it was sent",
    "scheduling/sequence_batcher.py:_barred": "instances",
    "scheduling/stall_watch.py:_quiet_until": "instances",
    "scheduling/tokens/ticket.py:charged": "of one request",
    "transports/grpc/connection.py:_arriving": "open streams, whose number HTTP/2 limits",
    "transports/http/shared.py:connections": "open connections",
    "transports/openai/joint_work.py:_places": "of one request",
    "triton_python_backend_utils/request.py:_requested": "of one request",
    "transports/http/generate_form.py:_parameters": "of one request",
    "transports/http/generate_form.py:_specs": "of one request",
    "transports/http/head.py:headers": "of one head",
}
"""Of what they belong to, with which they end."""
ALLOWED: Final = BY_THE_PROGRAM | BY_THE_OPERATOR | SMALL.keys() | WITH_REQUESTS.keys()


def name_of(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def is_empty(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Dict):
        return not value.keys
    return isinstance(value, ast.Call) and name_of(value.func) in MAKERS


def memos_of(tree: ast.Module) -> Iterator[str]:
    """Yield the names of a module's memos, without those that a budget fills."""
    named: set[str] = set()
    removed: set[str] = set()
    budgeted: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(decorator_list=decorators):
                if {"lru_cache", "cache"} & {name_of(each) for it in decorators for each in ast.walk(it)}:
                    yield node.name
            case (
                ast.Assign(targets=[ast.Attribute(attr=name)], value=value)
                | ast.AnnAssign(target=ast.Attribute(attr=name), value=value)
            ) if is_empty(value):
                named.add(name)
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Call(func=maker)))
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.Call(func=ast.Call(func=maker)))
            ) if name_of(maker) == "lru_cache":
                yield name
            case ast.Subscript(value=value, ctx=ast.Del()):
                removed.add(name_of(value))
            case ast.Attribute(value=value, attr=method) if method in REMOVING:
                removed.add(name_of(value))
            case ast.Call(func=ast.Attribute(attr="put" | "_keep"), args=[memo, *_]):
                budgeted.add(name_of(memo))
    for statement in tree.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and is_empty(statement.value):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            named.update(map(name_of, targets))
    yield from named - removed - budgeted


@cache
def found() -> set[str]:
    """Return the memos of all that runs in a server, as file and name."""
    memos = set()
    for path in SOURCES.rglob("*.py"):
        place = path.relative_to(SOURCES)
        if place.parts[0] != "nerite" or place.parts[1] not in NOT_SERVING:
            shown = str(place).removeprefix("nerite/")
            memos |= {f"{shown}:{name}" for name in memos_of(ast.parse(path.read_text()))}
    return memos


def test_memos_are_found() -> None:
    tree = ast.parse(
        "from functools import lru_cache\n"
        "_module = {}\n_short = lru_cache(8)(len)\n"
        "@lru_cache\ndef remembered(x): return x\n"
        "class A:\n"
        "    def __init__(self):\n"
        "        self._budgeted = {}; self._registered = {}; self._seen: set[int] = set(); self._tasks = set()\n"
        "    def of(self, key, value):\n"
        "        BUDGET.put(self._budgeted, key, value, 1)\n"
        "        self._registered[key] = value; del self._registered[key]\n"
        "        value.add_done_callback(self._tasks.discard)\n"
    )
    assert sorted(memos_of(tree)) == ["_module", "_seen", "_short", "remembered"]


def test_what_clients_fill_has_a_budget() -> None:
    assert found() - ALLOWED == set(), "put entries through a budget of byte_budget.py, or say here why they stay few"


def test_the_list_has_nothing_that_is_gone() -> None:
    assert ALLOWED - found() == set()

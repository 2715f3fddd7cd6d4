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
NOT_SERVING: Final = ("cli", "ray", "tools", "client", "testing")
"""Packages that do not run in a server."""
MAKERS: Final = frozenset({"dict", "set", "OrderedDict", "defaultdict", "Counter", "Memo", "HeaderMemo"})
REMOVING: Final = frozenset({"discard", "pop", "popitem", "remove"})

BY_THE_PROGRAM: Final = {
    "frameworks/litert.py:_interpreter_class", "llm/engine.py:_totals",
    "backends/onnxruntime/session.py:load_cuda_libraries",
    "backends/onnxruntime/session.py:onnxruntime", "frameworks/openvino/graph.py:openvino",
    "frameworks/pytorch/program.py:load_torch", "frameworks/tensorflow/session.py:tensorflow",
    "frameworks/tensorflow/files.py:saved_model", "frameworks/tensorrt/execution.py:_allocator_class",
    "devices/cuda.py:runtime", "devices/exchange.py:available",
    "frameworks/tensorrt/engine.py:_runtime", "frameworks/tensorrt/engine.py:tensorrt",
    "core/failures.py:counts", "observability/otlp.py:_key",
    "repository/demand_figures.py:evictions", "repository/demand_figures.py:loads",
    "observability/log_records.py:_ESCAPES",
    "transports/limits.py:closed", "transports/limits.py:refused", "fronts/front_connection.py:figures",
    "transports/grpc/messages.py:head_with_encoding", "llm/openai/chat_templates.py:_environment",
    "router/placement.py:steps", "router/pools.py:holds", "router/pools.py:picks",
    "router/pools.py:refused", "router/pools.py:retries", "router/grpc_service.py:_blocks",
    "functions/embedded.py:ports", "functions/model_function.py:_config", "functions/server.py:_functions",
    "functions/server.py:_keys", "pytriton/triton.py:_keys", "tritonserver/server.py:_models",
    "triton_python_backend_utils/tensor.py:_BY_NUMBER", "wire/schema.py:member", "wire/schema.py:methods",
    "wire/schema.py:pool", "config/schema.py:schema_of", "config/schema.py:_declarations",
}  # fmt: skip
"""What is in them is written in the program: modules that are imported, names of events, places."""
BY_THE_OPERATOR: Final = {
    "artifacts/programs/torchserve_handler.py:model_yaml_config",
    "devices/devices.py:_pools", "devices/exchange.py:streams", "workers/child/device_memory.py:_asked",
    "workers/child/device_memory.py:_pools", "workers/host/device_memory.py:_known",
    "backends/arrays/batches.py:_large", "backends/arrays/device.py:inputs",
    "backends/arrays/backend.py:shared_copies", "frameworks/litert.py:_shapes",
    "llm/tensorrt_llm.py:_arguments", "backends/onnxruntime/backend.py:_make_global_pool",
    "frameworks/openvino/graph.py:core", "backends/python/environments.py:_digest",
    "backends/python/environments.py:_check", "frameworks/pytorch/exported.py:_folders",
    "backends/registry.py:packaged_backends",
    "backends/registry.py:_written_in_python", "backends/registry.py:backend",
    "frameworks/tensorrt/execution.py:_contexts", "frameworks/tensorrt/execution.py:_allocators",
    "frameworks/tensorrt/execution.py:_host", "frameworks/trees/backend.py:engines",
    "frameworks/trees/engines.py:_single", "frameworks/trees/native.py:_opened",
    "config/scanner.py:doubtful", "config/scanner.py:listed",
    "instances/placement.py:_settings",
    "workers/host/process.py:_shared", "workers/host/fork_server.py:_lines", "admission/tenants.py:_usages",
    "admission/lease_book.py:_leases", "admission/lease_book.py:_monthly",
    "workers/orphans.py:_told", "repository/repositories.py:_invalid_names",
    "router/pool_rollouts.py:_said", "inference_entry.py:_splits", "routes/table.py:counters",
    "workers/host/fused.py:_numbers", "workers/host/fused.py:_paths", "workers/child/fused.py:_chains",
    "observability/exposition.py:_bucket_template", "observability/exposition.py:_split",
    "observability/exposition.py:_label",
    "observability/load_times.py:_intervals",
    "observability/metrics_history.py:_answered", "observability/metrics_history.py:_noted",
    "observability/tracing.py:_template", "observability/trace.py:_models",
    "observability/trace.py:_set", "repository/catalogue.py:_named", "repository/version_maker.py:_known",
    "repository/ensembles.py:_verdicts", "repository/loading_round.py:_cycles",
    "repository/loading_round.py:_tasks", "repository/manager.py:_waits", "repository/remote/repository.py:_busy",
    "repository/polling.py:_missing", "repository/polling.py:_restless", "scheduling/rate_limiter.py:_amounts",
    "scheduling/rate_limiter.py:_limits", "scheduling/rate_limiter.py:_rivals", "scheduling/rate_limiter.py:taken",
    "admission/accounts.py:_accounts", "admission/fair_queue.py:_levels",
    "admission/fair_queue.py:flows", "admission/estimates.py:_tenants",
    "admission/accounts.py:_uses", "server_components.py:_key_files", "llm/openai/bodies.py:_template",
    "transports/ports.py:_listeners", "transports/ports.py:opened",
    "fronts/catalogue.py:_described", "fronts/catalogue.py:_signatures", "fronts/process.py:_adopted",
    "fronts/pool.py:_timers", "fronts/process.py:_keys", "fronts/process.py:_listeners",
    "rollouts/controller.py:_records", "rollouts/record.py:decisions", "rollouts/run.py:_restarts_before",
    "rollouts/fleet.py:_answered", "rollouts/fleet.py:replicas", "router/http_members.py:suspects",
    "router/http_members.py:_keys", "router/replica_scaling.py:_actuators",
    "balancing/outliers.py:_records", "balancing/pool_balancer.py:_members", "balancing/pool_balancer.py:_tags",
    "repository/demand_survey.py:_known", "repository/descriptions.py:_last", "repository/memory_use.py:_found",
    "repository/on_demand.py:_models", "scheduling/residency_table.py:_dependents",
    "scheduling/model_residency.py:_overhead", "scheduling/model_residency.py:budget",
    "scheduling/model_residency.py:_turns",  # tenants of the policy; emptied when nobody waits
    "scheduling/model_residency.py:size", "scheduling/model_residency.py:stays", "scheduling/departures.py:_later",
    "scheduling/residency_table.py:size", "scheduling/residency_table.py:stays", "scheduling/residency_table.py:taken",
    "repository/memory_use.py:here", "repository/on_demand.py:_wake_seconds", "repository/sleeping_versions.py:asleep",
}  # fmt: skip
"""What is in them are models, their versions, tensors, files and instances, resources, members of pools, and tenants
of the policy."""
SMALL: Final = {
    "llm/json_grammar.py:_references": "references of one schema, at most 4,096",
    "storage/database.py:_said": "messages of the database in the last minute",
    "router/json_members.py:_seen": "names that are searched for",
    "router/json_members.py:found": "names that are searched for",
    "backends/python/archives.py:_files": "entries of one archive of a model, while it is unpacked",
    "backends/python/archives.py:_links": "entries of one archive of a model, while it is unpacked",
    "llm/openai/serving.py:_told": "names of at most 256 fields, each of bounded length",
    "llm/openvino_genai/grammars.py:_good": "hashes, at most 4,096",
    "llm/openvino_genai/running.py:_known": "pairs of numbers, at most 4,096; tokens, of which a model has so many",
    "frameworks/pytorch/exported.py:_seen": "shapes of a model's inputs, at most 256 of their sets",
    "core/failures.py:_known": "lines of the program",
    "observability/log.py:followers": "one or less for each model's worker processes",
    "http2/headers.py:_decode_short": "texts of at most 64 bytes, at most 1,024",
    "http2/frames.py:block_start": "nine bytes, at most 128 times",
    "http2/headers.py:_checked": "fields of at most 128 bytes, at most 4,096",
    "scheduling/ensemble.py:_takers": "tensors of an ensemble, as many times as its steps take them",
    "scheduling/ensemble.py:_plans": "steps of an ensemble by the outputs that are wanted, at most 64 times",
    "observability/model_metrics.py:_powers_up_to": "a few numbers for each size of batches",
    "judge/counts.py:_clusters": "hashes, at most 16,384 for each gate of a rollout",
    "rollouts/fleet_counts.py:_seen": "of the fleet command: rows of the replicas' judges",
    "rollouts/run.py:_counted_before": "rows of a judge: 16 classes of requests for each gate and weight",
    "judge/limits.py:_clusters": "hashes, at most 4,096 for each rollout",
    "judge/judge.py:_arrived": "one for each weight that a rollout has given its candidate",
    "judge/thresholds.py:_seen": "classes of requests, at most 64, with one number for each bucket of a histogram",
    "judge/thresholds.py:_frozen": "classes of requests, at most 64",
    "judge/thresholds.py:_before": "classes of requests, at most 64",
    "judge/outcome.py:token_stratum": "classes of requests, at most 1,024",
    "judge/evidence.py:_log_ratios": "two small tables for each gate and weights, at most 256",
    "rollouts/run.py:shadow": "results of a shadow, by their names in the program",
    "observability/histogram.py:exemplars": "one for each bucket of a histogram",
    "observability/statistics.py:batches": "one for each number of rows up to the largest batch",
    "scheduling/request_queue.py:_levels": "one for each priority of a model",
    "workers/child/device_memory.py:asked": "one for each number of bits",
    "admission/estimates.py:_decode": "one for each number of bits",
    "batches/deadline_planner.py:_lanes": "one or less for each batch that has not ended, at most 1,000",
    "batches/submitter.py:_rooms": "one or less for each batch that has not ended, at most 1,000",
    "batches/submitter.py:_others_until": "one or less for each batch that has not ended, at most 1,000",
    "batches/submitter.py:_others": "models of batches that have not ended, for one turn of the event loop",
    "batches/submitter.py:full": "tenants of the policy",
    "batches/runner.py:_loaded": "tenants of the policy",
    "kubernetes/object_watch.py:_listed": "EndpointSlices of a service, at most 16,384",
    "router/accounting.py:_unlisted": "models that members have answered for, at most 1,000",
    "router/admission.py:_controllers": "models, at most 1,024",
    "router/placement_lease.py:others": "models that other routers have told, at most 1,000 each",
    "router/pools.py:obstacles": "models in the repository indexes of members for which requests wait",
    "balancing/frequent_keys.py:_counts": "at most 128 counters",
    "balancing/member_load.py:timings": "models that have answered within two seconds",
    "balancing/pool_balancer.py:_fits": "lists of a pool's members, for at most 1,024 models",
    "ledger/meter.py:_keys": "the last header for each way in which a request ends",
}
"""Why what is in them takes little, however much is asked."""
WITH_REQUESTS: Final = {
    "llm/openvino_genai/engine.py:_held": "requests that run",
    "llm/openvino_genai/grammars.py:stop_token_ids": "of one request",
    "backends/python/instance.py:again": "requests of one batch",
    "core/request.py:replies": "filled by transports/http/infer_response.py, which has a budget",
    "devices/pools.py:_free": "parts of a pool, which has a size",
    "devices/pools.py:_live": "parts of a pool, which has a size",
    "workers/ipc/shared_memory.py:_pieces": "places in memory that is lent to requests",
    "workers/child/bls.py:allowed": "instances of a worker",
    "dispatch/rate_limited.py:_waiting": "instances",
    "workers/child/hosted_model.py:_last_sent": "requests of a batch",
    "workers/host/instance.py:_early": "requests of batches that run",
    "observability/custom_metrics.py:samples": "a reading that is thrown away when it was told",
    "observability/exposition.py:_families": "a page that is thrown away when it was sent",
    "scheduling/sequence_batcher.py:_blocked": "instances",
    "scheduling/stall_detectors.py:_quiet_until": "instances",
    "admission/ticket.py:charged": "of one request",
    "routes/table.py:under_way": "requests that have not ended",
    "tritonserver/requests.py:parameters": "of one response",
    "transports/grpc/connection.py:_arrival_timeouts": "open streams, whose number HTTP/2 limits",
    "transports/http/handler.py:connections": "open connections",
    "llm/openai/replies.py:_places": "of one request",
    "triton_python_backend_utils/request.py:_requested": "of one request",
    "transports/http/generate_form.py:_parameters": "of one request",
    "transports/http/generate_form.py:_specs": "of one request",
    "transports/http/head.py:headers": "of one head",
    "transports/http/item_exchange.py:headers": "of one head",
    "router/pools.py:exchanges": "requests that are at a member",
    "router/pools.py:idle": "members with such requests under way",
    "router/http_relay.py:_counts": "kinds of tokens, seven",
    "router/json_members.py:_seen": "wanted names, eleven",
    "router/json_members.py:found": "wanted names, eleven",
    "router/http_service.py:locks": "categories, one",
    "router/pools.py:metered": "members, as health checks find them",
    "artifacts/programs/torchserve_handler.py:request_ids": "of one batch",
    "artifacts/programs/torchserve_handler.py:statuses": "of one batch",
    "batches/running_batch.py:under_way": "items that run, as many as --batch-concurrency allows",
    "backends/python/archives.py:_links": "of one archive",
    "backends/python/archives.py:_files": "of one archive",
    "batches/running_batch.py:failures": "items that run again, as many as --batch-concurrency allows",
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

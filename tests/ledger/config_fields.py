"""The fields of ``ModelConfig``, by their dotted names. A message stands for all in it that is not listed itself."""

from __future__ import annotations

from typing import Final

_SCHEDULERS: Final = "service/test_schedulers.py"
_BATCH_WAITS: Final = f"{_SCHEDULERS}::test_a_batch_waits_for_others_up_to_a_preferred_size"
_IN_ORDER: Final = f"{_SCHEDULERS}::test_answers_leave_in_the_order_of_the_requests"
_LEVELS: Final = f"{_SCHEDULERS}::test_the_urgent_first"
_CONTROLS: Final = "sequences: direct: from START to END"
_RAGGED: Final = "unit/backends/test_onnxruntime_ragged.py::test_rows_of_different_length_in_one_run"
_BATCH_INPUTS: Final = "unit/backends/test_onnxruntime_ragged.py::test_batch_inputs"
_TENSORRT: Final = "unit/config/test_config_loading.py::test_fields_for_tensorrt_alone"
_PINNED: Final = "unit/backends/test_device_instance.py::test_pinned_memory_can_be_switched_off"

CONFIG_FIELDS: Final = {
    "name": "repository_explicit: load othername",
    "platform": "unit/config/test_config_backend_choice.py::test_a_file_tells_the_backend",
    "backend": "service/test_custom_backends.py::test_one_that_does_not_say_runs_in_a_worker",
    "runtime": "unit/frameworks/test_pytorch_load.py::test_the_runtime_says_python_where_there_is_torchscript_too",
    "version_policy.latest": "service/test_repository_modes.py::test_version_policies",
    "version_policy.all": "service/test_repository_modes.py::test_version_policies",
    "version_policy.specific": "service/test_repository_modes.py::test_version_policies",
    "max_batch_size": "ensembles: too many rows",
    "input.name": "infer_json: input unexpected and one missing",
    "input.data_type": "infer_json: datatype of another kind",
    "input.dims": "infer_json: wrong dimension",
    "input.reshape": "reshape: rows",
    "input.is_shape_tensor": _TENSORRT,
    "input.allow_ragged_batch": _RAGGED,
    "input.optional": "ensembles: optional input",
    "input.is_non_linear_format_io": _TENSORRT,
    "output.name": "python_models: no Y, and Y is wanted",
    "output.data_type": "python_models: other type",
    "output.dims": "metadata: metadata of grid",
    "output.reshape": "reshape: one output",
    "output.label_filename": "classification: best two",
    "output.is_shape_tensor": _TENSORRT,
    "output.is_non_linear_format_io": _TENSORRT,
    "batch_input": _BATCH_INPUTS,
    "batch_output": _RAGGED,
    "optimization.graph": "unit/backends/test_onnxruntime_plan.py::test_graph_levels",
    "optimization.priority": "unit/frameworks/test_tensorrt_profiles.py::test_how_an_instance_runs",
    "optimization.input_pinned_memory": _PINNED,
    "optimization.output_pinned_memory": _PINNED,
    "optimization.cuda.graphs": "unit/frameworks/test_tensorrt_execute.py::test_graphs_are_captured_the_second_time",
    "optimization.execution_accelerators.gpu_execution_accelerator": (
        "unit/backends/test_onnxruntime_plan.py::test_tensorrt_options_have_onnx_runtimes_names"
    ),
    "optimization.execution_accelerators.cpu_execution_accelerator": (
        "unit/backends/test_onnxruntime_plan.py::test_openvino_runs_on_the_cpu_with_its_parameters"
    ),
    "dynamic_batching.preferred_batch_size": _BATCH_WAITS,
    "dynamic_batching.max_queue_delay_microseconds": _BATCH_WAITS,
    "dynamic_batching.preserve_ordering": _IN_ORDER,
    "dynamic_batching.priority_levels": _LEVELS,
    "dynamic_batching.default_priority_level": _LEVELS,
    "dynamic_batching.default_queue_policy.timeout_action": (f"{_SCHEDULERS}::test_the_late_are_put_behind_the_others"),
    "dynamic_batching.default_queue_policy.default_timeout_microseconds": "queue: waits too long",
    "dynamic_batching.default_queue_policy.allow_timeout_override": "queue: waits too long by its own word",
    "dynamic_batching.default_queue_policy.max_queue_size": "queue: no place in the queue",
    "dynamic_batching.priority_queue_policy": f"{_SCHEDULERS}::test_a_level_has_a_policy_of_its_own",
    "sequence_batching.direct": _BATCH_WAITS,
    "sequence_batching.oldest.max_candidate_sequences": (
        "service/test_sequences.py::test_as_many_sequences_as_may_be_candidates"
    ),
    "sequence_batching.oldest.preferred_batch_size": _BATCH_WAITS,
    "sequence_batching.oldest.max_queue_delay_microseconds": _BATCH_WAITS,
    "sequence_batching.oldest.preserve_ordering": _IN_ORDER,
    "sequence_batching.max_sequence_idle_microseconds": "service/test_sequences.py::test_an_idle_sequence_makes_room",
    "sequence_batching.control_input": _CONTROLS,
    "sequence_batching.state.input_name": "iterative: states begin with strings",
    "sequence_batching.state.output_name": "iterative: states begin with strings",
    "sequence_batching.state.data_type": "iterative: states begin with strings",
    "sequence_batching.state.dims": "iterative: states: other dimensions",
    "sequence_batching.state.initial_state": "iterative: states begin with a file",
    "sequence_batching.state.use_growable_memory": (
        "unit/config/test_config_initial_states.py::test_a_state_that_grows_is_refused"
    ),
    "sequence_batching.iterative_sequence": "iterative: three turns",
    "ensemble_scheduling.step.model_name": "ensembles: one after the other",
    "ensemble_scheduling.step.model_version": "ensembles: versions of a model",
    "ensemble_scheduling.step.input_map": "ensembles: two ways that meet",
    "ensemble_scheduling.step.output_map": "ensembles: two ways that meet",
    "ensemble_scheduling.step.model_namespace": (
        "service/test_several_repositories.py::test_a_step_goes_to_the_model_of_its_namespace"
    ),
    "ensemble_scheduling.max_inflight_requests": "service/test_ensembles.py::test_max_inflight_requests",
    "instance_group.name": "unit/instances/test_instance_plan.py::test_names_kinds_and_devices",
    "instance_group.kind": "service/test_on_gpus.py::test_models_are_placed",
    "instance_group.count": "service/test_warm_up.py::test_each_instance_runs_each_sample",
    "instance_group.rate_limiter": "instances: priorities",
    "instance_group.gpus": "service/test_on_gpus.py::test_models_are_placed",
    "instance_group.profile": "unit/frameworks/test_tensorrt_execute.py::test_profiles_of_an_instance",
    "instance_group.passive": "instances: a passive instance among others",
    "instance_group.host_policy": "service/test_instances.py::test_workers_run_on_the_cores_of_their_policies",
    "default_model_filename": "service/test_python_models.py::test_a_file_of_another_name",
    "metric_tags": "service/test_metrics.py::test_tags_of_a_model",
    "parameters": "python_models: argument model_config",
    "model_warmup": "service/test_warm_up.py::test_each_instance_runs_each_sample",
    "model_operations": "unit/backends/test_onnxruntime_load.py::test_a_custom_operator_library_that_cannot_be_opened",
    "model_transaction_policy.decoupled": "streams: many",
    "model_repository_agents": "unit/repository/test_agents.py::test_another_file_than_was_meant",
    "response_cache": "response_cache: asked twice",
    "model_metrics": "service/test_metrics.py::test_summaries_and_the_histogram_of_first_responses",
}

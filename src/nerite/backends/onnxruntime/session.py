"""Sessions of ONNX Runtime: the making of one, the meaning of its errors."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from types import ModuleType
from typing import Any, Final

from nerite.backends.onnxruntime import providers
from nerite.backends.onnxruntime.framework import onnxruntime
from nerite.backends.onnxruntime.plan import SessionPlan, own_entries
from nerite.core.errors import Internal, NeriteError, NotHere

_one_at_a_time = threading.Lock()

_OF_OPTIONS: Final = frozenset({2, 6})
"""INVALID_ARGUMENT and RUNTIME_EXCEPTION: not about the file."""
_MESSAGE: Final = re.compile(r"\[ONNXRuntimeError\] : (\d+) : \w+ : (.*)", re.DOTALL)


def open_session(plan: SessionPlan) -> Any:
    """Return an ``InferenceSession``. Slow: reads the model and optimises its graph; other threads run meanwhile.

    Raises ``NeriteError`` with what ONNX Runtime says of the model, or with what has to be installed.
    """
    framework = onnxruntime()
    _check_providers(plan, framework.get_available_providers())
    if plan.global_threads:
        _make_global_pool(plan.intra_op_threads, plan.inter_op_threads)
    serialised = any(provider.name in providers.ONE_AT_A_TIME for provider in plan.providers)
    try:
        with _one_at_a_time if serialised else nullcontext():
            session = framework.InferenceSession(
                str(plan.path),
                _options(plan, framework),
                providers=[(provider.name, dict(provider.options)) for provider in plan.providers],
                # Else an accelerator that does not start is replaced by the CPU, with a note on standard output.
                enable_fallback=0,
            )
    except Exception as error:  # Whatever the framework raises says why the model cannot be opened.
        raise _of_session(error, plan) from error
    _check_providers(plan, session.get_providers())
    return session


def run_options(entries: Mapping[str, str]) -> Any:
    """Return ``RunOptions`` with these configuration entries, or None if there are none."""
    if not entries:
        return None
    options = onnxruntime().RunOptions()
    for key, value in entries.items():
        options.add_run_config_entry(key, value)
    return options


def translated(error: Exception) -> NeriteError:
    """Return what a client and the log are told of an exception from ONNX Runtime."""
    if isinstance(error, NeriteError):
        return error
    found = _MESSAGE.match(str(error))
    return Internal(f"onnx runtime error {found[1]}: {found[2]}" if found else f"onnx runtime error: {error}")


def _of_session(error: Exception, plan: SessionPlan) -> NeriteError:
    """Return what is wrong with a session, with the entries that may be meant: ONNX Runtime says ``stoi`` of some."""
    found, entries = _MESSAGE.match(str(error)), own_entries(plan)
    if not entries or (found is not None and int(found[1]) not in _OF_OPTIONS):
        return translated(error)
    given = ", ".join(f"'{key}' is '{value}'" for key, value in entries.items())
    return translated(error).prefixed("", f" (ONNX Runtime's own parameters, for {plan.path}: {given})")


@cache
def _make_global_pool(intra_op_threads: int, inter_op_threads: int) -> None:
    # Must come before the first session of the process; the plans of one server agree on the sizes.
    onnxruntime().set_global_thread_pool_sizes(intra_op_threads, inter_op_threads)


def _options(plan: SessionPlan, framework: ModuleType) -> Any:
    options = framework.SessionOptions()
    options.graph_optimization_level = getattr(framework.GraphOptimizationLevel, plan.graph_level)
    mode = framework.ExecutionMode
    options.execution_mode = mode.ORT_PARALLEL if plan.parallel else mode.ORT_SEQUENTIAL
    if plan.global_threads:
        options.use_per_session_threads = False
    else:
        options.intra_op_num_threads = plan.intra_op_threads
        options.inter_op_num_threads = plan.inter_op_threads
    options.enable_cpu_mem_arena = plan.memory_arena
    options.enable_mem_pattern = plan.memory_pattern
    for key, value in plan.entries:
        options.add_session_config_entry(key, value)
    for library in plan.op_libraries:
        options.register_custom_ops_library(library)
    return options


def _check_providers(plan: SessionPlan, available: Sequence[str]) -> None:
    """Raise if a provider is missing: before, for want of a package; after, because it did not start."""
    for provider in plan.providers:
        if provider.name not in available:
            package = providers.PACKAGES[provider.name]
            raise NotHere(
                f"execution provider {provider.name} is not available, there are: {', '.join(available)}. It needs "
                f"another build of ONNX Runtime, and the libraries that this asks for: pip install {package}"
            )

"""What SageMaker and Vertex AI tell a server by its environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from nerite.cli.kinds import PORT
from nerite.cli.usage_error import BadValue, UsageError
from nerite.config.options import ServerOptions

_SAGEMAKER: Final = {
    "ping_mode": ("SAGEMAKER_TRITON_PING_MODE", ("ready", "live")),
    "inference_type": ("SAGEMAKER_TRITON_INFERENCE_TYPE", ("infer", "generate", "generate_stream")),
    "default_model": ("SAGEMAKER_TRITON_DEFAULT_MODEL_NAME", ()),
}
"""Options by their variables, with the values that those may have."""
_VERTEX: Final = {"health_route": "AIP_HEALTH_ROUTE", "predict_route": "AIP_PREDICT_ROUTE"}


def defaults(options: ServerOptions, environment: Mapping[str, str]) -> ServerOptions:
    """Return what holds where no flag says otherwise: on Vertex AI its own port replaces the usual ones."""
    if environment.get("AIP_MODE") == "PREDICTION":
        options = replace(
            options,
            vertex=replace(options.vertex, enabled=True),
            http=replace(options.http, enabled=False),
            grpc=replace(options.grpc, enabled=False),
        )
    port = environment.get("AIP_HTTP_PORT", "")
    if not port:
        return options
    try:
        return replace(options, vertex=replace(options.vertex, port=PORT.read(port)))
    except BadValue as error:
        raise UsageError(f'Bad option: "AIP_HTTP_PORT".\n{error}') from None


def told(options: ServerOptions, environment: Mapping[str, str]) -> ServerOptions:
    """Return the options with what only variables say of the ports that are switched on. Raises ``UsageError``."""
    if options.sagemaker.enabled:
        options = replace(options, sagemaker=replace(options.sagemaker, **_sagemaker(environment)))
    if options.vertex.enabled:
        options = replace(options, vertex=replace(options.vertex, **_vertex(environment)))
    return options


def _sagemaker(environment: Mapping[str, str]) -> dict[str, Any]:
    found = {}
    for field, (variable, allowed) in _SAGEMAKER.items():
        value = environment.get(variable, "")
        if value and allowed and value not in allowed:
            raise UsageError(
                f'Bad option: "{variable}".\nInvalid option value. Got {value}',
                remedy=f"It may be {', '.join(allowed[:-1])} or {allowed[-1]}.",
                usage=False,
            )
        if value:
            found[field] = value
    return found


def _vertex(environment: Mapping[str, str]) -> dict[str, Any]:
    # In the order in which Triton misses them, and with the name that it calls the first.
    for variable, called in (("AIP_PREDICT_ROUTE", "API_PREDICT_ROUTE"), ("AIP_HEALTH_ROUTE", "AIP_HEALTH_ROUTE")):
        if not environment.get(variable):
            raise UsageError(
                f"failed to start Vertex AI service: Invalid argument - {called} is not defined for Vertex AI endpoint",
                remedy=f"Set {variable} to a path. Vertex AI does; elsewhere: {variable}=/{variable[4:-6].lower()}",
                usage=False,
            )
    return {field: environment[variable] for field, variable in _VERTEX.items()}

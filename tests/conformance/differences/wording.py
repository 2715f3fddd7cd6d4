"""Texts that are worded otherwise."""

from __future__ import annotations

from conformance.differences.difference import Difference, said

FAILED = "400 load failed for model '{}': version 1 is at UNAVAILABLE state: Invalid argument:"
NOT_READY = "Error when running inference: Failed for execute the inference request. Model"
DIFFERENCES = (
    Difference(
        "BLS calls: models that are not ready",
        "Nerite adds the reason.",
        {
            **{
                f"calls/{way}{what}": (said(f"error: Model {name} - {NOT_READY}", model),) * 2
                for way, model in (("", "lab"), ("async: ", "alab"))
                for what, name in (
                    ("an unknown model", "nobody"),
                    ("a model that is not loaded", "late"),
                    ("an unknown version", "echo"),
                    ("version 0", "echo"),
                )
            },
            "calls/several of an unknown model": (said(f"error: Model nobody - {NOT_READY}"),) * 2,
        },
    ),
    Difference(
        "BLS calls: arguments of a wrong type",
        "The list of expected arguments shows defaults by their address in memory, or not at all.",
        {
            f"calls/{what}": (said("TypeError __init__(): incompatible constructor arguments."),) * 2
            for what in ("a negative timeout", "an id that is a number")
        },
    ),
    Difference(
        "Instances that could not execute, or not on the intended device",
        "Nerite adds the remedy.",
        {
            f"instances/{exchange}": (
                f"400 load failed for model '{model}': version 1 is at UNAVAILABLE state: {why}",
                f"400 load failed for model '{model}': version 1 is at UNAVAILABLE state: {why}",
            )
            for exchange, model, why in (
                ("more than there is", "large", 'Invalid argument: Resource count for "room" is limited to 1 which'),
                ("on another device", "elsewhere", 'Invalid argument: Resource count for "yard" is limited to 0 which'),
                ("what nobody has", "nowhere", 'Invalid argument: Resource count for "cellar" is limited to 0 which'),
                (
                    "global, and a device's elsewhere",
                    "everywhere",
                    'Invalid argument: Resource "room" is present as both global and device-specific resource in the',
                ),
                (
                    "global and a device's",
                    "both",
                    'Invalid argument: Resource "door" is present as both global and device-specific resource in the',
                ),
                ("cores that there are not", "nocores", "Internal: Unable to set NUMA thread affinity: Success"),
                ("a node that there is not", "nonode", "Internal: Unable to set NUMA memory policy: Invalid argument"),
            )
        },
    ),
    Difference(
        "Warm-up samples that cannot be built",
        "Nerite adds which sample it is. (A sample that the model fails may crash Triton; in Nerite it fails the "
        "load.)",
        {
            f"warm_up/{model}#1": (
                f"400 load failed for model '{model}': version 1 is at UNAVAILABLE state: {why}",
                f"400 load failed for model '{model}': version 1 is at UNAVAILABLE state: {why}",
            )
            for model, why in (
                (
                    "missingfile",
                    "Internal: failed to open text file for read <models>/missingfile/warmup/none: No such",
                ),
                (
                    "nodata",
                    "Invalid argument: [request id: <id_unknown>] warmup setting expects input 'IN' to have input",
                ),
                (
                    "noinputs",
                    "Invalid argument: [request id: <id_unknown>] expected 1 inputs but got 0 inputs for model",
                ),
                ("otherdims", "Invalid argument: [request id: <id_unknown>] unexpected shape for input 'IN' for model"),
                (
                    "othertype",
                    "Invalid argument: [request id: <id_unknown>] inference input 'IN' data-type is 'FP32', but",
                ),
                (
                    "shortfile",
                    "Invalid argument: [request id: <id_unknown>] warmup setting expects 8 bytes, but the data",
                ),
                ("variable", "Invalid argument: warmup setting expects all variable-size dimensions are specified for"),
            )
        },
    ),
    Difference(
        "A blank in the refusal of a trace count below minus one",
        "Triton has it over gRPC, and not over HTTP; Nerite has one text for both.",
        {
            "trace_settings/gRPC: a count below": (
                "INVALID_ARGUMENT Unable to parse 'trace_count'. Expecting value >= -1, got: -3",
                "INVALID_ARGUMENT Unable to parse 'trace_count'. Expecting value >= -1, got:-3",
            )
        },
    ),
    Difference(
        "An input for a model that has none",
        "Triton continues with the inputs that are missing.",
        {
            "repository_explicit/load with a bad configuration#10": (
                "400 [request id: <id_unknown>] expected 0 inputs but got 1 inputs for model 'echo'. Got input(s) "
                "['IN'], but missing required input(s) ]",
                "400 unexpected inference input 'IN' for model 'echo'",
            )
        },
    ),
    Difference(
        "An unknown backend",
        "Nerite lists the available ones, and says how to install others.",
        {
            "repository_explicit/load with a bad configuration#7": (
                "400 load failed for model 'echo': version 1 is at UNAVAILABLE state: Invalid argument: unable to find "
                "backend library for backend 'abacus', try specifying runtime on the model configuration.;",
                "400 load failed for model 'echo': version 1 is at UNAVAILABLE state: Invalid argument: unable to find "
                "backend library for backend 'abacus', try specifying runtime on the model configuration. "
                "The available backends",
            ),
            **{
                f"shared_code/load {model}": (f"{FAILED.format(model)} {text};", f"{FAILED.format(model)} {text}")
                for model, text in (
                    (
                        "nobody",
                        "unable to find backend library for backend 'abacus', try specifying runtime on the model "
                        "configuration.",
                    ),
                    (
                        "nobody_in_python",
                        "unable to find Python backend based backend library 'model.py' for model 'nobody_in_python', "
                        "searched: '<backends>/abacus/model.py'",
                    ),
                    (
                        "library",
                        "unable to find backend library 'libtriton_teller.so' for model 'library', searched: "
                        "'<models>/library/1' '<models>/library' '<backends>/teller' ",
                    ),
                )
            },
        },
    ),
    Difference(
        "A shared-memory region of zero bytes",
        "Triton shows the system's error about an empty mapping.",
        {
            "shared_memory/no bytes#2": (
                "400 failed to register shared memory region 'r': unable to process address spaceInvalid argument",
                "400 failed to register shared memory region 'r': invalid args",
            )
        },
    ),
    Difference(
        "A response to a request that is rescheduled",
        "It is allowed if it has only states, which Triton's Python models cannot return.",
    ),
    Difference(
        "Tracebacks in the errors of Python models",
        "Triton's have the frames of Python's import machinery; Nerite shows the part that belongs to the model.",
        {
            "repository_explicit/a reload that fails#1": (
                "400 load failed for model 'echo': version 1 is at UNAVAILABLE state: Internal: RuntimeError",
                "400 load failed for model 'echo': version 1 is at UNAVAILABLE state: Internal: RuntimeError",
            ),
        },
    ),
)

"""What a later release of Nerite will have."""

from __future__ import annotations

from conformance.differences.difference import Difference

CONFIGURATION_OF_ECHO = (
    '"name": "echo", "platform": "", "backend": "python", "runtime": "", "version_policy": {"latest": '
    '{"num_versions": 1}}'
)
DIFFERENCES = (
    Difference(
        "A configuration or files that come with a load",
        "Not offered yet: such a load is refused as a whole, and nothing changes. The model's files in the repository "
        "are what is loaded.",
        {
            "repository_explicit/load with a configuration": ("200", "501 load parameter 'config' is not offered"),
            "repository_explicit/load without it again#2": (
                f'200 {{{CONFIGURATION_OF_ECHO}, "max_batch_size": 3,',
                f'200 {{{CONFIGURATION_OF_ECHO}, "max_batch_size": 8,',
            ),
            "repository_explicit/load with a bad configuration": (
                "500 failed to load 'echo', failed to poll from model repository",
                "501 load parameter 'config' is not offered",
            ),
            "repository_explicit/load with files": ("200", "501 load parameter 'config' is not offered"),
            "repository_explicit/load with files and no configuration": (
                "500 failed to load 'echo', failed to poll from model repository",
                "501 load parameter 'file:1/model.py' is not offered",
            ),
            "repository_explicit/load with files that are no base64": (
                "400 load failed for model 'uploaded': version 1 is at UNAVAILABLE state",
                "501 load parameter 'config' is not offered",
            ),
            "repository_explicit/load with a file outside": (
                "500 failed to load 'uploaded', failed to poll from model repository",
                "501 load parameter 'config' is not offered",
            ),
            "repository_explicit/gRPC: load with files": ("OK", "UNIMPLEMENTED load parameter '"),
        },
    ),
    Difference(
        "Metrics of pinned memory",
        "Nerite keeps no pool of pinned memory, so that there is nothing to measure.",
        {
            "counting/metrics of the machine#2": (
                "metrics: nv_pinned_memory_pool_total_bytes, nv_pinned_memory_pool_used_bytes",
                "metrics: none",
            )
        },
    ),
)

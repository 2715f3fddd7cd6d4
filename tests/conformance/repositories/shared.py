"""A model for tensors in shared memory."""

from conformance.repositories import python

MODELS = {
    "copy": python("copy", "IN INT32 8", "OUT INT32 8"),
}

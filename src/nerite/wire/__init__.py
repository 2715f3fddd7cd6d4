"""The messages of the gRPC interface, kept apart from every other copy of them in the process.

A model may import another package's stubs of the same messages. protobuf refuses a second definition of
a name in its default pool, so ours are in a pool of their own, and no import order matters.

``grpc_service``, ``model_config`` and ``health`` are the modules to import: each has the messages and enums
of the ``.proto`` file beside it, typed. ``schema`` has the list of remote calls. The descriptors are loaded
on first use.
"""

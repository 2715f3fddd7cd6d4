"""Messages of the gRPC interface, isolated from other copies of them in the same process.

A model may import another package's stubs of the same messages. protobuf rejects a second definition of a name in its
default pool, so ours are in a private pool, and the import order does not matter.

Import ``grpc_service``, ``model_config`` or ``health``: each has the messages and enums of the ``.proto`` file of the
same name, typed. ``schema`` lists the remote calls. The descriptors are loaded lazily.
"""

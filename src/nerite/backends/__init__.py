"""The backend interface, the registry of backends, and the backends for Python and ONNX Runtime.

Nothing here imports a framework before a model needs it; a missing framework is an error that says what to install.
"""

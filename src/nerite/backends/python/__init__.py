"""Models written in Python: a ``model.py`` with a class ``TritonPythonModel``, as Triton's Python backend runs it.

``environments`` finds or creates the interpreter that a model requires, ``module`` imports its code and describes its
exceptions, ``backend`` lets it complete its configuration, ``instance`` creates an object of its class, calls it and
builds the responses. The process in which an instance runs is decided elsewhere; nothing here depends on it.

This package needs only numpy and the standard library, because it is loaded in the environments of models.
"""

from nerite.backends.python.backend import PythonBackend

__all__ = ["PythonBackend"]

"""Models written in Python: a ``model.py`` with a class ``TritonPythonModel``, as Triton's Python backend runs it.

The way of a model: ``environment`` finds the interpreter it asks for, ``module`` imports its code, ``completion`` lets
it fill in its configuration, ``instance`` makes one object of its class and calls it, ``replies`` turns what it returns
into responses, ``failure`` what it raises into text. Where an instance runs, in a process of its own or in the server,
is decided elsewhere; nothing here depends on it.

This package needs numpy and the standard library only, because it is loaded in the environments of models.
"""

from nerite.backends.python.backend import PythonBackend

__all__ = ["PythonBackend"]

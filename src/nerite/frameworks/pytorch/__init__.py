"""Models for PyTorch: TorchScript, exported and compiled programs, and modules written in Python.

The way of a model: ``artifact`` finds the file and says what it holds, ``plan`` works out from the configuration how
it is to run; no framework is needed for that. ``torchscript``, ``exported``, ``inductor`` and ``eager`` open the four
kinds and give a ``program``. ``naming`` finds out which tensor of the program a name in the configuration means,
``agreement`` compares the two. After that the instances of ``nerite.backends.arrays`` execute, with a ``run`` of the
program.

PyTorch is imported when the first model needs it, and not by importing this package.
"""

from nerite.frameworks.pytorch.backend import PyTorchBackend

__all__ = ["PyTorchBackend"]

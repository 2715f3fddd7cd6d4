"""The interface of NVIDIA's PyTriton, served by Nerite: change ``pytriton`` to ``nerite.pytriton`` in the imports.

Names and arguments are PyTriton's; what differs is listed in docs/pytriton.md. The clients need ``tritonclient``
(``pip install 'nerite[pytriton]'``), as PyTriton's do.
"""

from nerite import __version__

__all__ = ["__version__"]

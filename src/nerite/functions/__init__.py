"""Functions as models: ``@nerite.model`` and ``nerite.serve``. See docs/functions.md.

``annotations`` and ``signature`` read a function's signature, ``model_function`` has the decorator, ``execution`` runs
the function as a model of the Python backend, ``folder`` writes its model directory, and ``embedded`` and ``server``
run a server inside a program. What a worker imports needs only numpy and the standard library.
"""

"""One file for each kind of artifact: how it is recognised, what of it is needed, and what may be wrong with it.

Each has ``recognise(candidate)``: an ``Artifact``, or None for what is of another kind. It raises ``Unusable`` for what
is of its kind and cannot be served.
"""

"""Finds the configuration with which a model answers most, for ``nerite analyze``.

    cli/analyze -> analysis: search says what to measure next -> trial: a server of its own, and the bench -> finding
                      |                                                                                         |
                      +-> checkpoint keeps findings <-- ranking says which is the best within the limits <------+

What is decided (``settings``, ``space``, ``search``, ``ranking``) is plain objects without I/O. The repository is
served as it is, with a configuration that comes with the load: nothing in it is written.
"""

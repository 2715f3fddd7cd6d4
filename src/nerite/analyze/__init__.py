"""Finds the configuration with which models answer most, for ``nerite analyze``.

    cli/analyze -> analysis: search says what to measure next -> trial: a server of its own, and the bench -> finding
                      |                                                                                         |
                      +-> checkpoint keeps findings <-- ranking says which is the best within the limits <------+

What is decided (``settings``, ``space``, ``search``, ``surface``, ``ranking``) is plain objects without I/O. What is
served is a repository of links beside the user's (``staged``), with other texts of config.pbtxt: nothing in it is
written. What figures depend on beside that (``conditions``) heads the checkpoint.
"""

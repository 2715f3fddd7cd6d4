"""Trained models as people have them: what a file or a directory is, and what of it goes into a model repository.

``recognition`` asks the ``kinds`` in turn, one file each. They look at the content, not only at the name, and import no
framework. What is known and cannot be served is refused with what to make of it.
"""

"""Recognises trained models by their files, and decides what of them goes into a model repository.

``recognition`` tries the recognisers of the ``*_kinds`` modules in order. They inspect the content, not only the name,
and import no framework. A known format that cannot be served is rejected with instructions for converting it.
"""

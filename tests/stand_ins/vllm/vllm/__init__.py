"""A stand-in for vLLM: the part of its interface that our engine uses, with a model that says the alphabet.

It is as the real one (0.32) in what our engine depends on: outputs are put where the request's task would take them,
all of a step before its statistics are told; a request that is refused raises; when it dies, everybody gets the reason.
"""

"""Language models: engines that generate text, token by token, for many requests at once.

The way of a request: ``call`` reads what it asks, ``sampling`` how tokens are to be chosen; an ``engine`` takes it up
and goes on with what runs already; ``answer`` makes responses of what each step brings. Tensors and texts are those of
Triton's vLLM backend (``ports``). How each engine is driven is in a package of its own.
"""

from nerite.llm.backend import LlmBackend, TensorRtLlmBackend, VllmBackend

__all__ = ["LlmBackend", "TensorRtLlmBackend", "VllmBackend"]

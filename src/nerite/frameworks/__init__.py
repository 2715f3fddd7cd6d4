"""Frameworks beyond Python and ONNX Runtime: each a backend behind nerite.backends.interface."""

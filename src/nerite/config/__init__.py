"""Configuration as typed data: a model's ``ModelConfig`` (read, completed, validated) and the server's options.

Every mistake in a configuration file has its file, line and column, Triton's text, and the one edit that cures it.
"""

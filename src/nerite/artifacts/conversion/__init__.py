"""Programs that convert models, each run in a process of its own: ``python -m nerite.artifacts.conversion.NAME``."""

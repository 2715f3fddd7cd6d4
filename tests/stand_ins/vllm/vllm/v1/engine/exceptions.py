"""Errors of the engine."""


class EngineDeadError(Exception):
    pass

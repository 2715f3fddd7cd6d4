"""Judges a new version of a model by how its requests end: pure statistics, no I/O, no clock.

The arms are called *baseline* and *candidate*. The method is recorded in ``docs/decisions/0021-rollout-judge.md``.
"""

"""Runs what was decided: instances in threads, on the loop, or in worker processes, and the channel to those.

``worker.py``, ``messages.py``, ``arena.py`` and ``guard.py`` are also loaded by worker processes, which may run another
Python with nothing but numpy: they import ``core``, ``backends`` and the standard library only.
"""

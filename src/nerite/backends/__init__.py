"""Frameworks behind one small interface (``interface.py``). One file or folder a framework.

Nothing here imports a framework before a model needs it; a missing one is an error that says what to install.
"""

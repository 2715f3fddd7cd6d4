"""Nerite in Ray: ``nerite ray up``, and a deployment for Ray Serve. Ray itself is imported when it is used."""

from nerite.ray.serve_deployment import deployment

__all__ = ["deployment"]

"""Deployments of MLflow on a server: ``mlflow deployments create --target nerite …``. See docs/mlflow.md.

MLflow finds this package by its entry points, ``nerite`` and, for scripts that were written for Triton, ``triton``.
"""

from nerite.mlflow_plugin.deployments import NeriteDeployments
from nerite.mlflow_plugin.target import run_local, target_help

__all__ = ["NeriteDeployments", "run_local", "target_help"]

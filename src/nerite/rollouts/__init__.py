"""Rollouts of model versions: the check of baseline and candidate before the first request."""

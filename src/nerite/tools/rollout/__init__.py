"""``nerite rollout``: commands for rollouts of model versions on a running server."""

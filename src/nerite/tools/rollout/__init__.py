"""``nerite rollout``: starts, watches and steers rollouts of model versions on a running server."""

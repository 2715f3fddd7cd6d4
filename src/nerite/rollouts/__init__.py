"""Rollouts of model versions: steps, gates, decisions, and the state that outlives a restart of the server."""

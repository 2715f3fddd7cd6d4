"""Which models exist, where their files are, and the life of each version: loading, ready, draining, gone."""

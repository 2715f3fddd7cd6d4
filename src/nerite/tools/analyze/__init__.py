"""``nerite analyze``: finds the fastest configuration of models by measuring."""

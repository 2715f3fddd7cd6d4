"""``nerite analyze``: finds the configuration with which models answer most."""

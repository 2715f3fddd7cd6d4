"""``nerite up``: a whole cluster file on this machine."""

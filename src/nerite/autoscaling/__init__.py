"""How many members a pool should have: pure deciders that are given figures and the time."""

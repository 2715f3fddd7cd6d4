"""Weighted routes at run time: the table of routes, the choice of an arm for each request, and what became of it."""

"""``nerite kubernetes``: a cluster file for Kubernetes."""

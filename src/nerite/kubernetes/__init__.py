"""A client of the Kubernetes API: endpoints of services as members of pools, and numbers of replicas."""

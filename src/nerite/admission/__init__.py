"""Admission control: which requests may use a model now, by tenant, class, quota and the load of its engine."""

"""From queues to instances: which instance of a model runs which batch, and how the answers get back."""

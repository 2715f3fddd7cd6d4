"""Model repositories, the models in them, and the lifecycle of each version: loading, ready, draining, unloaded."""

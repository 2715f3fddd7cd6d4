"""A process that does nothing but send requests and note when they were answered."""

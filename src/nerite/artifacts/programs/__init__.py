"""Models in Python that are copied into repositories, beside what they serve. They import nothing of this server."""

"""Front processes: they own the connections of clients, and the core process owns models, queues and counts."""

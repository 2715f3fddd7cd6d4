"""Redis: its address, a connection, and a client that connects again."""

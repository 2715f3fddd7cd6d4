"""Tables that outlive the server, in SQLite or PostgreSQL."""

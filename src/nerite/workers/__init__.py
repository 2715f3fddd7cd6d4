"""Worker processes: models that run outside the server, and both sides of the communication with them."""

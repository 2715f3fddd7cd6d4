"""Worker processes: models that run outside the server, and everything between the two sides."""

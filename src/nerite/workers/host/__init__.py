"""The server's side of worker processes: starting, watching, asking and ending them."""

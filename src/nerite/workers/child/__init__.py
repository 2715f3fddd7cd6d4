"""The worker's side: a process that executes models, and reports to the server."""

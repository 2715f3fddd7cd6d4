"""Container images: the Dockerfile for models, and what runs in a container beside the server."""

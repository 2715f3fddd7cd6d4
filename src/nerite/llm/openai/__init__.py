"""The OpenAI API under ``/v1``, over every text model that the server has: pure parts, and what joins them to HTTP."""

"""The OpenAI API under ``/v1`` for all text models of the server: parsing, formatting and the HTTP endpoints."""

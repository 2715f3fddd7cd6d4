"""Commands that accompany the server: they edit repositories, diagnose machines, and query or load-test servers."""

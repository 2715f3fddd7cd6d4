"""Running model versions: launch from a configuration, warm-up, requests, and shutdown."""

"""Files and batches of OpenAI's API: what is stored, in which order items run, and the runner. Knows no server."""

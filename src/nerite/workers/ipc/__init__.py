"""What server and workers have in common: messages, their encoding, shared memory."""

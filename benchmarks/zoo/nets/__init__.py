"""The networks as modules of PyTorch, each in a file that can be served by itself."""

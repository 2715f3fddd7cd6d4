"""The way of a trained model into a repository: laid out aside, tried in a server, measured, and put in its place.

``addition`` does it all in turn. A server that looks at the repository meanwhile sees nothing of it before the end.
"""

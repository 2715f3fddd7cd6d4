"""``nerite add``: the way of a trained model into a repository: laid out aside, tried, measured, put in its place."""

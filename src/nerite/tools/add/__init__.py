"""``nerite add``: recognises a trained model, stages it, tries and measures it, and moves it into a repository."""

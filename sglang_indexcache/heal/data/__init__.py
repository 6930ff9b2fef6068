"""Training data that every machine with Python can rebuild: source text and retrieval tasks."""

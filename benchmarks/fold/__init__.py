"""What folding an indexer loses, beside what sharing its selection loses: see ``__main__.py``."""

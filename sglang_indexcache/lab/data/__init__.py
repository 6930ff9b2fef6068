"""A user's files as documents and tokens, for calibration of a search and for training."""

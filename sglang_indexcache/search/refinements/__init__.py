"""What improves a pattern that a method found, one a file."""

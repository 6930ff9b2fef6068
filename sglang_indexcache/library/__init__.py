"""The pattern library, the one parser of what a user writes, and how files are written."""

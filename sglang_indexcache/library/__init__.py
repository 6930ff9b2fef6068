"""The pattern library, the one parser of patterns that users write, and safe writing of files."""

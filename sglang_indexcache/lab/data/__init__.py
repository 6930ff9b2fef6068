"""A user's files as documents and tokens: what a search calibrates on and a training trains on."""

"""Needs of every run of hours: identity, resume, interruption, cost, provenance and figures."""

"""A list of selected tokens and the recent window that it lacks; the reference is ``recent.py``."""

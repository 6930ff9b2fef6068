"""IndexCache for SGLang: let most DSA layers reuse the top-k indices of an earlier layer.

Start with ``pattern.py`` (which layer reuses which), ``serving/index_buffer.py`` (the indices in
flight) and ``serving/cpu/backend.py`` (the whole method in one readable backend).
"""

__version__ = "0.1.0"

"""IndexCache for SGLang: let most DSA layers reuse the top-k indices of an earlier layer.

Start with ``pattern.py`` (which layer reuses which), ``runtime/index_buffer.py`` (the indices in
flight) and ``runtime/backend_cpu.py`` (the whole method in one readable backend).
"""

__version__ = "0.1.0"

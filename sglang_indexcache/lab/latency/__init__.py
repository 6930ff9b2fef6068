"""Gains of IndexCache: measured on your servers, or composed before you rent one.

``measure`` times SGLang servers over HTTP and writes one JSON file (``results``), from which its
``tables`` and figure are made. ``forecast`` composes a deployment's gain from rows that NVIDIA
measured on real cards.
"""

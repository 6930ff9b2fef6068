"""Gains of IndexCache: measured on your servers, or composed before you rent one.

``measure`` times SGLang servers over HTTP and leaves one JSON file (``results``), from which its
``tables`` and figure are made. ``forecast`` composes what a deployment gains from ``rows`` that
NVIDIA measured on real cards.
"""

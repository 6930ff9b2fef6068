"""What IndexCache gains: latency of real servers, a bare layer stack, and a planner.

``latency`` and ``replay`` drive running SGLang servers over HTTP; ``layer_stack`` runs the
attention path of a model's layers without a server; ``plan`` predicts from either, or from a
roofline. Each writes one JSON file (``results``), and every table and figure is made from those.
"""

"""What IndexCache gains on your node: latency and traffic of real servers, and a planner.

``latency`` and ``replay`` measure SGLang servers over HTTP; ``plan`` predicts from what they or the
layer stack (``benchmarks/stack``, whose results ``layer_stack`` describes) measured, or from a
``roofline``. A measurement leaves one JSON file (``results``), from which its ``tables`` and
``figures`` are made.
"""

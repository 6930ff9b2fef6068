"""The three operations of DSA attention, each as a readable reference and as the path that runs.

``indexer``     quantise and page the index keys, score them, select the top-k
``topk``        exact, deterministic top-k of a logits matrix
``sparse_mla``  attention over the selected latent rows

Nothing here imports SGLang. Every op has a ``reference.py`` (obvious, slow, the truth the tests
compare with) and a ``cpu.py`` (blocked and vectorised torch, what the CPU platform serves with).
"""

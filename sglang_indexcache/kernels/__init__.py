"""The operations of DSA attention; ``docs/kernels.md`` is the way in.

``indexer``     page the index keys, score them (``logits``), select the top-k (``select``), and the
                exact, deterministic top-k of given logits alone (``topk``)
``sparse_mla``  attention over the selected latent rows

``contract.py`` says what every implementation must do, ``dispatch.py`` says which can run, and
``tests/kernels/grid`` checks them all. Each folder has a ``reference.py`` (the truth that tests
compare with) and a ``cuda.py`` (Hopper).
"""

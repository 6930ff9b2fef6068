"""The operations of DSA attention; ``docs/kernels.md`` is the way in.

``indexer``     page the index keys, score them (``logits``), select the top-k (``select``)
``topk``        exact, deterministic top-k of a logits matrix
``sparse_mla``  attention over the selected latent rows

Nothing here imports SGLang. ``contract.py`` says what every implementation must do. Each folder has
a ``reference.py`` (obvious, slow, the truth the tests compare with), a ``triton.py`` (Ampere to
Blackwell), a ``cuda.py`` (Hopper), and a ``cpu.py`` (blocked and vectorised torch, what the CPU
platform serves with). ``dispatch.py`` says which one runs, ``grid/`` checks them all.
"""

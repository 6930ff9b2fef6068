"""The three operations of DSA attention; ``docs/kernels.md`` is the way in.

``indexer``     quantise and page the index keys, score them, select the top-k
``topk``        exact, deterministic top-k of a logits matrix
``sparse_mla``  attention over the selected latent rows

Nothing here imports SGLang. ``contract.py`` says what every implementation must do. Each op has a
``reference.py`` (obvious, slow, the truth the tests compare with), a ``triton.py`` (Ampere to
Blackwell), a module in ``cuda/`` (Hopper), and a ``cpu.py`` (blocked and vectorised torch, what the
CPU platform serves with). ``dispatch.py`` says which one runs, ``grid/`` checks them all.
"""

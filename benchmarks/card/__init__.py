"""The first half hour on a card: eleven checks, each a process of its own, and a verdict.

    python -m benchmarks.card.pack          where SGLang is installed: makes the archive
    benchmarks/device_check.sh              on the machine with the card

``checks.py`` is the table: what each check claims, where it is, how long it may take.
"""

"""What only a card can show: ``benchmarks/device_check.sh``, or ``pytest -m gpu``."""

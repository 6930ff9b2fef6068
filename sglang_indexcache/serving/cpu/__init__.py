"""The CPU reference platform."""

"""Commands that produce the figures under results/."""

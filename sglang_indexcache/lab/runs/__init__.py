"""Parts of every long run: identity, resuming, interruption, cost, provenance and figures."""

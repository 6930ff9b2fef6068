"""What every run of hours needs: identity, resume, interruption, cost, provenance and figures."""

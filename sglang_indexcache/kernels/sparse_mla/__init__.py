"""Sparse multi-head latent attention: attend to the selected latent rows only."""

"""A small model trained as a whole: what made tiny-dsa, and the paper's Table 3 in small."""

"""Statistics of paired, clustered comparisons: a non-inferiority test with interim analyses.

The modules are `pairs` (answers, paired by question and clustered by context), `bounds` (a
stratified mean difference and its confidence bounds) and `design` (alpha spending over planned
interim analyses, and the sample size that a margin needs).
"""

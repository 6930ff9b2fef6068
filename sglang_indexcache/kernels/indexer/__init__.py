"""The lightning indexer: score every visible key for a query and select the top-k (DSA, eq. 1)."""

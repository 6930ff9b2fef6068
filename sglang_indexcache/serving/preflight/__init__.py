"""Before a server serves: options become a plan or are refused, an adapter's weights come in."""

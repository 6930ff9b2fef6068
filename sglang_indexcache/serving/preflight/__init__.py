"""Steps before a server serves: options become a plan or a refusal, an adapter's weights load."""

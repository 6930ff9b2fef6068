"""Search for indexers that a checkpoint can lose; algorithms use an Evaluator, not an engine."""

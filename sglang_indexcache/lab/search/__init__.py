"""Find which indexers a checkpoint can lose: algorithms over an Evaluator, never over an engine."""

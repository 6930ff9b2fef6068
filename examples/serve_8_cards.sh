#!/usr/bin/env bash
# GLM-5-FP8 on one node of eight H200 or B200 with a quarter of the indexers.
set -euo pipefail
MODEL=${MODEL:-zai-org/GLM-5-FP8}

# Loads no weights; names every reason why the server would not start.
indexcache server doctor --model-path "$MODEL" --tp 8 --indexcache-pattern 1/4

sglang serve --model-path "$MODEL" --tp 8 --indexcache-pattern 1/4 --host 0.0.0.0 --port 30000
# From another shell, after one request: indexcache server show --url http://localhost:30000

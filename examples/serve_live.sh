#!/usr/bin/env bash
# Live mode: requests that name no pattern keep every indexer up to 32K tokens of prompt and a
# quarter beyond; any request may name its own.
set -euo pipefail
MODEL=${MODEL:-zai-org/GLM-5-FP8}

sglang serve --model-path "$MODEL" --tp 8 --indexcache-mode live \
    --indexcache-pattern 'full < 32K <= 1/4' --host 0.0.0.0 --port 30000
# Without a restart: indexcache server set full

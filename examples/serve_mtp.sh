#!/usr/bin/env bash
# GLM-5-FP8 with its own draft layer, which keeps its own indexer. Static mode only.
set -euo pipefail
MODEL=${MODEL:-zai-org/GLM-5-FP8}

sglang serve --model-path "$MODEL" --tp 8 --indexcache-pattern 1/4 \
    --speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1 \
    --speculative-num-draft-tokens 4 --host 0.0.0.0 --port 30000

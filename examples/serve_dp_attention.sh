#!/usr/bin/env bash
# GLM-5-FP8 on one node of eight cards, each with requests of its own in the attention.
set -euo pipefail
MODEL=${MODEL:-zai-org/GLM-5-FP8}

sglang serve --model-path "$MODEL" --tp 8 --dp 8 --enable-dp-attention --indexcache-pattern 1/4 \
    --host 0.0.0.0 --port 30000

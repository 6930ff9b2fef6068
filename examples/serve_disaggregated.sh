#!/usr/bin/env bash
# Prefill on one node, decode on another, and a router before them. Call it with prefill, decode,
# router or check. Both nodes need the plugin and the same pattern; a pair that disagrees is refused.
set -euo pipefail
MODEL=${MODEL:-zai-org/GLM-5-FP8}
PREFILL=${PREFILL:-10.0.0.1} DECODE=${DECODE:-10.0.0.2}

case ${1:-} in
    prefill)
        sglang serve --model-path "$MODEL" --tp 8 --indexcache-pattern 1/4 \
            --disaggregation-mode prefill --host "$PREFILL" --port 30000 ;;
    decode)
        sglang serve --model-path "$MODEL" --tp 8 --indexcache-pattern 1/4 \
            --disaggregation-mode decode --host "$DECODE" --port 30000 ;;
    router)
        python -m sglang_router.launch_router --pd-disaggregation \
            --prefill "http://$PREFILL:30000" --decode "http://$DECODE:30000" --port 8000 ;;
    check) # the plugin on every rank, and the same versions, model and pattern on both nodes
        indexcache server show --url "http://$PREFILL:30000" --url "http://$DECODE:30000" ;;
    *) echo "call it with prefill, decode, router or check" >&2; exit 2 ;;
esac

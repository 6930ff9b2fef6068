#!/usr/bin/env bash
# Build, check, sanitise and time the kernels on this machine's GPU, into one JSON: one command for
# a machine with an H100 or H200, torch and CUDA 13; neither SGLang nor a network is needed.
#
#   benchmarks/device_check.sh [--out FILE] [--seconds 450]     on a GPU
#   benchmarks/device_check.sh --dry                            its logic, on a CPU
#   benchmarks/device_check.sh --stack [--dry] [--out FILE] [--seconds 450]
#                               the layer stack with every set of kernels (needs pydantic too)
#
# The CUDA kernels need apache-tvm-ffi. Where it is not installed, wheels in the folder .wheels are
# unpacked for this run (pip download apache-tvm-ffi --dest .wheels, on a machine with a network).
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$(command -v python3 || command -v python)}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
if [[ -d .wheels ]] && ! "$python" -c 'import tvm_ffi' 2>/dev/null; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip install --quiet --no-index --find-links .wheels --no-deps --target "$site" \
        apache-tvm-ffi || echo "warning: .wheels holds no fitting apache-tvm-ffi" >&2
    export PYTHONPATH="$PYTHONPATH:$site"
fi
if [[ ${1:-} == --stack ]]; then
    "$python" -c 'import pydantic' || { echo "error: --stack needs pydantic" >&2; exit 2; }
    "$python" -m benchmarks.stack.check "${@:2}"
else
    "$python" -m benchmarks.kernels.device_check "$@"
fi

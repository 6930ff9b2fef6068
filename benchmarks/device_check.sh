#!/usr/bin/env bash
# Build, check, sanitise and time the kernels on this machine's GPU, into one JSON: one command for
# a machine with an H100 or H200, torch and CUDA 13; neither SGLang nor a network is needed.
#
#   benchmarks/device_check.sh [--out FILE] [--seconds 450]     on a GPU
#   benchmarks/device_check.sh --dry                            its logic, on a CPU
#   benchmarks/device_check.sh --stack [--dry] [--out FILE] [--seconds 450]
#                               the layer stack with every set of kernels: needs pydantic too, and
#                               the engine's set needs SGLang, whose top-k it is
#
# The CUDA kernels need apache-tvm-ffi. What the machine lacks and a folder .wheels has is unpacked
# for this run: apache-tvm-ffi, and any anchor (sgl-deep-gemm, sgl-flash-mla, ...). On a machine with
# a network, for the Python of the machine with the GPU:
#
#   pip download --no-deps --only-binary=:all: --python-version 3.12 --dest .wheels apache-tvm-ffi
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$(command -v python3 || command -v python)}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
shopt -s nullglob
wheels=(.wheels/*.whl)
if ((${#wheels[@]})); then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    has="import importlib.metadata as m, sys; m.version(sys.argv[1])"
    for name in $(printf '%s\n' "${wheels[@]##*/}" | sed 's/-.*//' | sort -u); do
        "$python" -c "$has" "$name" 2>/dev/null && continue
        "$python" -m pip install --quiet --no-index --find-links .wheels --no-deps --target "$site" \
            "$name" || echo "warning: .wheels holds no $name that fits this machine" >&2
    done
    export PYTHONPATH="$PYTHONPATH:$site"
fi
if [[ ${1:-} == --stack ]]; then
    "$python" -c 'import pydantic' || { echo "error: --stack needs pydantic" >&2; exit 2; }
    "$python" -m benchmarks.stack.check "${@:2}"
else
    "$python" -m benchmarks.kernels.device_check "$@"
fi

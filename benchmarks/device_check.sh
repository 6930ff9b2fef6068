#!/usr/bin/env bash
# Everything that only a GPU can show, one command for a machine with an H100 or H200, torch and
# CUDA 13: eleven checks, each for itself, and a verdict in one JSON. No network is needed.
#
#   benchmarks/device_check.sh [--only 3,5] [--out FILE] [--seconds 570]    on a GPU; called again,
#                               it adds the checks that are missing
#   benchmarks/device_check.sh --dry [--with-servers]   its logic, on a CPU
#   benchmarks/device_check.sh --stack [--dry] [--out FILE] [--seconds 450]
#                               the layer stack with every set of kernels
#
# What the machine lacks (SGLang, its kernels, apache-tvm-ffi, ...) is unpacked from card.tar.xz in
# the repository's root, or from $CARD_ARCHIVE. Make it where SGLang and a network are:
#
#   python -m benchmarks.card.pack
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$(command -v python3 || command -v python)}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
archive=${CARD_ARCHIVE:-card.tar.xz}
if [[ -e $archive ]]; then
    # Always the same folder: what is compiled at first use is kept by its sources' paths.
    site=${TMPDIR:-/tmp}/indexcache-card-$(sha256sum "$archive" | cut -c1-12)
    if [[ ! -d $site ]]; then
        rm -rf "$site.part"
        "$python" -m tarfile -e "$archive" "$site.part"
        mv "$site.part" "$site"
    fi
    export PYTHONPATH="$PYTHONPATH:$site"
fi
if [[ ${1:-} == --stack ]]; then
    "$python" -c 'import pydantic' || { echo "error: --stack needs pydantic" >&2; exit 2; }
    "$python" -m benchmarks.stack.check "${@:2}"
else
    "$python" -m benchmarks.card "$@"
fi

#!/usr/bin/env bash
# Everything that only a GPU can show, one command for a machine with an H100 or H200, torch, pytest
# and CUDA 13. No network is needed.
#
#   benchmarks/device_check.sh [--report FILE] [--seconds 570] [arguments of pytest]
#
# One JSON says what was found. Called again with the same FILE it adds the tests that are missing;
# it is also how a run that was cut off elsewhere is gone on with: hand its JSON over as FILE.
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
exec "$python" -m tests.gpu "$@"

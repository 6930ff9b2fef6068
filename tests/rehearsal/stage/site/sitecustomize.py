"""Puts every process of a server on the stage, before anything imports SGLang."""

import os
import sys

# Short `python -c ...` stay off it; what SGLang or a step of the card's phases runs does not.
_is_of_sglang = any(
    word in " ".join(sys.orig_argv) for word in ("multiprocessing.spawn", "sglang.")
)
_is_helper = sys.argv[0] == "-c" and not _is_of_sglang

if os.environ.get("INDEXCACHE_REHEARSAL") and not _is_helper:
    from tests.rehearsal.stage import raise_curtain  # noqa: F401

"""Puts every process of a server on the stage, before anything imports SGLang."""

import os
import sys

# Short `python -c ...` stay off it; SGLang's processes, which look alike, do not.
_is_helper = sys.argv[0] == "-c" and "multiprocessing.spawn" not in " ".join(sys.orig_argv)

if os.environ.get("INDEXCACHE_REHEARSAL") and not _is_helper:
    from tests.rehearsal.stage import raise_curtain  # noqa: F401

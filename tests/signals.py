"""Child processes that tests interrupt."""

from __future__ import annotations

import signal


def hears_sigint() -> None:
    """Undo an inherited SIG_IGN: a shell's background jobs, and so their children, have one."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)

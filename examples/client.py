"""Name a pattern in a request, and see which one the answer had. Needs a server in live mode.

python examples/client.py http://localhost:30000
"""

from __future__ import annotations

import sys

import httpx


def ask(url: str, pattern: str | None) -> tuple[str, str]:
    """Return the answer and the pattern under which it was computed."""
    reply = httpx.post(
        f"{url}/v1/chat/completions",
        json={
            "model": "default",
            "messages": [{"role": "user", "content": "What is a lightning indexer?"}],
            "max_tokens": 32,
            "temperature": 0,
            "custom_params": {"indexcache_pattern": pattern} if pattern else {},
            "return_meta_info": True,
        },
        timeout=600,
    )
    if reply.status_code == 400:  # a pattern that does not fit this model
        raise SystemExit(reply.text)
    reply.raise_for_status()
    choice = reply.json()["choices"][0]
    return choice["message"]["content"], choice["meta_info"]["indexcache_pattern"][0]


def main(url: str) -> None:
    """Ask without a pattern, then under two."""
    for pattern in (None, "full", "uniform:1/4"):
        answer, had = ask(url, pattern)
        print(f"asked for {pattern or 'nothing'}, answered under {had}: {answer!r}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://localhost:30000")

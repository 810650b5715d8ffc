"""The command. It starts the server of its ranks before it imports torch itself, so that both import at once."""

from __future__ import annotations

import sys

from paragrad.errors import Refused
from paragrad.world.launched import launched
from paragrad.world.signals import leaving_at_once

STARTING = ("train", "compare", "verify")       # the verbs that start ranks
ASKING = ("--help", "--dry-run")                # and what keeps them from it


def main() -> None:
    """Run the command line; exits with its code."""
    with leaving_at_once():
        if starts_ranks(sys.argv[1:]):
            from paragrad.world.launching import processes
            processes.server()
        from paragrad.verbs.cli import main as run
    run()


def starts_ranks(words: list[str]) -> bool:
    """Will this command start ranks? Not where a launcher started it as one, nor where it only asks."""
    if not words or words[0] not in STARTING or any(word in ASKING for word in words):
        return False
    try:
        return launched() is None
    except Refused:                             # the command itself will say why
        return False


if __name__ == "__main__":
    main()

"""The command. It starts the server of its ranks before it imports torch itself, so that both
import at once.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys

from paragrad.errors import Refused
from paragrad.runtime.launcher_env import detect_launch
from paragrad.runtime.stop_signals import exit_on_interrupt

RANK_COMMANDS = ("train", "compare", "verify")  # the verbs that start ranks
MODULES = {"work": "count_work"}  # commands whose module has another name
INFORMATION_OPTIONS = ("--help", "-h", "--dry-run")  # and what keeps them from it


def main() -> None:
    """Run the command line; exits with its code."""
    reopen_standard_streams()
    try:
        os.getcwd()
    except FileNotFoundError:
        print(
            "paragrad: the working directory was removed; change to one that is there",
            file=sys.stderr,
        )
        sys.exit(2)
    with exit_on_interrupt():
        if starts_ranks(sys.argv[1:]):
            from paragrad.launch import processes

            processes.get_fork_server()
        from paragrad.commands.cli import run_command_line as run

        # a verb imports what it needs: Ctrl-C amid torch would be a traceback
        if uses_torch(sys.argv[1:]):
            importlib.import_module(f"paragrad.commands.{MODULES.get(sys.argv[1], sys.argv[1])}")
    try:
        run()
    finally:
        # it ends, and closes what it began: another Ctrl-C is no news
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def reopen_standard_streams() -> None:
    """Standard streams that were closed (`>&-`) lead to nobody: a file that is opened later
    would get their number.
    """
    while (opened := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(opened, True)
    os.close(opened)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def uses_torch(words: list[str]) -> bool:
    return (
        bool(words)
        and words[0] in (*RANK_COMMANDS, "work")
        and not any(word in ("--help", "-h") for word in words)
    )


def starts_ranks(words: list[str]) -> bool:
    """Will this command start ranks? Not where a launcher started it as one, nor where it only
    asks.
    """
    if (
        not words
        or words[0] not in RANK_COMMANDS
        or any(word in INFORMATION_OPTIONS for word in words)
    ):
        return False
    try:
        return detect_launch() is None
    except Refused:  # the command itself will say why
        return False


if __name__ == "__main__":
    main()

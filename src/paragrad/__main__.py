"""The paragrad command.

It starts the server process of its ranks before it imports torch, so that both import torch at the
same time.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from contextlib import nullcontext

from paragrad.errors import Refused
from paragrad.runtime.launcher_env import detect_launch
from paragrad.runtime.stop_signals import exit_on_interrupt, exit_stopped, handle_stop_signals

RANK_COMMANDS = ("train", "compare", "verify")  # commands that start ranks
MODULES = {"work": "count_work"}  # commands with a module of another name
INFORMATION_OPTIONS = ("--help", "-h", "--dry-run")  # options with which no rank starts


def main() -> None:
    """Run the command line, and exit with its code."""
    reopen_standard_streams()
    try:
        os.getcwd()
    except FileNotFoundError:
        print(
            "paragrad: the working directory was removed; change to one that is there",
            file=sys.stderr,
        )
        sys.exit(2)
    # SIGTERM ends a rank of another launcher at once, also where it waits in C++
    with nullcontext() if is_launched() else handle_stop_signals(exit_stopped):
        with exit_on_interrupt():
            if starts_ranks(sys.argv[1:]):
                from paragrad.launch import processes

                processes.get_fork_server()
            from paragrad.commands.cli import run_command_line as run

            # import what the command needs here, because Ctrl-C while torch is imported would
            # print a traceback
            if uses_torch(sys.argv[1:]):
                name = MODULES.get(sys.argv[1], sys.argv[1])
                importlib.import_module(f"paragrad.commands.{name}")
        try:
            run()
        finally:
            # the command is ending and closes its resources: ignore further signals
            kinds = [signal.SIGINT, *(() if is_launched() else (signal.SIGTERM, signal.SIGHUP))]
            for kind in kinds:
                signal.signal(kind, signal.SIG_IGN)


def is_launched() -> bool:
    """Tell whether another launcher, such as torchrun, started this process as a rank."""
    try:
        return detect_launch() is not None
    except Refused:  # the command itself reports the reason
        return False


def reopen_standard_streams() -> None:
    """Open standard streams that were closed (`>&-`) on /dev/null.

    Otherwise a file that is opened later would get their descriptors.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def uses_torch(words: list[str]) -> bool:
    """Tell whether a command needs torch.

    Args:
        words: The arguments of the command line.

    Returns:
        Whether it does.
    """
    return (
        bool(words)
        and words[0] in (*RANK_COMMANDS, "work")
        and not any(word in ("--help", "-h") for word in words)
    )


def starts_ranks(words: list[str]) -> bool:
    """Tell whether a command will start ranks.

    It does not if a launcher started this process as a rank, or if it only prints information.

    Args:
        words: The arguments of the command line.

    Returns:
        Whether it will.
    """
    if (
        not words
        or words[0] not in RANK_COMMANDS
        or any(word in INFORMATION_OPTIONS for word in words)
    ):
        return False
    try:
        return detect_launch() is None
    except Refused:  # the command itself reports the reason
        return False


if __name__ == "__main__":
    main()

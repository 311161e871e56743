"""The `flashqla-cp` command: picks a subcommand and loads only that one's module.

A subcommand is a module of this folder with `add_arguments(parser)` and `run(args) -> int` (the exit code).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from flashqla_cp import __version__

SUBCOMMANDS = {
    "doctor": "show versions, devices, compiler and communication, and which backend would run and why",
    "verify": "run one step in parallel and compare it with one rank and with the fp64 per-token oracle",
    "warm-up": "compile the kernels of a model ahead of time, with or without a GPU",
    "bench": "time the op beside its peers and beside what the device allows",
    "train": "train a small byte-level language model with its sequence sharded over ranks",
}


def build_parser(name: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of all subcommands; only the one called `name` gets its options, so only it is imported."""
    parser = argparse.ArgumentParser(prog="flashqla-cp", description="Context-parallel Gated Delta Rule layers.")
    parser.add_argument("--version", action="version", version=f"flashqla-cp {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command, text in SUBCOMMANDS.items():
        subparser = commands.add_parser(command, help=text, description=text[0].upper() + text[1:] + ".")
        if command == name:
            _module(command).add_arguments(subparser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run `flashqla-cp` with `argv` (default: the process's arguments) and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # The main parser has no options that take a value, so the first word is the subcommand.
    name = next((word for word in arguments if not word.startswith("-")), None)
    args = build_parser(name).parse_args(arguments)
    return int(_module(args.command).run(args))


def _module(command: str) -> ModuleType:
    return import_module(f"flashqla_cp.cli.{command.replace('-', '_')}")


if __name__ == "__main__":
    raise SystemExit(main())

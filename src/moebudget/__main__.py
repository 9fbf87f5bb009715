"""Entry point of `python -m moebudget`, the command line."""

from __future__ import annotations

from moebudget.cli import main

if __name__ == "__main__":
    main()

"""Runs the command `nanoserve` as `python -m nanoserve`."""

from nanoserve.cli import main

if __name__ == "__main__":
    main()

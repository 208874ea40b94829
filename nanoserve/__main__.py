"""`python -m nanoserve` is the command `nanoserve`."""

from nanoserve.cli import main

if __name__ == "__main__":
    main()

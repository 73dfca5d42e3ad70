"""``python -m gemmtune``: the same as the ``gemmtune`` command."""

from .cli import main

if __name__ == "__main__":
    main()

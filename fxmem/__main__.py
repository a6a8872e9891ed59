"""``python -m fxmem``."""

from fxmem.cli import run

if __name__ == "__main__":
    run()

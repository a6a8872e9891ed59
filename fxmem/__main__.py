"""``python -m fxmem``."""

from fxmem.cli import main

if __name__ == "__main__":
    main(prog_name="fxmem")

"""`python -m sgl_ext` is the command `sgl-ext`."""

from sgl_ext.cli.app import main

if __name__ == "__main__":
    main()

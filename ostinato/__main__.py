"""`python -m ostinato ...` is the command `run ...`."""

from ostinato.api.cli.main import main

if __name__ == "__main__":
    main()

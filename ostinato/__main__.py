"""`python -m ostinato ...` is the command `run ...`."""

from ostinato.commands import main

if __name__ == "__main__":
    main()

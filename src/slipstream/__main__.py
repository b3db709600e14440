"""``python -m slipstream``: the command line, also where its script is not on the path."""

from slipstream.cli.main import main

if __name__ == "__main__":
    main()

"""Run the command line as ``python -m anynan``."""

import sys

from anynan._cli.commands import main

if __name__ == "__main__":
    sys.exit(main())

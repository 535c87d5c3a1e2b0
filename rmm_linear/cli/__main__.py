"""`python -m rmm_linear.cli`."""

import sys

from rmm_linear.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m kvheadroom`."""

import sys

try:
    from kvheadroom.cli import main

    sys.exit(main())
except KeyboardInterrupt:
    # Before the first line of a command has run.
    sys.exit(130)

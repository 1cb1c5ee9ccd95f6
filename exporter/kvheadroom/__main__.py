"""`python -m kvheadroom`."""

import sys

try:
    from kvheadroom.cli import main

    sys.exit(main())
except KeyboardInterrupt:
    # Before the first line of `main`, or after its last.
    sys.exit(130)

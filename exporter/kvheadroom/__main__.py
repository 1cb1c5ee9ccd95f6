"""`python -m kvheadroom` is the `kvheadroom` command."""

from kvheadroom.cli import main

raise SystemExit(main())

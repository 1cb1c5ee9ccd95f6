"""The pure core: values in, values out. No I/O, clock, log, thread or global state.

Read `assessment` first: it is the table of contents of this package.
"""

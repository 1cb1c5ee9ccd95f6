"""Servers that come and go: the sources that find them, and the list of those that are watched."""

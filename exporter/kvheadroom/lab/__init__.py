"""Recordings and what is done with them. Uses the same core and sources as the daemon."""

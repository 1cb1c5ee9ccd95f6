"""Assessments -> text. No arithmetic, no I/O but the server's own."""

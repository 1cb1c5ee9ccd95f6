"""The operator's errors: the one kind that ends a command with a message and exit code 2."""


class OperatorError(Exception):
    """The operator's mistake, in words that name the place and what is allowed there."""

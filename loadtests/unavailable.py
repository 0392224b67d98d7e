"""What keeps somebody out of a comparison."""


class SystemUnavailable(Exception):
    """A contestant cannot take part; says why, and what to do about it."""

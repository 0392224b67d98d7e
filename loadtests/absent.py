"""What keeps somebody out of a comparison."""


class Absent(Exception):
    """A contestant cannot take part; says why, and what to do about it."""

"""Exception for systems that cannot take part in a comparison."""


class SystemUnavailable(Exception):
    """A contestant cannot take part; the message gives the reason and a remedy."""

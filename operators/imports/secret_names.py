"""Which values are secrets, by what they are called. They are repeated nowhere: in no object, and in no note."""

import re

_SECRET = re.compile(r"SECRET|PASSWORD|PASSWD|PASSPHRASE|(API|PRIVATE)[-_]?KEY|CREDENTIAL|TOKEN\Z", re.IGNORECASE)
_TOKEN = re.compile(r"TOKEN(?!IZ)", re.IGNORECASE)
_AMOUNT = re.compile(r"[0-9.]+|true|false", re.IGNORECASE)


def is_secret(name: str, value: str) -> bool:
    """Whether nobody is to see it.

    Args:
        name: Of an environment variable, or of a flag without its dashes. Tokens may be those of a model: an amount of them
            (``max-num-batched-tokens``) is none, nor is what is said of a tokenizer.
        value: As it is written out; empty: it is not.
    """
    if not value:
        return False
    return bool(_SECRET.search(name) or (_TOKEN.search(name) and not _AMOUNT.fullmatch(value)))

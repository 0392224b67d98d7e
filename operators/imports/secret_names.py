"""Secret names: which values are secrets, judged by their names. No object and no note repeats them."""

import re

_SECRET = re.compile(r"SECRET|PASSWORD|PASSWD|PASSPHRASE|(API|PRIVATE)[-_]?KEY|CREDENTIAL|TOKEN\Z", re.IGNORECASE)
_TOKEN = re.compile(r"TOKEN(?!IZ)", re.IGNORECASE)
_AMOUNT = re.compile(r"[0-9.]+|true|false", re.IGNORECASE)


def is_secret(name: str, value: str) -> bool:
    """Return whether a value must not be shown.

    Args:
        name: Name of an environment variable, or of a flag without its dashes. Tokens may also be those of a model: a
            number of them (``max-num-batched-tokens``) is no secret, nor is a setting of a tokenizer.
        value: The literal value; empty: there is none.
    """
    if not value:
        return False
    return bool(_SECRET.search(name) or (_TOKEN.search(name) and not _AMOUNT.fullmatch(value)))

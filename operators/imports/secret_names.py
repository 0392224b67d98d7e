"""Secret names: decides by the name and the value of a variable or flag whether the value is a secret.

Imports never copy secrets into objects or notes.
"""

import re

_SECRET = re.compile(r"SECRET|PASSWORD|PASSWD|PASSPHRASE|(API|PRIVATE)[-_]?KEY|CREDENTIAL|TOKEN\Z", re.IGNORECASE)
_TOKEN = re.compile(r"TOKEN(?!IZ)", re.IGNORECASE)
_AMOUNT = re.compile(r"[0-9.]+|true|false", re.IGNORECASE)


def is_secret(name: str, value: str) -> bool:
    """Return whether a value is probably a secret, which must not be shown. An empty value is not a secret.

    Args:
        name: Name of an environment variable, or of a flag without its dashes. A name that ends with `token` belongs to a
            secret. Elsewhere in a name, `token` belongs to a secret only if it does not begin a word like `tokenizer`, and
            if the value is neither a number nor a truth value: ``max-num-batched-tokens`` is a number of tokens.
        value: The literal value, or an empty text if the document does not contain the value.
    """
    if not value:
        return False
    return bool(_SECRET.search(name) or (_TOKEN.search(name) and not _AMOUNT.fullmatch(value)))

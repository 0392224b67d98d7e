"""Hub settings: parse names of repositories on the Hugging Face Hub, and define how models are downloaded.

Rules:

1. The settings name a model by a folder or by a repository. A repository is ``owner/name``, optionally followed by
   ``@revision`` (a branch, a tag or a commit). Without a revision, the newest commit of the branch ``main`` is used. If
   a folder with this name exists on the machine, the name means the folder.
2. Only a full commit id always means the same files. A branch may get new commits between the starts of two processes.
"""

import re
from typing import Annotated

from msgspec import Meta, Struct

from kvstore.net.addresses import refuse_plain_key

HUB_URL = "https://huggingface.co"
DEFAULT_REVISION = "main"

_REPOSITORY = re.compile(
    r"([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@([A-Za-z0-9][\w./-]{0,127}))?", re.ASCII
)
_COMMIT = re.compile(r"[0-9a-f]{40}")


class Repository(Struct, frozen=True):
    """Names a model repository on the hub, and a revision of it."""

    name: str
    """The name in the form ``owner/name``."""

    revision: str = DEFAULT_REVISION

    @property
    def is_pinned(self) -> bool:
        """True if the revision is a full commit id, which always means the same files."""
        return _COMMIT.fullmatch(self.revision) is not None


def parse_repository(named: str) -> Repository | None:
    """Parse ``owner/name`` or ``owner/name@revision``; return None for other forms.

    A relative path such as ``a/b`` has the first form too.
    """
    found = _REPOSITORY.fullmatch(named)
    return None if found is None else Repository(found[1], found[2] or DEFAULT_REVISION)


class HubSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Download settings for models that are named by a repository. They do not affect models in folders."""

    cache: str = ""
    """Folder for downloaded models, in the layout of the hub's own tools; any number of processes may share it. Empty:
    ``fleet/hub`` in the user's cache folder (`fleet.config.default_cache_dir`).
    """

    endpoint: Annotated[str, Meta(pattern=r"^https?://[^/\s?#@]+(/[^\s?#@]*)?$")] = HUB_URL
    """URL of the hub or of a mirror."""

    token_file: str = ""
    """File with an access token for the repositories; it is read at every download, so it may change. Empty: no token
    is sent.
    """

    patience_seconds: Annotated[float, Meta(gt=0, le=86_400)] = 600
    """Time for which the hub may be unreachable or send nothing before the process gives up the download. Until then the
    process retries."""

    insecure: bool = False
    """Allows the token of `token_file` to be sent unencrypted (over http) to another host. Set it only on a network that
    nobody else can read."""

    def __post_init__(self) -> None:
        if self.token_file and not self.insecure:
            refuse_plain_key("endpoint", self.endpoint, "token_file", "insecure")

"""Models that are named by their repository on the Hugging Face Hub, and where they are fetched from: values and settings.

Rules:

1. A model is named by a folder, or by a repository: ``owner/name``, with ``@revision`` (a branch, a tag, a commit) after it if it is not
   to be the newest. What is a folder where the process runs is a folder.
2. Only a whole commit stands for the same files for ever. A branch may have moved when the next process asks.
"""

import re
from typing import Annotated

from msgspec import Meta, Struct

HUB_URL = "https://huggingface.co"
DEFAULT_REVISION = "main"

_REPOSITORY = re.compile(
    r"([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@([A-Za-z0-9][\w./-]{0,127}))?", re.ASCII
)
_COMMIT = re.compile(r"[0-9a-f]{40}")


class Repository(Struct, frozen=True):
    """A model on the hub."""

    name: str
    """owner/name"""

    revision: str = DEFAULT_REVISION

    @property
    def is_pinned(self) -> bool:
        """Whether it is one commit, and can never be another."""
        return _COMMIT.fullmatch(self.revision) is not None


def parse_repository(named: str) -> Repository | None:
    """What a model is named by, if it has the form of a repository's name; relative paths of one folder in another do as well."""
    found = _REPOSITORY.fullmatch(named)
    return None if found is None else Repository(found[1], found[2] or DEFAULT_REVISION)


class HubSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where models come from that are named by a repository. Nothing of it counts for folders."""

    cache: str = ""
    """Folder that keeps what was fetched, laid out as the hub's own tools do; any number of processes may share it. Empty: one in the
    user's cache folder."""

    endpoint: Annotated[str, Meta(pattern=r"^https?://[^/\s?#@]+(/[^\s?#@]*)?$")] = HUB_URL
    """The hub, or a mirror of it."""

    token_file: str = ""
    """File with a token that may read the repositories; read when something is fetched, so that it may change. Empty: none is sent."""

    patience_seconds: Annotated[float, Meta(gt=0, le=86_400)] = 600
    """How long the hub may be out of reach, or send nothing more, before the process gives up. Until then it is asked again."""

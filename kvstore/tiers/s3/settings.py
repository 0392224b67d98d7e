"""Where blocks are kept in an object store."""

from typing import Annotated, Literal
from urllib.parse import urlsplit

from msgspec import Meta

from kvstore.tiers.settings import TierSettings


class S3Settings(TierSettings, frozen=True, kw_only=True, tag="s3"):
    """Where to keep blocks. Credentials come from the places where the AWS tools look for them."""

    bucket: Annotated[str, Meta(min_length=3, max_length=255)]
    """Must exist. The credentials need s3:ListBucket on it, and GetObject, PutObject and DeleteObject in it."""

    prefix: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*$", max_length=128)] = "fleet"
    """What all object keys begin with, so that several deployments can share a bucket."""

    endpoint_url: str = ""
    """``http(s)://host[:port]`` of a store other than Amazon's. Empty: Amazon's, of the region."""

    region: str = ""
    """Empty: what the credentials' profile says."""

    profile: str = ""
    """Of the AWS configuration files. Empty: the default one."""

    addressing: Literal["auto", "path", "virtual"] = "auto"
    """Where the bucket's name stands in URLs. Many other stores want "path"."""

    ca_file: str = ""
    """Certificates to trust, PEM. Empty: the usual ones."""

    parallel: Annotated[int, Meta(ge=1, le=256)] = 16
    """Requests at a time. One gets about 50 to 100 MB/s from Amazon's store; 16 fill a 10 Gbit/s link."""

    start_seconds: Annotated[float, Meta(gt=0, le=60)] = 5.0
    """For the look at the bucket at the start. A store that does not answer by then is used once it does."""

    known_seconds: Annotated[float, Meta(ge=0, le=86400)] = 60.0
    """For how long a block that was seen counts as there. Objects go rarely, and a wrong guess costs one fetch."""

    missing_seconds: Annotated[float, Meta(ge=0, le=3600)] = 1.0
    """For how long a block that was missing counts as missing. Short, because others write."""

    def __post_init__(self) -> None:
        if not self.endpoint_url:
            return
        try:
            url = urlsplit(self.endpoint_url)
            has_place = bool(url.hostname) and url.port != 0
        except ValueError as error:
            raise ValueError("endpoint_url: its port is not a number, or its brackets do not match") from error
        if url.scheme not in ("http", "https") or not has_place:
            raise ValueError("endpoint_url: must be http://host[:port] or https://…")
        if "@" in url.netloc:
            raise ValueError("endpoint_url: must hold no credentials")

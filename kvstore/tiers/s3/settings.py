"""Settings of the S3 tier."""

from typing import Annotated, Literal
from urllib.parse import urlsplit

from msgspec import Meta

from kvstore.tiers.settings import TierSettings


class S3Settings(TierSettings, frozen=True, kw_only=True, tag="s3"):
    """Settings of a tier in an object store. Credentials come from the same places as for the AWS tools."""

    bucket: Annotated[str, Meta(min_length=3, max_length=255)]
    """An existing bucket. The credentials need s3:ListBucket on it, and GetObject, PutObject and DeleteObject in it."""

    prefix: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*$", max_length=128)] = "fleet"
    """Prefix of all object keys, so that several deployments can share a bucket."""

    endpoint_url: str = ""
    """``http(s)://host[:port]`` of an object store other than Amazon S3. Empty: Amazon S3 in the region."""

    region: str = ""
    """Region of the bucket. Empty: the region of the profile."""

    profile: str = ""
    """Profile in the AWS configuration files. Empty: the default profile."""

    addressing: Literal["auto", "path", "virtual"] = "auto"
    """Position of the bucket's name in URLs: in the path ("path") or in the host name ("virtual"). With "auto", boto3
    decides. Many object stores other than Amazon S3 need "path".
    """

    ca_file: str = ""
    """PEM file with the certificates to trust. Empty: the system's certificates."""

    parallel: Annotated[int, Meta(ge=1, le=256)] = 16
    """Maximum number of requests at a time; further ones wait. One request gets about 50 to 100 MB/s from Amazon S3; 16
    requests fill a link of 10 Gbit/s."""

    start_seconds: Annotated[float, Meta(gt=0, le=60)] = 5.0
    """Time limit for the check of the bucket at the start. An object store that answers later is used from then on."""

    known_seconds: Annotated[float, Meta(ge=0, le=86400)] = 60.0
    """Time for which a block counts as stored after its object was seen. Objects rarely vanish; if one has vanished, a
    read of its block is a miss."""

    missing_seconds: Annotated[float, Meta(ge=0, le=3600)] = 1.0
    """Time for which a block counts as missing after its object was not found. It is short, because other nodes may
    write the block meanwhile.
    """

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

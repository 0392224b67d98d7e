"""Fields that several kinds share: bounded values, the model, conditions."""

from enum import StrEnum
from typing import Annotated, Any

from msgspec import Meta, Struct


class Resource(Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Base of all API types. Field names are spelled as in Kubernetes: the field `gpu_budget` is `gpuBudget` in YAML."""


def keyed_by(field: str) -> dict[str, Any]:
    """Return the schema of a list whose entries have different values of `field`.

    With this schema, the server-side apply of one writer owns single entries of the list, and not the whole list.
    """
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [field]}


def rules(*given: tuple[str, str] | tuple[str, str, str], **schema: Any) -> Meta:
    """Return the metadata of a type with CEL rules and, if given, further parts of its JSON schema.

    Each rule is given as (rule, message) or as (rule, message, expression of the message).
    """
    names = ("rule", "message", "messageExpression")
    validations = [dict(zip(names, each, strict=False)) for each in given]
    return Meta(extra_json_schema={"x-kubernetes-validations": validations, **schema})


UNCHANGED = ("self == oldSelf", "cannot be changed; delete the object and make another one")

Name = Annotated[str, Meta(pattern=r"^[a-z]([-a-z0-9]{0,28}[a-z0-9])?$", max_length=30)]
"""Type of the names of roles. Names of pods contain the name of the deployment and that of a role, so both are limited: this one to 30
characters, and both together by `operators.api.disagg_deployment.OBJECT_RULES`."""

NAME_RULE = "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')"
"""CEL rule for the name of an object: it is a DNS label that begins with a letter, because Services need such names."""

PROPOSED_NAME = "(self.metadata.name.matches('^[a-z]') ? '' : 'm-') + self.metadata.name.replace('.', '-')"
"""CEL expression for a name that is similar to the object's name, and that `NAME_RULE` allows."""

Text = Annotated[str, Meta(max_length=512)]
Count = Annotated[int, Meta(ge=0, le=10_000)]
Degree = Annotated[int, Meta(ge=1, le=1024)]
Seconds = Annotated[int, Meta(ge=1, le=86_400)]
Milliseconds = Annotated[int, Meta(ge=1, le=600_000)]

OpenObject = Annotated[dict[str, Any], Meta(extra_json_schema={"x-kubernetes-preserve-unknown-fields": True})]


class GpuVendor(StrEnum):
    NVIDIA = "nvidia.com/gpu"
    AMD = "amd.com/gpu"


class ModelSource(Resource, frozen=True):
    """A model, and where its weights come from."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    """The model's name in requests."""

    uri: Text = ""
    """A repository of the Hugging Face Hub, which every pod fetches before it serves. It is written owner/name, or
    owner/name@revision for another revision than the newest. The value may also be a folder in the image or, if `claim`
    is set, a folder in the claimed volume. Empty: the value of `name` is used."""

    claim: Annotated[str, Meta(max_length=253)] = ""
    """A PersistentVolumeClaim with the weights, mounted read-only at /models. If it is set, nothing is fetched from the
    hub. Empty: there is no claim."""

    cache_claim: Annotated[str, Meta(max_length=253)] = ""
    """A PersistentVolumeClaim in which fetched models are kept for all pods. The pods write to it, so it must be
    ReadWriteMany if they are on several nodes. Empty: each pod fetches the model for itself, and keeps it on the
    disk of its node until the pod ends."""

    token_secret: Annotated[str, Meta(max_length=253)] = ""
    """A Secret whose key `token` holds the access token of the repository. Pods read the token from a mounted file.
    Empty: the repository needs no token."""

    endpoint: Annotated[str, Meta(max_length=512, pattern=r"^(https?://[^/ ?#@]+(/[^ ?#@]*)?)?$")] = ""
    """The mirror of the hub from which the repository is fetched. Empty: https://huggingface.co."""

    insecure: bool = False
    """Allows the token to be sent unencrypted to an `endpoint` with http. Set it only on a network that nobody else can
    read."""


MODEL_RULES = rules(
    (
        "self.claim == '' || self.cacheClaim == ''",
        "cacheClaim: keeps what is fetched, and with claim nothing is",
    ),
    (
        "self.tokenSecret == '' || self.insecure || !self.endpoint.startsWith('http:')",
        "endpoint: the token of tokenSecret would cross the network in the clear: use https, or set insecure",
    ),
)


class NodeTopology(Resource, frozen=True):
    """Nodes that fit a replica: their domain, and their network devices."""

    domain: Annotated[str, Meta(max_length=317)] = ""
    """Name of a node label. All nodes of one replica have the same value of this label: `nvidia.com/gpu.clique` keeps a
    replica in one NVLink domain. Empty: a replica may use any nodes."""

    rdma: Annotated[str, Meta(max_length=253)] = ""
    """An extended resource for network devices, such as `rdma/hca`. Each pod requests as many devices as GPUs. Empty: no
    devices are requested."""


class Condition(Resource, frozen=True):
    """One observation about an object, with its reason."""

    type: Annotated[str, Meta(max_length=316)]
    """The subject of the condition, such as `Ready`. `kubectl wait --for=condition=Ready` waits for it."""

    status: Annotated[str, Meta(pattern="^(True|False|Unknown)$", max_length=7)]
    """True, False, or Unknown."""

    reason: Annotated[str, Meta(max_length=1024)]
    """Reason of the status, as one word for programs."""

    message: Annotated[str, Meta(max_length=32_768)] = ""
    """Reason of the status, as a text for people."""

    observed_generation: int = 0
    """The `metadata.generation` of the specification that the condition is about."""

    last_transition_time: Annotated[str, Meta(extra_json_schema={"format": "date-time"}, max_length=40)] = ""
    """The time at which `status` last changed."""


Conditions = Annotated[
    tuple[Condition, ...],
    Meta(max_length=16, extra_json_schema=keyed_by("type")),
]


class ServingObjective(Resource, frozen=True):
    """Latency goals of a model's requests."""

    ttft_ms: Milliseconds = 2000
    """Maximum time to first token, in milliseconds."""

    tpot_ms: Milliseconds = 50
    """Maximum of the mean time per output token of a request, after the first token, in milliseconds."""

    percentile: Annotated[int, Meta(ge=50, le=99)] = 90
    """Percentage of the requests that must keep both limits, `ttft_ms` and `tpot_ms`."""

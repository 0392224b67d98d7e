"""`ServingRequest`: what has to be kept, from which a deployment is made."""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, field

from operators.api.fields import (
    MODEL_RULES,
    Conditions,
    ModelSource,
    NodeTopology,
    OpenObject,
    Resource,
    ServingObjective,
    Text,
    keyed_by,
    rules,
)


class Hardware(Resource, frozen=True):
    gpu: Annotated[str, Meta(min_length=1, max_length=63)]
    """As `fleet hardware list` calls it."""

    count: Annotated[int, Meta(ge=1, le=100_000)]
    """That may be used: the budget, of a rollout too."""

    per_node: Annotated[int, Meta(ge=1, le=72)] = 8
    """Engines lie within a node."""

    product: Annotated[str, Meta(max_length=63)] = ""
    """As the node's label `nvidia.com/gpu.product` or `amd.com/gpu.product-name` says; empty: any GPU of the vendor."""


_WORKLOAD = rules(
    (
        "(self.requestsPerMinute > 0) != (self.concurrency > 0)",
        "one of requestsPerMinute and concurrency must be above 0",
    )
)


class Workload(Resource, frozen=True):
    prompt_tokens: Annotated[int, Meta(ge=1, le=10_000_000)]
    """Of a request, on average."""

    answer_tokens: Annotated[int, Meta(ge=1, le=1_000_000)]
    cached_percent: Annotated[int, Meta(ge=0, le=99)] = 0
    """Of prompt tokens that a worker has already, since prompts begin alike."""

    requests_per_minute: Annotated[int, Meta(ge=0, le=100_000_000)] = 0
    """That come by chance, whatever becomes of those before them."""

    concurrency: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """Clients, each of which waits for its answer and asks again."""


REQUEST_RULES = rules(
    (
        "self.metadata.name.size() <= 47 && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        "metadata.name: the deployment and its Services are called after it: 47 letters, digits and dashes at most, first a letter",
    ),
)


class ServingRequestSpec(Resource, frozen=True):
    model: Annotated[ModelSource, MODEL_RULES]
    hardware: Hardware
    workload: Annotated[Workload, _WORKLOAD]
    objective: ServingObjective = ServingObjective()
    model_config: OpenObject = field(default_factory=dict)
    """Content of the model's config.json, where its repository is not one that is known."""

    image: Text = ""
    """Of the workers; empty: what the chart was installed with for the vendor."""

    topology: NodeTopology = NodeTopology()
    """Of all workers."""

    pod_template: OpenObject = field(default_factory=dict)
    """Of all workers, as in a DisaggDeployment."""

    apply: bool = False
    """Make the DisaggDeployment as well, not only the proposal of it in the status. False again: it stays as it is."""


class GoalName(StrEnum):
    TTFT = "ttftMs"
    TPOT = "tpotMs"
    GPUS = "gpus"
    GPUS_PER_NODE = "gpusPerNode"
    CONTEXT = "contextTokens"
    RATE = "requestsPerMinute"
    CONCURRENCY = "concurrency"


class ProposalFigure(Resource, frozen=True):
    """Of a proposal, or of the best that there is."""

    goal: GoalName
    asked: int
    """That it may be at most; of requestsPerMinute and concurrency at least."""

    predicted: int
    """Times at the objective's percentile, rounded up; of requestsPerMinute and concurrency the most that these GPUs would do for."""

    error_percent: int = 0
    """Median of such predictions; half of them err by more."""

    met: bool = False


class ServingRequestStatus(Resource, frozen=True):
    observed_generation: int = 0
    phase: Annotated[str, Meta(max_length=32)] = ""
    """Proposed, Deploying, Ready, or Infeasible."""

    deployment: Annotated[str, Meta(max_length=253)] = ""
    """That was made for it."""

    figures: Annotated[
        tuple[ProposalFigure, ...],
        Meta(max_length=8, extra_json_schema=keyed_by("goal")),
    ] = ()
    basis: Text = ""
    """What the predictions rest on."""

    proposal: OpenObject = field(default_factory=dict)
    """A DisaggDeployment, as `kubectl apply` takes it."""

    conditions: Conditions = ()

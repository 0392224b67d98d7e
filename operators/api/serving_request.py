"""ServingRequest: a model, a workload and goals from which a deployment is made."""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, field

from operators.api.fields import (
    MODEL_RULES,
    NAME_RULE,
    PROPOSED_NAME,
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
    """Type and maximum number of the GPUs that the deployment may use."""

    gpu: Annotated[str, Meta(min_length=1, max_length=63)]
    """The GPU type, by its name in `fleet hardware list`."""

    count: Annotated[int, Meta(ge=1, le=100_000)]
    """Maximum number of GPUs that the deployment may use at any time, also during a rollout."""

    per_node: Annotated[int, Meta(ge=1, le=72)] = 8
    """Number of GPUs in a node. The proposal never spreads an engine over several nodes, so an engine has at most this
    number."""

    product: Annotated[str, Meta(max_length=63)] = ""
    """The value of the node's label `nvidia.com/gpu.product` or `amd.com/gpu.product-name`; empty: any GPU of the vendor.
    """


_WORKLOAD = rules(
    (
        "(self.requestsPerMinute > 0) != (self.concurrency > 0)",
        "one of requestsPerMinute and concurrency must be above 0",
    )
)


class Workload(Resource, frozen=True):
    """The requests that are expected."""

    prompt_tokens: Annotated[int, Meta(ge=1, le=10_000_000)]
    """Prompt tokens of a request, on average."""

    answer_tokens: Annotated[int, Meta(ge=1, le=1_000_000)]
    """Output tokens of a request, on average."""

    cached_percent: Annotated[int, Meta(ge=0, le=99)] = 0
    """Percentage of the prompt tokens that a worker has cached already, because many prompts have the same beginning."""

    requests_per_minute: Annotated[int, Meta(ge=0, le=100_000_000)] = 0
    """Mean number of requests per minute. They arrive at random, independent of earlier answers. 0: `concurrency` sets
    the load."""

    concurrency: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """Number of clients. Each client waits for its answer before it sends the next request. 0: `requests_per_minute` sets
    the load."""


REQUEST_RULES = rules(
    (
        f"self.metadata.name.size() <= 47 && {NAME_RULE}",
        "metadata.name: the deployment and its Services are called after it: 47 letters, digits and dashes at most, first a letter",
        (
            "'metadata.name: the deployment and its Services are called after it, so it has at most 47 letters, digits and dashes, "
            f"first a letter' + (self.metadata.name.size() <= 45 ? '; use ' + {PROPOSED_NAME} : '')"
        ),
    ),
)


class ServingRequestSpec(Resource, frozen=True):
    """The model, the load and the latency goals, and the GPUs for them."""

    model: Annotated[ModelSource, MODEL_RULES]
    """The model to serve."""

    hardware: Hardware
    """The GPUs that the deployment may have."""

    workload: Annotated[Workload, _WORKLOAD]
    """The expected requests."""

    objective: ServingObjective = ServingObjective()
    """Latency goals, and the percentage of requests that must keep them."""

    model_config: OpenObject = field(default_factory=dict)
    """Content of the model's config.json. It is needed only if the model's repository is not one that Fleet knows."""

    image: Text = ""
    """Image of the workers; empty: the chart's image for the vendor."""

    topology: NodeTopology = NodeTopology()
    """Nodes that fit a replica of any worker role: their domain, and their network devices."""

    pod_template: OpenObject = field(default_factory=dict)
    """Pod template of all workers, as in a DisaggDeployment."""

    apply: bool = False
    """Create the DisaggDeployment too, not only the proposal in the status. If it becomes false again, the deployment
    stays."""


class GoalName(StrEnum):
    TTFT = "ttftMs"
    TPOT = "tpotMs"
    GPUS = "gpus"
    GPUS_PER_NODE = "gpusPerNode"
    CONTEXT = "contextTokens"
    RATE = "requestsPerMinute"
    CONCURRENCY = "concurrency"


class ProposalFigure(Resource, frozen=True):
    """One predicted value of a proposal. If no proposal keeps the goals, it is a value of the best possible deployment."""

    goal: GoalName
    """The field of the request that the figure is about."""

    asked: int
    """The requested limit: the highest allowed value; for contextTokens, requestsPerMinute and concurrency the lowest allowed value."""

    predicted: int
    """The predicted value. For ttftMs and tpotMs it is the time at the objective's percentile, rounded up. For
    requestsPerMinute and concurrency it is the highest load that the GPUs sustain within the goals. For contextTokens it is
    the longest request that the model allows."""

    error_percent: int = 0
    """Median relative error of predictions of this kind, in percent. Half of these predictions had a larger error."""

    met: bool = False
    """True if the predicted value is within the requested limit."""


class ServingRequestStatus(Resource, frozen=True):
    """The proposal, and its state."""

    observed_generation: int = 0
    """The `metadata.generation` of the specification that the status is about."""

    phase: Annotated[str, Meta(max_length=32)] = ""
    """State of the request: Infeasible if there is no proposal, Proposed if `apply` is false, and otherwise Deploying or Ready."""

    deployment: Annotated[str, Meta(max_length=253)] = ""
    """Name of the DisaggDeployment that was made for the request; empty: there is none."""

    figures: Annotated[
        tuple[ProposalFigure, ...],
        Meta(max_length=8, extra_json_schema=keyed_by("goal")),
    ] = ()
    """Requested and predicted values, with one entry for each goal."""

    basis: Text = ""
    """The measurements on which the predictions rest."""

    proposal: OpenObject = field(default_factory=dict)
    """The proposed DisaggDeployment, for `kubectl apply`; empty: there is no proposal."""

    conditions: Conditions = ()
    """The condition `Feasible`, and conditions that name what hinders the request."""

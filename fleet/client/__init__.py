"""Client library: typed clients of a Fleet cluster, synchronous and asynchronous.

from fleet.client import Client

with Client("127.0.0.1:50051") as client:
    with client.generate("Once upon a time", max_tokens=32, temperature=0) as stream:
        for delta in stream:
            print(delta.text, end="", flush=True)
    print(stream.result.usage)
"""

from fleet.client.aio import AsyncClient, AsyncStream
from fleet.client.errors import (
    Cancelled,
    DeadlineExceeded,
    FleetError,
    IncompatibleRouter,
    InvalidRequest,
    ModelNotFound,
    RequestNotFound,
    ServerError,
    TooLarge,
    Unauthenticated,
    Unavailable,
)
from fleet.client.results import (
    BreakEven,
    CandidateCost,
    ClusterStatus,
    OverflowExplained,
    OverflowStatus,
    PlacementExplained,
    PoolStatus,
    RefusedPeer,
    RemotePrefill,
    Result,
    RouterStatus,
    StoreStatus,
    WorkerStatus,
)
from fleet.client.sync import Client, Stream
from fleet.client.tls import ClientTls
from fleet.client.vectors import VectorResult
from fleet.core.requests import (
    AnswerParsing,
    AnyObject,
    Choice,
    Delta,
    Finish,
    Grammar,
    JsonSchema,
    KvOrigin,
    KvPhase,
    Logprobs,
    ModelCard,
    Pattern,
    Source,
    ToolCall,
    ToolChoice,
    Usage,
)
from fleet.core.roles import KvPath, Placement

__all__ = [
    "AnswerParsing",
    "AnyObject",
    "AsyncClient",
    "AsyncStream",
    "BreakEven",
    "Cancelled",
    "CandidateCost",
    "Choice",
    "Client",
    "ClientTls",
    "ClusterStatus",
    "DeadlineExceeded",
    "Delta",
    "Finish",
    "FleetError",
    "Grammar",
    "IncompatibleRouter",
    "InvalidRequest",
    "JsonSchema",
    "KvOrigin",
    "KvPath",
    "KvPhase",
    "Logprobs",
    "ModelCard",
    "ModelNotFound",
    "OverflowExplained",
    "OverflowStatus",
    "Pattern",
    "Placement",
    "PlacementExplained",
    "PoolStatus",
    "RefusedPeer",
    "RemotePrefill",
    "RequestNotFound",
    "Result",
    "RouterStatus",
    "ServerError",
    "Source",
    "StoreStatus",
    "Stream",
    "TooLarge",
    "ToolCall",
    "ToolChoice",
    "Unauthenticated",
    "Unavailable",
    "Usage",
    "VectorResult",
    "WorkerStatus",
]

"""Relayed paths: which paths of external backends clients may reach, and at which of them requests are placed by their prompts.

Rules:

1. A path is compared as a server reads it: percent-decoded once, in lower case, without a trailing slash and without matrix
   parameters (``;name=value``). The path that the server gets is spelled as the client wrote it.
2. A path that different servers could read differently is not relayed. Such a path contains an empty segment, ``.`` or ``..``, a
   backslash, a control character, or an encoding within an encoding, such as ``%252e``.
3. A path at which requests are placed by their prompts is only relayed if it is spelled exactly as in `PLACED`. Other spellings are
   refused: the server would perhaps serve them too, but their prompts would not count against the tenant's limit.
4. Control routes change the state of a server, and so affect its other clients (loading adapters, sleeping, updating
   weights). A pattern with a wildcard never covers them. They are relayed only if the setting `external_paths` lists them
   by their own name.
"""

from collections.abc import Sequence
from enum import Enum, auto
from urllib.parse import unquote_to_bytes

from msgspec import Struct

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")
SCORE_PATHS = ("/v1/score", "/score")
CLASSIFY = "/classify"
POOLING = "/pooling"

GENERATING = frozenset({CHAT, COMPLETIONS, RESPONSES, MESSAGES})
"""Paths whose prompts have blocks in prefix caches."""

PLACED = GENERATING | {
    EMBEDDINGS,
    COUNT_TOKENS,
    *RERANK_PATHS,
    *SCORE_PATHS,
    CLASSIFY,
    POOLING,
    "/tokenize",
    "/detokenize",
}
"""Paths whose POST requests name a model and hold a prompt in JSON. The router places them; all other relayed requests are passages."""

# The names in vLLM and SGLang come first, then those in llama.cpp and hosted services.
CONTROL_ROUTES = frozenset(
    [
        "load_lora_adapter",
        "unload_lora_adapter",
        "sleep",
        "wake_up",
        "is_sleeping",
        "release_kv_cache_memory",
        "collective_rpc",
        "pause",
        "resume",
        "is_paused",
        "abort_requests",
        "reset_prefix_cache",
        "reset_mm_cache",
        "reset_encoder_cache",
        "server_info",
        "start_profile",
        "stop_profile",
        "scale_elastic_ep",
        "is_scaling_elastic_ep",
        "init_weight_transfer_engine",
        "shutdown_weight_transfer_engine",
        "start_weight_update",
        "start_draft_weight_update",
        "update_weights",
        "finish_weight_update",
        "update_weight_version",
        "weight_info",
        "weight_checker",
        "get_world_size",
        "fault_tolerance",
        "invocations",
        "shutdown",
        "flush_cache",
        "clear_hicache_storage_backend",
        "update_weights_from_disk",
        "update_weights_from_tensor",
        "update_weights_from_distributed",
        "update_weights_from_ipc",
        "init_weights_update_group",
        "destroy_weights_update_group",
        "get_weights_by_name",
        "release_memory_occupation",
        "resume_memory_occupation",
        "slow_down",
        "open_session",
        "close_session",
        "configure_logging",
        "abort_request",
        "pause_generation",
        "continue_generation",
        "freeze_gc",
        "set_internal_state",
        "get_internal_state",
        "get_server_info",
        "start_expert_distribution_record",
        "stop_expert_distribution_record",
        "dump_expert_distribution_record",
        "slots",
        "props",
        "lora-adapters",
        "organization",
        "organizations",
        "projects",
        "admin",
        "api_keys",
    ]
)
"""Path segments that name control routes of common servers (rule 4). A path with such a segment is a control route."""


class PathClass(Enum):
    """Class of a path: it decides what the router does with the request."""

    RELAYED = auto()
    UNKNOWN = auto()  # the path matches no pattern of `external_paths`
    CONTROL = auto()
    AMBIGUOUS = auto()


class RelayedPaths(Struct, frozen=True):
    """Decides by the setting `external_paths` which paths clients may reach."""

    exact: frozenset[str]
    prefixes: tuple[str, ...]

    @classmethod
    def of(cls, patterns: Sequence[str]) -> "RelayedPaths":
        """Create the object from patterns. A pattern is either a whole path, or the beginning of a path followed by ``/*``."""
        exact = frozenset(each.casefold() for each in patterns if not each.endswith("/*"))
        return cls(exact, tuple(each.removesuffix("*").casefold() for each in patterns if each.endswith("/*")))

    def classify(self, path: str) -> PathClass:
        """Return the class of a path. `path` is the path in the request, not decoded, with each byte as a Latin-1 character."""
        plain = _plain(path)
        if plain is None:
            # A client only needs the explanation "ambiguous" if the path begins like a relayed one.
            return PathClass.AMBIGUOUS if path.startswith(self.prefixes) else PathClass.UNKNOWN
        if plain not in self.exact and not plain.startswith(self.prefixes):
            return PathClass.UNKNOWN
        if plain in PLACED and plain != path:
            return PathClass.AMBIGUOUS
        if plain in self.exact:
            return PathClass.RELAYED
        return PathClass.CONTROL if CONTROL_ROUTES.intersection(plain.split("/")) else PathClass.RELAYED


def _plain(path: str) -> str | None:
    """Return the path in the form for comparison (rule 1); None if the path is ambiguous (rule 2)."""
    decoded = unquote_to_bytes(path.encode("latin-1")).decode("latin-1").casefold()
    if any(character < " " or character in "\\%\x7f" for character in decoded):
        return None
    segments = [segment.partition(";")[0] for segment in decoded.removesuffix("/").split("/")[1:]]
    if any(segment in ("", ".", "..") for segment in segments):
        return None
    return "/" + "/".join(segments)

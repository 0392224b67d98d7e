"""Model download: returns the folder of a model, and downloads it from the Hugging Face Hub if necessary.

Rules:

1. A folder is used as it is, without network access.
2. No process serves before its model is complete. Meanwhile the log shows the progress, and a stop signal ends the
   process.
3. If only people can correct an error, the start is refused at once, with a message that names the field and what to do.
   After other errors the download is tried again, until nothing has arrived for `HubSettings.patience_seconds`.
4. The download process reads the token from a pipe, so the token is in no log, process list or environment.
"""

import asyncio
import logging
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from fleet.app.hub_download import (
    DownloadComplete,
    DownloadFailed,
    DownloadFailure,
    DownloadProgress,
    DownloadRequest,
    Event,
)
from fleet.config import child_environment, default_cache_dir
from fleet.core.clock import SECOND, Clock, Nanos
from fleet.core.errors import ConfigurationRefused
from fleet.core.hub import HubSettings, Repository, parse_repository
from fleet.core.ids import ModelName
from fleet.local.settings import SIMULATED, ClusterSection, Topology, named_folder, served_name
from fleet.router.settings.router import RouterSettings
from workers.settings import WorkerSettings
from workers.start_phase import StartPhase, note_phase

log = logging.getLogger(__name__)

LOG_SECONDS = 10
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 15.0
MOST_TOKEN_BYTES = 4096


class ModelFolder(Struct, frozen=True):
    """The local folder of a model, and a name by which the hosts of a worker group check that they run the same model."""

    folder: str
    named: str
    """For a repository: its name and commit, which are equal on all hosts. For a folder: its path, as the settings name it."""


async def fetch_worker_model(settings: WorkerSettings, clock: Clock) -> ModelFolder:
    """Return the model of a worker, downloaded if necessary. The simulated engine needs no weights.

    Raises:
        ConfigurationRefused: The model cannot be downloaded.
    """
    weights = settings.engine != SIMULATED
    return await fetch_model(settings.model_dir, settings.hub, clock, field="model_dir", weights=weights)


async def fetch_router_models(settings: RouterSettings, clock: Clock) -> RouterSettings:
    """Download what a router needs of its models, and return its settings with local folders instead of repositories.

    These are the tokenizers, templates and configurations of `models`, and of each `tokenizer` in `openai_workers`.

    Raises:
        ConfigurationRefused: A model cannot be downloaded.
    """
    hub = settings.hub
    models = {
        name: (await fetch_model(named, hub, clock, field=f"models.{name}", weights=False)).folder
        for name, named in settings.models.items()
    }
    external = [
        structs.replace(
            worker, tokenizer=(await fetch_model(worker.tokenizer, hub, clock, field=where, weights=False)).folder
        )
        for number, worker in enumerate(settings.openai_workers)
        for where in (f"openai_workers[{number}].tokenizer",)
    ]
    if models == settings.models and tuple(external) == settings.openai_workers:
        return settings
    return structs.replace(settings, models=models, openai_workers=tuple(external))


async def fetch_topology_model(topology: Topology, relative_to: Path, clock: Clock) -> Topology:
    """Download the model of a topology, and return the topology with the local folder instead of the repository.

    The model is served under `served_name`, or else under the repository's name. A topology that names a folder or the
    tiny model stays unchanged.

    Raises:
        ConfigurationRefused: The model cannot be downloaded.
    """
    cluster = topology.cluster
    if _repository(cluster, relative_to) is None:
        return topology
    served = topology_model_name(topology, relative_to)
    weights = cluster.engine != SIMULATED
    model = await fetch_model(cluster.model, topology.hub, clock, field="cluster.model", weights=weights)
    return structs.replace(topology, cluster=structs.replace(cluster, model=model.folder, served_name=served))


def topology_model_name(topology: Topology, relative_to: Path) -> ModelName:
    """Return the name under which a cluster serves the model of a topology, without downloading the model.

    Raises:
        ConfigurationRefused: The path of the model cannot be resolved.
    """
    cluster = topology.cluster
    if (repository := _repository(cluster, relative_to)) is not None:
        return ModelName(cluster.served_name or repository.name)
    return served_name(cluster, named_folder(cluster, relative_to))


def _repository(cluster: ClusterSection, relative_to: Path) -> Repository | None:
    """Return the repository that the model of a cluster is downloaded from; None if the model is a folder or the tiny model."""
    return None if _is_folder(relative_to / cluster.model) else parse_repository(cluster.model)


async def fetch_model(named: str, hub: HubSettings, clock: Clock, *, field: str, weights: bool) -> ModelFolder:
    """Return the folder of a model. A repository is downloaded, unless the cache has it completely.

    Args:
        named: A folder or a repository.
        hub: Source and cache of downloads.
        clock: Clock for the time limit.
        field: Setting that names the model, for messages.
        weights: True if the weights are needed, because an engine runs the model; False if its tokenizer is enough.

    Raises:
        ConfigurationRefused: The model cannot be downloaded; the message states the reason, and what to do.
    """
    repository = parse_repository(named)
    if repository is None or _is_folder(named):
        return ModelFolder(named, named)
    note_phase(StartPhase.FETCH)
    fetched = await _ModelDownload(repository, hub, clock, field=field, weights=weights).run()
    return ModelFolder(fetched.folder, f"{repository.name}@{fetched.commit}")


def _is_folder(named: str | Path) -> bool:
    return Path(named).is_dir()


class _ModelDownload:
    """Downloads one model: runs download processes until one succeeds, an error needs a person, or time is up (rule 3)."""

    def __init__(self, repository: Repository, hub: HubSettings, clock: Clock, *, field: str, weights: bool) -> None:
        self._repository = repository
        self._hub = hub
        self._clock = clock
        self._field = field
        self._weights = weights
        self._cache = Path(hub.cache).expanduser() if hub.cache else default_cache_dir() / "hub"
        self._there = 0  # bytes of the model in the cache, as the download process has reported last
        self._last_progress_at = self._logged = clock.now()

    async def run(self) -> DownloadComplete:
        context = {"repository": self._repository.name, "revision": self._repository.revision}
        log.info("the model is fetched, unless it is there", extra=context | {"hub": self._hub.endpoint})
        begun = self._clock.now()
        pause, cause = FIRST_PAUSE_SECONDS, "it sends nothing"
        while self._left() > 0:
            try:
                async with asyncio.timeout(self._left()) as limit:
                    ended = await self._once(limit)
            except TimeoutError:
                break
            match ended:
                case DownloadComplete():
                    if ended.asked:
                        log.warning(
                            "the hub cannot be reached; the model is the one fetched before",
                            extra=context | {"cause": ended.asked},
                        )
                    seconds = (self._clock.now() - begun) / SECOND
                    log.info(
                        "the model is there", extra=context | {"commit": ended.commit, "seconds": round(seconds, 1)}
                    )
                    return ended
                case DownloadFailed(failure=DownloadFailure.UNREACHABLE):
                    cause = ended.cause
                    log.warning("the hub cannot be reached; it is asked again", extra=context | {"cause": cause})
                    await asyncio.sleep(max(0.0, min(pause, self._left())))
                    pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
                case DownloadFailed():
                    raise ConfigurationRefused(self._refusal(ended))
        raise ConfigurationRefused(
            f"hub.endpoint: nothing of {self._repository.name} came from {self._hub.endpoint} for {self._hub.patience_seconds:g} s"
            f" ({cause}); see that it can be reached from here, or name a mirror, or a folder in {self._field}"
        )

    async def _once(self, limit: asyncio.Timeout) -> DownloadComplete | DownloadFailed:
        """Run one download process to its end, and return its result. Whenever bytes arrive, the time limit begins again."""
        request = DownloadRequest(
            repository=self._repository,
            endpoint=self._hub.endpoint.rstrip("/"),
            cache=str(self._cache.absolute()),
            weights=self._weights,
            token=self._token(),
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "fleet.app.hub_download"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=child_environment() | self._environment(),
            start_new_session=True,  # Ctrl-C must reach only the parent, which then ends this process
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with suppress(ConnectionError):  # the process has ended already; below, its exit status gives the reason
                process.stdin.write(msgspec.json.encode(request) + b"\n")
                await process.stdin.drain()
            while line := await process.stdout.readline():
                event: Event = msgspec.json.decode(line, type=Event)
                if not isinstance(event, DownloadProgress):
                    return event
                self._hear(event)
                limit.reschedule(asyncio.get_running_loop().time() + self._left())
            return DownloadFailed(
                DownloadFailure.UNREACHABLE, f"the process that fetches it ended with status {await process.wait()}"
            )
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            process.stdin.close()
            await process.wait()

    def _hear(self, progress: DownloadProgress) -> None:
        now = self._clock.now()
        if progress.there > self._there:
            self._last_progress_at = now
        self._there = progress.there  # may be smaller than before, if the download of a file has started again
        if now - self._logged >= LOG_SECONDS * SECOND:
            self._logged = now
            context = {"repository": self._repository.name, "bytes": progress.there, "of": progress.whole}
            log.info("the model is being fetched", extra=context)

    def _left(self) -> float:
        """Return the seconds that are left until the download is given up, if no more bytes arrive."""
        until = Nanos(self._last_progress_at + int(self._hub.patience_seconds * SECOND))
        return (until - self._clock.now()) / SECOND

    def _environment(self) -> dict[str, str]:
        """Return environment variables for the hub's client.

        Without them, the client would use the values that the user has set for this process.
        """
        return {
            "HF_HUB_OFFLINE": "0",  # "0" lets the client download; engines get "1", because their models are in folders already
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # the log shows the progress
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1",
            # all files stay within the cache folder, so that the folder can be moved
            "HF_HUB_DISABLE_SHARED_BLOBS": "1",
            "HF_XET_CACHE": str(self._cache.absolute() / ".xet"),
        }

    def _token(self) -> str:
        """Return the access token for the hub, which is a secret; empty if the settings name no file with a token.

        Raises:
            ConfigurationRefused: The file cannot be read, or does not contain exactly one token.
        """
        if not self._hub.token_file:
            return ""
        path = Path(self._hub.token_file).expanduser()
        try:
            with path.open("rb") as file:
                token = file.read(MOST_TOKEN_BYTES + 1).strip().decode("ascii")
        except OSError as error:
            raise ConfigurationRefused(
                f"hub.token_file: {path}: {error.strerror}; put a token there, on Kubernetes as `token` of the Secret"
            ) from error
        except UnicodeDecodeError:
            token = ""
        if not token or len(token) > MOST_TOKEN_BYTES or not token.isprintable() or " " in token:
            raise ConfigurationRefused(f"hub.token_file: {path} has no token; it is one line, as in hf_…")
        return token

    def _refusal(self, failed: DownloadFailed) -> str:
        name, revision, hub = self._repository.name, self._repository.revision, self._hub.endpoint
        if self._hub.token_file:
            token = f"see that the token in {self._hub.token_file} may read it"
        else:
            token = "name a file with a token that may read it in hub.token_file"  # noqa: S105 - advice, not a token
        match failed.failure:
            case DownloadFailure.REPOSITORY:
                return (
                    f"{self._field}: '{name}' is no folder here, and {hub} shows no model of that name; correct it, or,"
                    f" if the model is private, {token}"
                )
            case DownloadFailure.REVISION:
                return f"{self._field}: {name} at {hub} has no revision '{revision}'; name a branch, a tag or a commit"
            case DownloadFailure.GATED:
                return f"{self._field}: {name} is gated; accept its terms at {hub}/{name}, and {token}"
            case DownloadFailure.TOKEN:
                return f"hub.token_file: {hub} refuses to hand out {name} ({failed.cause}); {token}"
            case DownloadFailure.INCOMPLETE:
                return f"{self._field}: {name} at {hub} has no {failed.cause}, which a model needs here; name another"
            case DownloadFailure.SPACE:
                return f"hub.cache: no space for {name} in {self._cache}: {failed.cause}; make room, or name another folder"
            case DownloadFailure.CACHE:
                return f"hub.cache: {failed.cause}; name a folder that this process can write to"
            case DownloadFailure.UNREACHABLE:
                raise AssertionError("is tried again")

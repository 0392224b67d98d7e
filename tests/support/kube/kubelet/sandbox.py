"""Sandbox of a pod: namespaces for network and files, with the pod's volumes at the paths that its containers expect.

The root folder is an overlay on this machine's root folder. Files that a pod writes there are kept in memory, and vanish
with the pod.
"""

import asyncio
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.kube.kubelet.network import DIE_WITH_US, Network

SCRIPT = """
set -e
cd {folder}; mkdir -p root layers
mount -t tmpfs layers layers; mkdir layers/upper layers/work
mount -t overlay pod -o lowerdir=/,upperdir=layers/upper,workdir=layers/work root
mount --rbind /proc root/proc; mount --rbind /dev root/dev
mount -t tmpfs run root/run; mount -t tmpfs scratch root/tmp
{mounts}
exec chroot root sh -c 'echo; exec sleep infinity'
"""
REPOSITORY = Path(__file__).parents[4]


class Sandbox:
    """Holds the namespaces in which a pod's containers run; made by `open`."""

    def __init__(self, folder: Path, process: asyncio.subprocess.Process, address: str) -> None:
        self._folder = folder
        self._process = process
        self.address = address

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    async def open(cls, folder: Path, network: Network, mounts: Mapping[str, Path]) -> "Sandbox":
        """Create a sandbox.

        Args:
            folder: The sandbox's own folder, which `close` removes.
            network: The network of the node.
            mounts: Folders or files of this machine, by their path in the pod.
        """
        folder.mkdir(parents=True)
        lines = [_bound(folder, where, what) for where, what in sorted(mounts.items())]
        script = SCRIPT.format(folder=shlex.quote(str(folder)), mounts="\n".join(lines))
        process = await asyncio.create_subprocess_exec(
            *(*DIE_WITH_US, "unshare", "--net", "--mount", "--propagation", "private", "sh", "-c", script),
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        try:
            if not await process.stdout.readline():
                raise RuntimeError(f"the pod in {folder} could not be made")
            return cls(folder, process, await network.connect(process.pid))
        except BaseException:
            process.kill()
            await process.wait()
            raise

    async def start(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> asyncio.subprocess.Process:
        """Start a process of a container, in a session of its own."""
        with log.open("ab") as output:
            return await asyncio.create_subprocess_exec(
                *DIE_WITH_US,
                *("nsenter", "-t", str(self.pid), "--net", "--mount", "--root", "env", "--chdir=/"),
                *command,
                env=dict(environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    async def close(self) -> None:
        self._process.kill()
        await self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def _bound(folder: Path, where: str, what: Path) -> str:
    """Return shell commands that create a mount point in the pod and mount a file or a folder there.

    A file is mounted on a new empty file, because a symbolic link at its path could lead out of the pod.
    """
    where = where.removeprefix("/var") if where.startswith("/var/run/") else where
    inside = shlex.quote(f"{folder}/root{where}")
    make = f"mkdir -p {inside}" if what.is_dir() else f"mkdir -p $(dirname {inside}); rm -f {inside}; touch {inside}"
    return f"{make}; mount --bind {shlex.quote(str(what))} {inside}"

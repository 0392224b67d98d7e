"""Pod templates of other projects: copies their fields that a `podTemplate` of a DisaggDeployment may contain.

Rules:

1. Fields about the scheduling and the resources of a pod (affinity, tolerations, volumes, environment variables, memory)
   are copied unchanged. Fields about its program (image, command, probes, ports) are not copied, because Fleet's pods run
   Fleet's own programs.
2. Requests for GPUs become fields of a role, and are removed from the pod's resources.
3. An environment variable is left out in all containers if its name looks like the name of a secret and its value is
   written in the document. Secret values must be in a Secret, because everybody who may read a DisaggDeployment could
   read them.
"""

from typing import Any

from operators.api.fields import GpuVendor
from operators.imports.document_reader import DocumentReader, Note
from operators.imports.secret_names import is_secret

OBJECTS = ("affinity", "nodeSelector")
LISTS = (
    "imagePullSecrets",
    "initContainers",
    "resourceClaims",
    "tolerations",
    "topologySpreadConstraints",
    "volumes",
)
FLAGS = ("hostIPC", "hostNetwork")
TEXTS = ("dnsPolicy", "nodeName", "priorityClassName", "runtimeClassName", "schedulerName", "serviceAccountName")
"""Fields of a pod's spec whose values are texts, and that are copied to the `podTemplate` of a role."""

PARTS_OF_A_GPU = ("nvidia.com/mig-", "nvidia.com/gpumem", "nvidia.com/gpucores")
MAIN = "main"
WRITTEN_OUT = "has a secret's name and its value written out; put it into a Secret"


class PodTemplate:
    """Builds the `podTemplate` of a role from parts of another project's pod."""

    def __init__(self) -> None:
        self.labels: dict[str, str] = {}
        self.annotations: dict[str, str] = {}
        self.spec: dict[str, Any] = {}
        self.main: dict[str, Any] = {}
        self.others: list[Any] = []
        self.arguments: list[str] = []
        self.grace_seconds: int | None = None

    def take(self, pod: DocumentReader) -> None:
        """Copy the fields of a pod's spec that rule 1 allows."""
        for name in OBJECTS:
            pod.table(name).skip_all()
        for name in LISTS:
            pod.objects(name)
        for name in FLAGS:
            pod.flag(name)
        for name in TEXTS:
            pod.text(name)
        self.spec |= {name: value for name in (*OBJECTS, *FLAGS, *TEXTS) if (value := pod.any(name))}
        # The lists are copied, because several pods share one list object if the document uses a YAML alias.
        self.spec |= {name: list(values) for name in LISTS if (values := pod.any(name))}
        if before := self.spec.get("initContainers"):
            self.spec["initContainers"] = [
                without_secrets(each, f"{pod.at('initContainers')}[{index}]", pod.notes)
                for index, each in enumerate(before)
            ]
        if pod.any("terminationGracePeriodSeconds") is not None:
            self.grace_seconds = pod.number("terminationGracePeriodSeconds", most=86_400)

    def take_container(self, container: DocumentReader) -> None:
        """Copy the environment variables, the volume mounts and the pull policy of the container that runs the engine."""
        self.add_variables(container, "env")
        if sources := container.objects("envFrom"):
            self.main.setdefault("envFrom", []).extend(sources)
        if mounts := container.objects("volumeMounts"):
            self.main.setdefault("volumeMounts", []).extend(mounts)
        if policy := container.text("imagePullPolicy"):
            self.main["imagePullPolicy"] = policy

    def add_variables(self, owner: DocumentReader, field: str) -> None:
        """Copy the list of environment variables in a field, except secrets whose value is in the document (rule 3)."""
        for variable in owner.tables(field):
            name, value = variable.text("name"), variable.any("value")
            source = variable.any("valueFrom")
            if source is None and value and is_secret(name, str(value)):
                variable.notes.append(Note(variable.path, f"{name}: {WRITTEN_OUT}"))
            else:
                said = {"valueFrom": source} if source is not None else {"value": "" if value is None else str(value)}
                self.main.setdefault("env", []).append({"name": name, **said})

    def built(self) -> dict[str, Any]:
        """Return the complete `podTemplate` of a role; empty if no field was copied from the other project's pod."""
        main = dict(self.main)
        if self.arguments:
            main["args"] = self.arguments
        spec = dict(self.spec)
        containers = ([{"name": MAIN, **main}] if main else []) + self.others
        if containers:
            spec["containers"] = containers
        metadata = {
            name: value for name, value in (("labels", self.labels), ("annotations", self.annotations)) if value
        }
        return {name: value for name, value in (("metadata", metadata), ("spec", spec)) if value}


def without_secrets(container: dict[str, Any], path: str, notes: list[Note]) -> dict[str, Any]:
    """Return a sidecar or init container without environment variables that contain secrets (rule 3).

    Args:
        container: The container as it is in the document.
        path: Path of the container in the document.
        notes: Receives notes about what was left out.
    """
    variables = container.get("env")
    if not isinstance(variables, list):
        return container
    kept = []
    for index, each in enumerate(variables):
        if isinstance(each, dict) and is_secret(name := str(each.get("name")), str(each.get("value") or "")):
            notes.append(Note(f"{path}.env[{index}]", f"{name}: {WRITTEN_OUT}"))
        else:
            kept.append(each)
    return container | {"env": kept}


def variables_of(*lists: list[Any]) -> dict[str, str]:
    """Return the values of the environment variables in the lists, by name; of equal names, the last one counts.

    Variables with `valueFrom` are left out, and secrets too (rule 3).
    """
    return {
        name: value
        for variables in lists
        for each in variables
        if isinstance(each, dict) and "name" in each and each.get("valueFrom") is None
        if not is_secret(name := str(each["name"]), value := str(each.get("value") or ""))
    }


def gpus_of(resources: Any, path: str, notes: list[Note]) -> tuple[int, GpuVendor, dict[str, Any]]:
    """Return the number of GPUs of a pod, their vendor, and the pod's other resources.

    Args:
        resources: The field `resources` of a container, with `limits` and `requests`; any other value counts as empty.
        path: Path of this field in the document.
        notes: Receives notes about quantities that cannot be used.
    """
    count, vendor = 0, GpuVendor.NVIDIA
    rest: dict[str, Any] = {}
    for section in ("requests", "limits"):
        kept: dict[str, Any] = {}
        quantities = resources.get(section) if isinstance(resources, dict) else None
        for name, quantity in (quantities if isinstance(quantities, dict) else {}).items():
            if (some := gpus_called(name, quantity, f"{path}.{section}.{name}", notes)) is not None:
                count, vendor = max(count, some[0]), some[1]
            elif isinstance(quantity, dict):  # Dynamo's field `custom` contains further resources
                kept |= quantity
            else:
                kept[name] = quantity
        if kept:
            rest[section] = kept
    return count, vendor, rest


def gpus_called(name: str, quantity: Any, path: str, notes: list[Note]) -> tuple[int, GpuVendor] | None:
    """Return the number and the vendor of the GPUs that a resource requests, or None if the resource is not a GPU.

    Args:
        name: Name of the resource, such as `nvidia.com/gpu`.
        quantity: The requested quantity.
        path: Path of the field in the document.
        notes: Receives notes about quantities that cannot be used.
    """
    if name in tuple(GpuVendor):
        return _whole(quantity, path, notes), GpuVendor(name)
    if name == "gpu":
        return _whole(quantity, path, notes), GpuVendor.NVIDIA
    if name.startswith(PARTS_OF_A_GPU):
        notes.append(Note(path, "parts of a GPU cannot be asked for; taken as one GPU for each"))
        return _whole(quantity, path, notes) or 1, GpuVendor.NVIDIA
    return None


def _whole(quantity: Any, where: str, notes: list[Note]) -> int:
    text = str(quantity).strip()
    if isinstance(quantity, bool) or not (text.isascii() and text.isdigit() and len(text) <= 4):
        notes.append(Note(where, "is no whole number of GPUs; taken as 1"))
        return 1
    return int(text)

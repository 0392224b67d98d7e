"""The served resources: one `ServedResource` for each kind and version, and the catalogue of all of them."""

from collections.abc import Callable, Iterable, Iterator

import msgspec

from tests.support.kube.api.kinds.jsonpath import look_up
from tests.support.kube.api.kinds.schemas import StructuralSchema
from tests.support.kube.api.values import Json, Object

Place = tuple[str, str]
"""Group and plural of a kind. The objects of a kind are stored under this key, which is the same for all its versions."""


class TableColumn(msgspec.Struct, frozen=True):
    """Describes one column of `kubectl get`."""

    name: str
    value: str | Callable[[Object], Json]
    """A JSONPath, or a function that computes the cell."""
    type: str = "string"
    priority: int = 0
    description: str = ""
    format: str = ""

    def cell(self, item: Object) -> Json:
        if isinstance(self.value, str):
            found = look_up(item, self.value)
            return found[0] if found else None
        return self.value(item)


class ScaleSubresource(msgspec.Struct, frozen=True):
    """Holds the paths of the fields that the scale subresource reads and writes, as field names."""

    replicas: tuple[str, ...]
    status: tuple[str, ...]
    selector: tuple[str, ...] | None


class ServedResource(msgspec.Struct, frozen=True, eq=False):
    group: str
    version: str
    plural: str
    kind: str
    singular: str
    namespaced: bool
    shape: StructuralSchema
    short_names: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    columns: tuple[TableColumn, ...] = ()
    selectable: tuple[str, ...] = ("metadata.name", "metadata.namespace")
    has_status: bool = False
    has_generation: bool = False
    scale: ScaleSubresource | None = None
    custom: bool = False
    ruled: bool = False
    """True if the schema has CEL rules."""
    schema: Object | None = None
    """The schema of a custom kind as its definition gives it, for the OpenAPI documents."""

    @property
    def place(self) -> Place:
        return self.group, self.plural

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def list_kind(self) -> str:
        return f"{self.kind}List"

    @property
    def subresources(self) -> tuple[str, ...]:
        return (*(["status"] if self.has_status else []), *(["scale"] if self.scale else []))


class ResourceCatalogue:
    """Holds all served resources in the order of their registration.

    Every change increases `generation`. The server makes its documents again when `generation` has changed.
    """

    def __init__(self, built_in: Iterable[ServedResource]):
        self._resources: dict[tuple[str, str, str], ServedResource] = {
            (each.group, each.version, each.plural): each for each in built_in
        }
        self.generation = 0

    def __iter__(self) -> Iterator[ServedResource]:
        return iter(self._resources.values())

    def find(self, group: str, version: str, plural: str) -> ServedResource | None:
        return self._resources.get((group, version, plural))

    def at(self, place: Place) -> ServedResource:
        """Return any version of the resource at a place.

        Raises:
            KeyError: No resource is served there.
        """
        for each in self:
            if each.place == place:
                return each
        raise KeyError(place)

    def of_kind(self, api_version: str, kind: str) -> ServedResource | None:
        return next((each for each in self if each.api_version == api_version and each.kind == kind), None)

    def replace(self, place: Place, served: Iterable[ServedResource]) -> None:
        """Serve these versions at a place, and no others."""
        kept = {key: each for key, each in self._resources.items() if each.place != place}
        self._resources = kept | {(each.group, each.version, each.plural): each for each in served}
        self.generation += 1

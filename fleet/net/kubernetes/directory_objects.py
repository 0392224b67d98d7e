"""Leases and EndpointSlices of one namespace in the Kubernetes API, for the discovery directory.

Every call except a watch ends after at most `CALL_SECONDS`. Errors are raised as the client raises them
(`ApiException`, `aiohttp.ClientError`, `TimeoutError`). But if a call reads or deletes a single object, a missing or
changed object is a normal result and no error.
"""

from typing import Any

import aiohttp
import msgspec
from kubernetes.aio import client
from kubernetes.aio.client.exceptions import ApiException

from fleet.net.kubernetes import endpoint_slices

LEASES = ("coordination.k8s.io", "v1")
SLICES = (endpoint_slices.GROUP, endpoint_slices.VERSION)
APPLY = "application/apply-patch+yaml"
CALL_SECONDS = 5.0
WATCH_SECONDS = 240
NOT_FOUND, CONFLICT, FORBIDDEN = 404, 409, 403

Manifest = dict[str, Any]


class DiscoveryObjects:
    """Reads and writes the Leases and EndpointSlices of one namespace."""

    def __init__(self, connected: client.ApiClient, namespace: str, manager: str) -> None:
        """Create the client; `manager` is the field manager in `managedFields`."""
        self._objects = client.CustomObjectsApi(connected)  # the client's API for plain manifests of any kind
        self._namespace = namespace
        self._manager = manager

    async def leases(self, selector: str) -> tuple[list[Manifest], str]:
        """Return all Leases with these labels, and the resource version for a watch."""
        listed: Any = await self._objects.list_namespaced_custom_object(
            *LEASES, self._namespace, "leases", label_selector=selector, _request_timeout=CALL_SECONDS
        )
        return listed["items"], listed["metadata"]["resourceVersion"]

    async def watch_leases(self, selector: str, version: str, silence_seconds: float) -> aiohttp.ClientResponse:
        """Return a response that streams the changes of the Leases with these labels after a version, as JSON lines.

        The server ends the stream after `WATCH_SECONDS`. If it does not, reading fails `silence_seconds` later.
        """
        answer: aiohttp.ClientResponse = await self._objects.list_namespaced_custom_object_without_preload_content(
            *LEASES,
            self._namespace,
            "leases",
            watch=True,
            label_selector=selector,
            resource_version=version,
            allow_watch_bookmarks=True,
            timeout_seconds=WATCH_SECONDS,
            _request_timeout=WATCH_SECONDS + silence_seconds,
        )
        return answer

    async def lease(self, name: str) -> Manifest | None:
        try:
            found: Any = await self._objects.get_namespaced_custom_object(
                *LEASES, self._namespace, "leases", name, _request_timeout=CALL_SECONDS
            )
        except ApiException as error:
            if error.status == NOT_FOUND:
                return None
            raise
        read: Manifest = found
        return read

    async def create_lease(self, lease: Manifest) -> Manifest:
        written: Any = await self._objects.create_namespaced_custom_object(
            *LEASES, self._namespace, "leases", lease, _request_timeout=CALL_SECONDS
        )
        created: Manifest = written
        return created

    async def replace_lease(self, lease: Manifest) -> Manifest:
        """Replace a Lease. The call fails with status 409 if the stored version is not the one that `lease` names."""
        written: Any = await self._objects.replace_namespaced_custom_object(
            *LEASES, self._namespace, "leases", lease["metadata"]["name"], lease, _request_timeout=CALL_SECONDS
        )
        replaced: Manifest = written
        return replaced

    async def delete_lease(self, name: str, version: str) -> bool:
        """Delete a Lease that still has this version. Return False if it has another version; True if it is deleted or missing."""
        return await self._delete(LEASES, "leases", name, version)

    async def apply_slice(self, slice_: Manifest) -> Manifest:
        # The answer is read here, because the client library would drop its content if the apply has created the object (201).
        answer = await self._objects.patch_namespaced_custom_object_without_preload_content(
            *SLICES,
            self._namespace,
            endpoint_slices.PLURAL,
            slice_["metadata"]["name"],
            slice_,
            field_manager=self._manager,
            force=True,
            _content_type=APPLY,
            _request_timeout=CALL_SECONDS,
        )
        async with answer:
            if answer.status >= 400:
                raise ApiException(status=answer.status, reason=answer.reason)
            applied: Manifest = msgspec.json.decode(await answer.read())
        return applied

    async def delete_slice(self, name: str, version: str) -> bool:
        """Delete a slice that still has this version. Return False if it has another version; True if it is deleted or missing."""
        return await self._delete(SLICES, endpoint_slices.PLURAL, name, version)

    async def _delete(self, kind: tuple[str, str], plural: str, name: str, version: str) -> bool:
        options = client.V1DeleteOptions(preconditions=client.V1Preconditions(resource_version=version))
        try:
            await self._objects.delete_namespaced_custom_object(
                *kind, self._namespace, plural, name, body=options, _request_timeout=CALL_SECONDS
            )
        except ApiException as error:
            if error.status not in {NOT_FOUND, CONFLICT}:
                raise
            return bool(error.status == NOT_FOUND)
        return True

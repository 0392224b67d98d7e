"""Simple HTTP client for the Kubernetes API, for tests that check requests and answers themselves."""

import json
import ssl
from collections.abc import Iterator
from typing import Any, Self

import httpx
import msgspec

PATCHES = {
    "json": "application/json-patch+json",
    "merge": "application/merge-patch+json",
    "strategic": "application/strategic-merge-patch+json",
    "apply": "application/apply-patch+yaml",
}


class Answer(msgspec.Struct, frozen=True):
    code: int
    body: Any
    headers: Any = None

    def expect(self, code: int) -> Any:
        """Check that the answer has this HTTP status code, and return its body."""
        assert self.code == code, f"expected {code}, got {self.code}: {json.dumps(self.body)[:2000]}"
        return self.body

    def refused(self, code: int, reason: str) -> Any:
        """Check that the answer is a refusal with this code, whose body is a `Status` with this reason; return the body."""
        status = self.expect(code)
        assert (status["kind"], status["status"], status["reason"], status["code"]) == (
            "Status",
            "Failure",
            reason,
            code,
        ), status
        return status


class Api:
    def __init__(self, address: str, *, agent: str = "fleet-tests/1", token: str = "", authority: str | None = None):
        headers = {"User-Agent": agent} | ({"Authorization": f"Bearer {token}"} if token else {})
        verify = ssl.create_default_context(cafile=authority) if authority else True
        self.client = httpx.Client(base_url=address, headers=headers, timeout=30, trust_env=False, verify=verify)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def get(self, path: str, *, accept: str = "application/json", **query: Any) -> Answer:
        return self._ask("GET", path, query, headers={"Accept": accept})

    def post(self, path: str, item: Any, **query: Any) -> Answer:
        return self._ask("POST", path, query, json=item)

    def put(self, path: str, item: Any, **query: Any) -> Answer:
        return self._ask("PUT", path, query, json=item)

    def patch(self, path: str, kind: str, patch: Any, **query: Any) -> Answer:
        return self._ask("PATCH", path, query, content=json.dumps(patch), headers={"Content-Type": PATCHES[kind]})

    def apply(self, path: str, item: Any, manager: str, **query: Any) -> Answer:
        return self.patch(path, "apply", item, fieldManager=manager, **query)

    def delete(self, path: str, **options: Any) -> Answer:
        return self._ask("DELETE", path, {}, json={"kind": "DeleteOptions", "apiVersion": "v1"} | options)

    def watch(self, path: str, **query: Any) -> Iterator[tuple[str, Any]]:
        """Yield events until the server closes the watch."""
        with self.client.stream("GET", path, params={"watch": "true"} | query) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                event = json.loads(line)
                yield event["type"], event["object"]

    def _ask(self, method: str, path: str, query: dict[str, Any], **more: Any) -> Answer:
        answer = self.client.request(method, path, params=query, **more)
        is_json = answer.headers.get("Content-Type", "").startswith("application/json")
        return Answer(answer.status_code, answer.json() if is_json else answer.text, answer.headers)


def inhabitants(api: Api, namespace: str) -> set[str]:
    """Return `plural/name` of all objects of a namespace, except Events and the objects that every namespace has."""
    found = set()
    groups = [each["preferredVersion"]["groupVersion"] for each in api.get("/apis").expect(200)["groups"]]
    for root in ("/api/v1", *(f"/apis/{group}" for group in groups)):
        listed = api.get(root)
        # The group may have vanished since it was listed, because its last kind was removed.
        for each in listed.body["resources"] if listed.code == 200 else ():
            if each["namespaced"] and "list" in each["verbs"] and "/" not in each["name"] and each["name"] != "events":
                items = api.get(f"{root}/namespaces/{namespace}/{each['name']}").body.get("items", ())
                found |= {f"{each['name']}/{item['metadata']['name']}" for item in items}
    return found - {"serviceaccounts/default", "configmaps/kube-root-ca.crt"}

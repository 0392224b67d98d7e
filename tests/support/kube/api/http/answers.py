"""HTTP answers, and the forms in which clients request them: objects, tables, or metadata alone."""

import msgspec
from aiohttp import web

from tests.support.kube.api.errors import ApiError
from tests.support.kube.api.http import tables
from tests.support.kube.api.kinds.resources import ServedResource
from tests.support.kube.api.values import Json, Object


class AnswerForm(msgspec.Struct, frozen=True):
    """Describes the form in which a client requests objects."""

    name: str = ""
    """`Table` or `PartialObjectMetadata`; empty: the objects themselves."""
    version: str = "v1"
    include: str = "Metadata"


def form_of(request: web.Request) -> AnswerForm:
    """Return the first form in the Accept header that this server supports; the objects themselves if there is none."""
    for each in request.headers.get("Accept", "").split(","):
        media, *parameters = (part.strip() for part in each.split(";"))
        named = dict(part.partition("=")[::2] for part in parameters)
        form = named.get("as", "").removesuffix("List")
        known = form in {"Table", "PartialObjectMetadata"} and named.get("g", "meta.k8s.io") == "meta.k8s.io"
        if media == "application/json" and known:
            return AnswerForm(form, named.get("v", "v1"), request.query.get("includeObject") or "Metadata")
        if media in {"application/json", "*/*"} and not form:
            break
    return AnswerForm()


def shaped(
    resource: ServedResource, item: Object, form: AnswerForm, *, headed: bool = True, bookmark: bool = False
) -> Object:
    if form.name == "Table":
        metadata = {"resourceVersion": item["metadata"].get("resourceVersion", "")}
        return tables.table(resource, [] if bookmark else [item], metadata, form.include, form.version, headed=headed)
    return tables.partial(item, form.version) if form.name == "PartialObjectMetadata" else item


def as_json(document: Json, code: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(document), status=code, content_type="application/json")


def success(details: Object | None = None) -> web.Response:
    status: Object = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
    return as_json(status | ({"details": details} if details else {}))


def refusal(refused: ApiError) -> web.Response:
    answer = as_json(refused.status(), refused.code)
    if refused.retry_after_seconds is not None:
        answer.headers["Retry-After"] = str(refused.retry_after_seconds)
    return answer


async def half(request: web.Request, answer: web.Response) -> web.StreamResponse:
    """Send the first half of an answer, then close the connection."""
    body = answer.body
    assert isinstance(body, bytes)
    broken = web.StreamResponse(status=answer.status, headers={"Content-Type": "application/json"})
    broken.content_length = len(body)
    await broken.prepare(request)
    await broken.write(body[: len(body) // 2])
    return close(request, broken)


def close(request: web.Request, answer: web.StreamResponse | None = None) -> web.StreamResponse:
    """Close the connection without an answer, or in the middle of it."""
    if request.transport is not None:
        request.transport.close()
    return answer or web.StreamResponse()

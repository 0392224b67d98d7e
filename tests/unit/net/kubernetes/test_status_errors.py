"""Status errors: the caller learns which field is wrong, and never which value was sent."""

import pytest

from fleet.net.kubernetes.ports import ApiServerUnreachable, RequestDenied
from fleet.net.kubernetes.status_errors import ApiStatus, StatusCause, StatusDetails, public_message, refuse

UNTYPED = "failed to create typed patch object (ns/dd-all; apps/v1, Kind=Deployment): "
MAIN = '.spec.template.spec.containers[name="main"]'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{MAIN}.prot: field not declared in schema", f"{MAIN[1:]}.prot: field not declared in schema"),
        (
            f'{MAIN}.env[name="A_B"].value: expected string, got &value.valueUnstructured{{Value:4711}}',
            f'{MAIN[1:]}.env[name="A_B"].value: expected string',
        ),
        (
            f'{MAIN}.ports[containerPort="4711",protocol="TCP"].containerPort: expected numeric (int or float), got string',
            f'{MAIN[1:]}.ports[containerPort=...,protocol="TCP"].containerPort: expected numeric (int or float)',
        ),
        (
            f'{MAIN}.env: duplicate entries for key [name="A"]',
            f'{MAIN[1:]}.env: duplicate entries for key [name="A"]',
        ),
        (
            f'{MAIN}.env: element 2: associative list with keys has an element that omits key field "name" (and …)',
            f'{MAIN[1:]}.env: element 2: associative list with keys has an element that omits key field "name"',
        ),
        (f"{MAIN}.env: expected list, got &{{4711}}", f"{MAIN[1:]}.env: expected list"),
        (
            f"errors:\n  {MAIN}.a: field not declared in schema\n  .spec.b: field not declared in schema",
            f"{MAIN[1:]}.a: field not declared in schema; spec.b: field not declared in schema",
        ),
        (
            '.metadata.labels.example.com/x: expected string, got &value.valueUnstructured{Value:"4711"}',
            "metadata.labels.example.com/x: expected string",
        ),
        ("4711", "a field has a wrong name or type"),
    ],
)
def test_apply_that_does_not_fit_names_the_field(text, said):
    with pytest.raises(RequestDenied) as refused:
        refuse(ApiStatus(message=UNTYPED + text, code=500))

    assert (refused.value.reason, str(refused.value)) == ("Invalid", said)
    assert "4711" not in said


def test_bad_quantity_is_a_refusal_with_advice():
    said = (
        "failed to convert new object (ns/dd; apps/v1, Kind=Deployment) to proper version: unable to convert unstructured "
        "object to apps/v1, Kind=Deployment: quantities must match the regular expression '^([+-]?[0-9.]+)([eE]*)$'"
    )
    with pytest.raises(RequestDenied, match="a quantity must be a number with a suffix"):
        refuse(ApiStatus(message=said, code=500))


def test_other_internal_error_is_worth_a_retry():
    for message in ("etcdserver: request timed out", "failed to create something (a/b; v1, Kind=Pod): x", ""):
        with pytest.raises(ApiServerUnreachable):
            refuse(ApiStatus(message=message, code=500))


def test_policy_denial_is_said_in_the_policys_words():
    words = "ValidatingAdmissionPolicy 'team' with binding 'team-all' denied request: each Deployment names its team"
    cause = StatusCause(message=words)
    status = ApiStatus(
        reason="Invalid",
        code=422,
        message=f'deployments.apps "dd" is forbidden: {words}',
        details=StatusDetails(causes=[cause]),
    )

    assert public_message(status) == words


@pytest.mark.parametrize(
    "words",
    [
        'admission webhook "deny.example.com" denied the request: use the mirror of images',
        "[maximum cpu usage per Container is 2, but limit is 4]",
        "failed quota: compute: must specify cpu for: main; memory for: main",
        'violates PodSecurity "restricted:latest": runAsNonRoot != true (pod or container "main" must set it)',
    ],
)
def test_admission_words_are_repeated(words):
    prefix = "" if words.startswith("admission") else 'pods "x" is forbidden: '

    assert public_message(ApiStatus(reason="Forbidden", code=403, message=prefix + words)) == words


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ('Invalid value: "hunter2": must be a number', "f: must be a number"),
        ("Invalid value: {'p': 'hunter2'}: must be one of 'hunter2'", "f: FieldValueInvalid"),
        ('Invalid value: "a: must hunter2"', "f: FieldValueInvalid"),
        ("Required value: field is immutable", "f: field is immutable"),
    ],
)
def test_refusal_names_field_and_requirement_not_the_value(message, said):
    causes = [StatusCause(field="f", reason="FieldValueInvalid", message=message)]

    assert public_message(ApiStatus(reason="Invalid", message="hunter2", details=StatusDetails(causes=causes))) == said


def test_forbidden_request_names_only_quota_or_right():
    quota = 'pods "x" is forbidden: exceeded quota: small, requested: pods=1, used: pods=2'
    right = 'leases is forbidden: User "system:serviceaccount:a:b" cannot create resource "leases"'

    assert public_message(ApiStatus(reason="Forbidden", message=quota)).startswith("exceeded quota: small")
    assert public_message(ApiStatus(reason="Forbidden", message=right)).startswith(
        'User "system:serviceaccount:a:b" cannot create'
    )
    assert public_message(ApiStatus(reason="Forbidden", message="admission webhook denied: hunter2")) == "Forbidden"


def test_undecodable_object_names_field_and_type():
    strange = 'failed to create typed patch object (ns/dd; apps/v1, Kind=Deployment): .spec.template.spec.containers[name="main"].env: expected list, got &{hunter2}'
    quoted = 'spec.template.spec.nodeName: Invalid value: "hunter2": hunter2'

    assert public_message(_bad(strange)) == 'spec.template.spec.containers[name="main"].env: expected list'
    assert public_message(_bad(quoted)) == "spec.template.spec.nodeName: BadRequest"
    assert public_message(_bad("hunter2")) == "BadRequest"


def _bad(message):
    return ApiStatus(reason="BadRequest", message=message)

"""API keys and token buckets: the tenant of a request, and how much each tenant may use."""

from hashlib import sha256

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.core.clock import SECOND, Nanos
from fleet.core.errors import ConfigurationRefused, Reason, RequestRejected
from fleet.router.tenants import BucketLevels, Tenants, TenantSettings, TenantUsageDelta

START = Nanos(5 * SECOND)


def after(seconds):
    return Nanos(START + round(seconds * SECOND))


def tenants(**settings):
    return Tenants(settings, START)


def with_key(*keys, **settings):
    return TenantSettings(api_key_sha256=tuple(sha256(key.encode()).hexdigest() for key in keys), **settings)


def limited(**settings):
    return tenants(acme=TenantSettings(**settings))


def refusal(call, *arguments):
    with pytest.raises(RequestRejected) as caught:
        call(*arguments)
    return caught.value


# Keys.


def test_without_keys_the_request_names_its_tenant():
    assert limited(weight=2).tenant("", "whoever") == "whoever"


def test_api_key_selects_its_tenant():
    known = tenants(acme=with_key("k1", "k2"), other=with_key("k3"))
    assert [known.tenant(f"Bearer {key}", "") for key in ("k1", "k2", "k3")] == ["acme", "acme", "other"]
    assert known.tenant("bearer k1", "acme") == "acme"


@pytest.mark.parametrize("authorization", ["", "Bearer", "Bearer ", "Bearer k2", "Basic k1", "k1", "Bearer \udcff"])
def test_unknown_key_is_unauthenticated(authorization):
    refused = refusal(tenants(acme=with_key("k1")).tenant, authorization, "acme")
    assert (refused.reason, refused.field) == (Reason.UNAUTHENTICATED, "authorization")
    assert "k1" not in refused.message
    assert "k2" not in refused.message


def test_request_cannot_name_another_tenant():
    refused = refusal(tenants(acme=with_key("k1"), other=with_key("k2")).tenant, "Bearer k1", "other")
    assert (refused.reason, refused.field) == (Reason.INVALID_ARGUMENT, "tenant")


def test_keys_are_compared_as_the_sent_bytes():
    """Send a key with bytes that are spaces in Latin-1, as which frontends decode headers."""
    sent = "schlüssel-à".encode()
    known = tenants(acme=with_key("schlüssel-à"))
    assert known.tenant(f"Bearer {sent.decode('latin-1')}", "") == "acme"


def test_two_tenants_cannot_share_a_key():
    with pytest.raises(ConfigurationRefused, match=r"tenants\.b\.api_key_sha256: .* of 'a' too"):
        tenants(a=with_key("k1", "k1"), b=with_key("k2", "k1"))


@pytest.mark.parametrize("name", ["requests_per_minute", "tokens_per_minute"])
@pytest.mark.parametrize("limit", [float("inf"), 0.5])
def test_invalid_limits_are_refused(name, limit):
    with pytest.raises(msgspec.ValidationError, match=name):
        msgspec.convert({name: limit}, TenantSettings)


@pytest.mark.parametrize("weight", [float("inf"), 5e-324, 0.0])
def test_invalid_weights_are_refused(weight):
    with pytest.raises(msgspec.ValidationError, match="weight"):
        msgspec.convert({"weight": weight}, TenantSettings)


# Limits.


def test_burst_of_one_minute_is_admitted_then_evenly():
    acme = limited(requests_per_minute=3)
    remaining = [acme.admit("acme", 10, START).requests.remaining for _ in range(3)]

    refused = refusal(acme.admit, "acme", 10, START)

    assert remaining == [2, 1, 0]
    assert (refused.reason, refused.retry_after_ms) == (Reason.RATE_LIMITED, 20_000)
    assert refusal(acme.admit, "acme", 10, after(19.9)).retry_after_ms == pytest.approx(100, abs=1)
    acme.admit("acme", 10, after(20))
    assert refusal(acme.admit, "acme", 10, after(20)).retry_after_ms == 20_000


def test_rejected_request_takes_nothing():
    acme = limited(requests_per_minute=1, tokens_per_minute=100)
    acme.admit("acme", 60, START)
    for _ in range(5):
        refusal(acme.admit, "acme", 60, START)
    assert acme.admit("acme", 1, after(60)).tokens.remaining == 99


def test_expected_request_is_refused_like_an_admitted_one():
    acme = limited(requests_per_minute=3, tokens_per_minute=100)
    acme.admit("acme", 100, START)

    asked = refusal(acme.expected("acme", START).__enter__)

    assert asked.message == refusal(acme.admit, "acme", 1, START).message
    with tenants().expected("acme", START), acme.expected("other", START):
        pass  # no limits


def test_expected_requests_are_refused_above_what_is_left():
    acme = limited(requests_per_minute=3)
    acme.admit("acme", 1, START)
    with acme.expected("acme", START):
        with acme.expected("acme", START):
            refused = refusal(acme.expected("acme", START).__enter__)
            soon = refusal(acme.expected("acme", after(19.5)).__enter__)
        with acme.expected("acme", START):
            pass
    assert (refused.reason, refused.retry_after_ms, soon.retry_after_ms) == (Reason.RATE_LIMITED, 1000, 500)
    assert refused.message == (
        "2 of this tenant's requests are being prepared (their images are fetched, or answers are resumed), and its limit"
        " of 3 requests a minute leaves no room for more; retry in 1.0 s"
    )


def test_expected_request_is_told_if_the_limit_is_used_up():
    acme = limited(requests_per_minute=1)
    with acme.expected("acme", START):
        acme.admit("acme", 1, START)
        assert refusal(acme.expected("acme", START).__enter__).message == refusal(acme.admit, "acme", 1, START).message


def test_expected_request_takes_nothing():
    acme = limited(requests_per_minute=2)
    with acme.expected("acme", START):
        pass
    assert acme.taken() == {}
    assert acme.usage()["acme"].requests == 0
    assert [acme.admit("acme", 1, START).requests.remaining for _ in range(2)] == [1, 0]


def test_long_answer_is_charged_afterwards():
    acme = limited(tokens_per_minute=600)
    acme.admit("acme", 100, START)
    acme.used("acme", 1100, START)  # 600 more than were left

    refused = refusal(acme.admit, "acme", 1, START)

    assert "tokens a minute" in refused.message
    assert refused.retry_after_ms == 60_100  # the time for 601 tokens
    acme.admit("acme", 1, after(60.11))


def test_remaining_limit_tells_when_it_is_full():
    allowance = limited(requests_per_minute=60, tokens_per_minute=6000).admit("acme", 100, START)
    assert (allowance.requests.limit, allowance.requests.remaining) == (60, 59)
    assert allowance.requests.full_in_seconds == pytest.approx(1.0)
    assert (allowance.tokens.limit, allowance.tokens.remaining) == (6000, 5900)
    assert allowance.tokens.full_in_seconds == pytest.approx(1.0)


def test_tenant_without_limits_is_always_admitted():
    some = tenants(acme=TenantSettings(requests_per_minute=1), free=TenantSettings(weight=2))
    assert all(some.admit(name, 10**6, START) is None for name in ("free", "unknown", "") for _ in range(10))


def test_time_going_backwards_fills_no_bucket():
    acme = limited(requests_per_minute=1)
    acme.admit("acme", 1, START)
    assert refusal(acme.admit, "acme", 1, Nanos(0)).retry_after_ms == 60_000
    acme.used("acme", 5, Nanos(0))
    assert refusal(acme.admit, "acme", 1, START).retry_after_ms == 60_000, "nor when it has come back to where it was"


# Several routers.


def test_sharing_routers_admit_as_much_as_one():
    """Exchange totals after every request: two routers together admit exactly what one router would admit in a minute."""
    limits = TenantSettings(requests_per_minute=10, tokens_per_minute=1000)
    routers = [Tenants({"acme": limits}, START) for _ in range(2)]
    left = {"requests": 10.0, "tokens": 1000.0}
    admitted = 0
    for number in range(40):
        router = routers[number % 2]
        try:
            router.admit("acme", 10, START)
            admitted += 1
        except RequestRejected:
            continue
        for each in routers:
            taken = each.taken().get("acme")
            if taken is not None:
                left["requests"] -= taken.requests
                left["tokens"] -= taken.tokens
        for each in routers:
            each.settle("acme", left["requests"], left["tokens"], START)
    assert admitted == 10
    assert left == {"requests": 0, "tokens": 900}


def test_usage_during_settling_is_kept():
    acme = limited(requests_per_minute=10)
    acme.admit("acme", 1, START)
    assert acme.taken()["acme"].requests == 1
    acme.admit("acme", 1, START)  # meanwhile

    acme.settle("acme", 9, 0, START)

    assert acme.admit("acme", 1, START).requests.remaining == 7
    assert acme.taken()["acme"].requests == 2


# Peer routers.


def sharing(others=2, **settings):
    routers = limited(**settings)
    routers.others, routers.on_taken = others, lambda: None
    return routers


def test_usage_on_peers_is_subtracted():
    here = sharing(requests_per_minute=3, tokens_per_minute=100)
    here.took_elsewhere("acme", TenantUsageDelta(requests=2, tokens=10), START)
    here.took_elsewhere("nobody", TenantUsageDelta(requests=2, tokens=10), START)

    assert here.left(START) == {"acme": BucketLevels(requests=1, tokens=90)}
    assert here.taken() == {}, "it is the other's to tell"


def test_router_is_unsure_past_its_share_until_others_heard():
    here = sharing(requests_per_minute=9)
    for _ in range(3):
        assert not here.is_unsure("acme", 1, START)
        here.admit("acme", 1, START)
    assert here.is_unsure("acme", 1, START)

    here.confirm(here.unconfirmed_totals())

    assert [here.admit("acme", 1, START) is None for _ in range(2)] == [False, False], "a third of six"
    assert here.is_unsure("acme", 1, START)


def test_older_confirmation_changes_nothing():
    """Confirm newer totals and then older ones: the older confirmation has no effect."""
    here, confirmed_once = sharing(requests_per_minute=30), sharing(requests_per_minute=30)
    for each in (here, confirmed_once):
        for _ in range(5):
            each.admit("acme", 1, START)
    older = here.unconfirmed_totals()
    here.confirm(here.unconfirmed_totals())
    here.confirm(older)
    confirmed_once.confirm(confirmed_once.unconfirmed_totals())

    let_in = [taken_until_unsure(each) for each in (here, confirmed_once)]

    assert let_in == [8, 8], "a third of what is left"


def taken_until_unsure(here):
    """Admit requests until the router would have to ask its peers; return the number of admitted requests."""
    count = 0
    while not here.is_unsure("acme", 1, START):
        here.admit("acme", 1, START)
        count += 1
    return count


def test_one_request_is_admitted_unheard_near_the_limit():
    here = sharing(requests_per_minute=2)
    assert not here.is_unsure("acme", 1, START)
    here.admit("acme", 1, START)
    assert here.is_unsure("acme", 1, START)


def test_router_is_sure_alone_and_of_an_empty_bucket():
    assert not sharing(others=0, requests_per_minute=2).is_unsure("acme", 1, START)
    here = sharing(requests_per_minute=2)
    for _ in range(2):
        here.admit("acme", 1, START)
    assert not here.is_unsure("acme", 1, START), "it is refused anyway"
    refusal(here.admit, "acme", 1, START)


def test_long_prompt_is_unsure_by_its_tokens():
    here = sharing(tokens_per_minute=300)
    here.admit("acme", 60, START)
    assert not here.is_unsure("acme", 40, START)
    assert here.is_unsure("acme", 41, START)


def test_lower_level_of_a_peer_is_adopted():
    here, there = sharing(requests_per_minute=10), sharing(requests_per_minute=10)
    here.admit("acme", 1, START)
    for _ in range(4):
        there.admit("acme", 1, START)

    for name, left in there.left(START).items():
        here.lower(name, left, START)
    for name, left in here.left(START).items():
        there.lower(name, left, START)

    assert here.left(START) == there.left(START) == {"acme": BucketLevels(requests=6, tokens=0)}


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=60), st.integers(4, 30))
def test_three_routers_admit_at_most_two_too_many(steps, limit):
    """Let three routers admit requests while their announcements arrive late, in order: at most two requests too many are admitted."""
    routers = [sharing(requests_per_minute=limit) for _ in range(3)]
    mail = [[] for _ in range(3)]
    let_in = 0

    def deliver(to, count):
        for _ in range(min(count, len(mail[to]))):
            routers[to].took_elsewhere("acme", mail[to].pop(0), START)

    for number, arrive in steps:
        here = routers[number]
        deliver(number, arrive)
        if here.is_unsure("acme", 1, START):
            totals = here.unconfirmed_totals()
            for other in {0, 1, 2} - {number}:
                deliver(other, len(mail[other]))
            here.confirm(totals)
            if here.is_unsure("acme", 1, START):
                continue
        try:
            here.admit("acme", 1, START)
        except RequestRejected:
            continue
        let_in += 1
        for taken in here.taken().values():
            for other in {0, 1, 2} - {number}:
                mail[other].append(taken)

    assert let_in <= limit + 2

"""Object cache: it never goes back to a state before one of its own writes, and reports only real changes."""

from fleet.net.kubernetes.cache import Cache
from fleet.net.kubernetes.views import KubernetesLease, LeaseSpec, NamedObject, ObjectMetadata


def an_object(version, *, name="a", uid="1", **labels):
    return NamedObject(
        metadata=ObjectMetadata(name=name, namespace="ns", uid=uid, resource_version=str(version), labels=labels)
    )


def a_cache():
    return Cache(lambda item: item.metadata.labels.get("of", ""))


def test_older_watch_event_does_not_replace_a_writes_answer():
    cache = a_cache()
    cache.put(an_object(10, of="dd", step="new"))

    assert cache.put(an_object(9, of="dd", step="old")) == []

    assert cache.get("ns", "a").metadata.labels["step"] == "new"


def test_change_has_before_and_after_only_if_they_differ():
    cache = a_cache()
    first, same, other = an_object(1, of="dd"), an_object(2, of="dd"), an_object(3, of="ee")

    assert cache.put(first) == [first]
    assert cache.put(same) == []
    assert cache.put(other) == [same, other]
    assert (list(cache.of("ns", "dd")), list(cache.of("ns", "ee"))) == ([], ["a"])


def test_a_renewal_of_a_lease_is_no_change():
    cache = a_cache()
    for version in (1, 2):
        spec = LeaseSpec(holder_identity="pod", renew_time=f"2026-01-01T00:00:0{version}Z")
        metadata = ObjectMetadata(name="pod", namespace="ns", uid="1", resource_version=str(version))
        changes = cache.put(KubernetesLease(metadata=metadata, spec=spec))

    assert changes == []
    assert cache.get("ns", "pod").spec.renew_time.endswith("02Z")


def test_removed_object_stays_gone_until_its_deletion_event():
    cache = a_cache()
    cache.put(an_object(1))
    cache.remove("ns", "a")

    assert cache.put(an_object(2)) == []
    assert cache.get("ns", "a") is None
    namesake = an_object(4, uid="2")
    assert cache.put(namesake) == [namesake]
    assert cache.end(an_object(3)) == []
    assert cache.get("ns", "a") is namesake


def test_list_removes_missing_objects_except_newer_writes():
    cache = a_cache()
    gone, late = an_object(1, name="gone"), an_object(9, name="late")
    elsewhere = NamedObject(metadata=ObjectMetadata(name="x", namespace="other", resource_version="1"))
    for each in (gone, late, elsewhere):
        cache.put(each)

    assert cache.fill([], "5", "ns") == [gone]

    assert (cache.get("ns", "late"), cache.get("other", "x")) == (late, elsewhere)


def test_returned_objects_do_not_change_with_the_cache():
    cache = a_cache()
    cache.put(an_object(1, of="dd"))
    for name in cache.of("ns", "dd"):
        cache.put(an_object(2, name=name, of="dd", step="on"))

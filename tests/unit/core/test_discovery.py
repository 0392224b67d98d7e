"""Discovery settings: valid ones are accepted, and invalid ones are refused with their path."""

import json

import pytest

from fleet.config import load
from fleet.core.discovery import EtcdDiscovery, FileDiscovery, KubernetesDiscovery
from fleet.core.errors import ConfigurationRefused
from fleet.router.settings.router import RouterSettings
from workers.settings import WorkerSettings


def loaded(tmp_path, discovery, kind=RouterSettings, **more):
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"discovery": discovery, **more}))
    return load(path, kind).discovery


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"kind": "file", "folder": "/srv/workers"}, FileDiscovery),
        ({"kind": "etcd", "endpoints": ["etcd-0:2379", "[::1]:2379"]}, EtcdDiscovery),
        ({"kind": "kubernetes", "cluster": "llama", "namespace": "serving"}, KubernetesDiscovery),
    ],
)
def test_routers_and_workers_accept_the_same_discovery(tmp_path, given, kind):
    of_router = loaded(tmp_path, given)
    of_worker = loaded(tmp_path, given, WorkerSettings, worker_id="w", model="tiny")

    assert isinstance(of_router, kind)
    assert of_router == of_worker


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "zookeeper"}, r"discovery\.kind: Invalid value 'zookeeper'"),
        ({"folder": "/srv"}, r"discovery: Object missing required field `kind`"),
        ({"kind": "file"}, r"discovery: Object missing required field `folder`"),
        ({"kind": "file", "folder": "/srv", "lease_seconds": 1}, r"discovery\.lease_seconds: Expected `int` >= 2"),
        ({"kind": "file", "folder": "/srv", "endpoints": []}, r"discovery\.endpoints: is not a known key"),
        ({"kind": "etcd", "endpoints": []}, r"discovery: endpoints: name at least one"),
        ({"kind": "etcd", "endpoints": ["etcd"]}, r"discovery: endpoints: 'etcd' is neither"),
        (
            {"kind": "etcd", "endpoints": ["e:1"], "credentials": {"insecure": True}},
            r"discovery: credentials: etcd uses",
        ),
        ({"kind": "kubernetes", "cluster": "a/b"}, r"discovery\.cluster: Expected `str` matching"),
        ({"kind": "kubernetes", "cluster": "a", "pod": "p"}, r"discovery: pod and pod_uid: set both or neither"),
    ],
)
def test_invalid_discovery_is_refused_with_its_path(tmp_path, given, message):
    with pytest.raises(ConfigurationRefused, match=message):
        loaded(tmp_path, given)

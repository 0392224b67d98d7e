"""Certificate files that are replaced while they are in use, by valid and by invalid files."""

import logging
import os
import re
import ssl
from pathlib import Path

import pytest

from kvstore.clock import SECOND
from kvstore.errors import BadCredentials
from kvstore.security.certificates import CertificateFiles, CertificateWatch, RenewedContext
from kvstore.security.credentials import Credentials
from tests.support.certificates import Authority
from tests.support.kvstore.builders import ManualClock


class Served:
    """Certificate files in use, and a clock; when the test moves the clock, the files are read again."""

    def __init__(self, folder: Path):
        self.authority = Authority(folder, "authority")
        self.certificate, self.key = folder / "served.pem", folder / "served.key"
        self.replace(**self.authority.issue("first"))
        self.clock = ManualClock()
        self.files = CertificateFiles(
            certificate=str(self.certificate),
            key=str(self.key),
            authority=self.authority.file,
            field="here",
            warning_seconds=0,
            logs=True,
            clock=self.clock,
        )

    def replace(self, *, certificate: str = "", key: str = "") -> None:
        for served, source in ((self.certificate, certificate), (self.key, key)):
            if source:
                if served.is_dir():
                    served.rmdir()
                elif not served.is_file():
                    served.unlink(missing_ok=True)  # a pipe or a device, into which the test must not write
                served.write_bytes(Path(source).read_bytes())

    def looked_at(self):
        """Let the files be checked again, and return the certificate that is then in use."""
        self.clock.move(3 * SECOND // 2)
        return self.files.pem


@pytest.fixture
def served(tmp_path):
    return Served(tmp_path)


def garbage(served):
    served.certificate.write_text("no certificate\n")


def key_of_another(served):
    served.replace(key=served.authority.issue("other")["key"])


def ended(served):
    served.replace(**served.authority.issue("ended", hours=(-2, -1)))


def not_begun(served):
    served.replace(**served.authority.issue("early", hours=(1, 2)))


def removed(served):
    served.key.unlink()


def half_written(served):
    served.certificate.write_bytes(served.certificate.read_bytes()[:300])


def emptied(served):
    served.certificate.write_bytes(b"")


def key_emptied(served):
    served.key.write_bytes(b"")


def pipe(served):
    served.key.unlink()
    os.mkfifo(served.key)


def endless(served):
    served.certificate.unlink()
    served.certificate.symlink_to("/dev/zero")


def folder(served):
    served.certificate.unlink()
    served.certificate.mkdir()


BREAKS = {
    emptied: "here.certificate: .* holds no certificates",
    key_emptied: "here.key: .* is not the private key of",
    pipe: "here.key: .* is a pipe, which cannot be read again",
    endless: "here.certificate: .* has more than 4194304 bytes",
    folder: "here.certificate: .* cannot be read: Is a directory",
    garbage: "here.certificate: .* holds no certificates",
    key_of_another: "here.key: .* is not the private key of",
    ended: "here.certificate: .* and not now",
    not_begun: "here.certificate: .* and not now",
    removed: "here.key: .* cannot be read: No such file or directory",
    half_written: "here.certificate: .* holds no certificates",
}


@pytest.mark.parametrize("breaking", BREAKS, ids=lambda each: each.__name__)
def test_files_that_cannot_be_used_leave_the_old_content(served, breaking, caplog):
    in_use, ends = served.files.pem, served.files.ends_at
    watch = CertificateWatch([served.files])
    context = RenewedContext(served.files, lambda: ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    before = context.current
    breaking(served)

    for _ in range(3):
        assert served.looked_at() == in_use
        assert context.current is before

    assert served.files.ends_at == ends
    said = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert [each.message for each in said] == ["renewed certificate cannot be used, the old one stays"]
    assert re.search(BREAKS[breaking], said[0].cause)
    assert values(watch) == {"fleet_tls_certificate_end_timestamp_seconds": ends, "fleet_tls_renewal_refused": 1.0}

    served.replace(**served.authority.issue("second"))
    assert served.looked_at().certificate == served.certificate.read_bytes()
    assert context.current is not before
    assert values(watch)["fleet_tls_renewal_refused"] == 0.0


def values(watch):
    samples = [sample for family in watch.collect() for sample in family.samples]
    assert {sample.labels["setting"] for sample in samples} == {"here"}
    return {sample.name: sample.value for sample in samples}


def test_restored_files_are_refused_no_longer(served):
    content = served.certificate.read_bytes()
    garbage(served)
    served.looked_at()
    assert served.files.renewal_refused
    served.certificate.write_bytes(content)

    served.looked_at()

    assert not served.files.renewal_refused


def test_files_are_read_at_most_once_in_a_look(served):
    in_use = served.files.pem
    served.replace(**served.authority.issue("second"))
    served.clock.move(SECOND // 2)

    assert served.files.pem == in_use
    assert served.looked_at() != in_use


@pytest.mark.parametrize("logs", [True, False])
def test_one_object_of_several_with_the_same_files_logs(served, caplog, logs):
    caplog.set_level(logging.INFO)
    own = {"certificate": str(served.certificate), "key": str(served.key)}
    files = CertificateFiles(**own, logs=logs)
    served.replace(**served.authority.issue("second"))
    assert files.look()
    garbage(served)
    assert not files.look()

    expected = ["certificate renewed", "renewed certificate cannot be used, the old one stays"]
    assert [each.message for each in caplog.records if "renewed" in each.message] == (expected if logs else [])


def test_watch_looks_as_seldom_as_the_files_say(served):
    watch = CertificateWatch([served.files])
    garbage(served)
    served.clock.move(SECOND // 2)
    watch.look()
    assert not served.files.renewal_refused
    served.clock.move(SECOND // 2)
    watch.look()
    assert served.files.renewal_refused


def test_watch_leaves_out_sections_without_certificates(tmp_path, served):
    secret = tmp_path / "secret"
    secret.write_text("0" * 32)
    own = {"certificate": str(served.certificate), "key": str(served.key)}

    watch = CertificateWatch.of({"a": Credentials(secret_file=str(secret)), "b": Credentials(**own)})

    assert {sample.labels["setting"] for family in watch.collect() for sample in family.samples} == {"b"}
    with pytest.raises(BadCredentials, match=r"c\.certificate: /none\.pem cannot be read"):
        CertificateWatch.of({"c": Credentials(certificate="/none.pem", key="/none.key")})


def test_key_never_shows_in_a_representation(served):
    assert "PRIVATE" not in repr(served.files.pem)

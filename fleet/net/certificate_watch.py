"""Certificates of a process of Fleet: reads the files that the settings name, and refuses files that cannot be used.

`kvstore.security.certificates` reads the files again when they have changed.
"""

from collections.abc import Mapping

from fleet.core.errors import ConfigurationRefused
from kvstore.errors import BadCredentials
from kvstore.security.certificates import CertificateFiles, CertificateWatch
from kvstore.security.credentials import Credentials
from kvstore.security.metrics_access import MetricsTls
from kvstore.service.metrics_server import metrics_certificates


def certificate_watch(sections: Mapping[str, Credentials], *further: CertificateFiles | None) -> CertificateWatch:
    """Return the watch of the certificate files that the settings `sections` name, and of the files in `further`.

    The keys of `sections` are the names of the sections. Values of `further` that are None are left out.

    Raises:
        ConfigurationRefused: A file cannot be used; the message names its field.
    """
    try:
        return CertificateWatch.of(sections, [each for each in further if each is not None])
    except BadCredentials as error:
        raise ConfigurationRefused(str(error)) from error


def metrics_port_certificates(tls: MetricsTls) -> CertificateFiles | None:
    """Return the certificate files of a port for metrics (`metrics_listen`); None if the settings name none: the port then has no TLS.

    Raises:
        ConfigurationRefused: A file cannot be used; the message names its field.
    """
    try:
        return metrics_certificates(tls)
    except BadCredentials as error:
        raise ConfigurationRefused(str(error)) from error

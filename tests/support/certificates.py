"""Certificate authority for tests: makes certificates while a test runs."""

import datetime as dt
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID


class Authority:
    """Signs certificates for 127.0.0.1, and keeps all files in one folder."""

    def __init__(self, folder: Path, name: str):
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._certificate = self._sign(self._name, self._key, is_authority=True)
        self.file = self._write(f"{name}.pem", self._certificate.public_bytes(serialization.Encoding.PEM))

    def issue(
        self, name: str, *, hours: tuple[int, int] = (-1, 1), hosts: Sequence[str] = (), rsa_key: bool = False
    ) -> dict[str, str]:
        """Return the fields `certificate` and `key` of `kvstore.security.credentials.Credentials`.

        Args:
            name: Name of the certificate and of its files.
            hours: Start and end of its validity, relative to now.
            hosts: DNS names besides 127.0.0.1.
            rsa_key: True: make an RSA key, so that ciphers without forward secrecy are possible; False: an elliptic curve key.
        """
        key = rsa.generate_private_key(65537, 2048) if rsa_key else ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), key, hours=hours, hosts=hosts
        )
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return {
            "certificate": self._write(f"{name}.pem", certificate.public_bytes(serialization.Encoding.PEM)),
            "key": self._write(f"{name}-key.pem", private),
        }

    def _sign(
        self,
        name: x509.Name,
        key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey,
        *,
        is_authority: bool = False,
        hours: tuple[int, int] = (-1, 1),
        hosts: Sequence[str] = (),
    ) -> x509.Certificate:
        now = dt.datetime.now(dt.UTC)
        builder = x509.CertificateBuilder(
            issuer_name=self._name,
            subject_name=name,
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=now + dt.timedelta(hours=hours[0]),
            not_valid_after=now + dt.timedelta(hours=hours[1]),
        )
        builder = builder.add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        if not is_authority:
            names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), *map(x509.DNSName, hosts)]
            here = x509.SubjectAlternativeName(names)
            builder = builder.add_extension(here, critical=False)
        return builder.sign(self._key, hashes.SHA256())

    def _write(self, name: str, content: bytes) -> str:
        path = self._folder / name
        path.write_bytes(content)
        return str(path)

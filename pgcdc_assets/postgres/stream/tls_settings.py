"""The TLS settings of a connection, derived from the options that libpq has resolved.

The rules are libpq's (src/interfaces/libpq/fe-secure-openssl.c, initialize_SSL; Postgres
documentation, 32.19 SSL Support), or stricter. An option without an equal in Python's `ssl` is left
to libpq.
"""

from __future__ import annotations

import ipaddress
import os
import pwd
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from psycopg import pq

from pgcdc_assets.postgres.stream.transport import LibpqRequired

# Protocol of the ALPN extension: Postgres documentation, 53.2.10 SSL Session Encryption.
ALPN = "postgresql"

# Before this version libpq ignores $HOME in its search for the default files.
_HOME_VERSION = 150_000

_VERSIONS = {"tlsv1.2": ssl.TLSVersion.TLSv1_2, "tlsv1.3": ssl.TLSVersion.TLSv1_3}
_OLD_VERSIONS = frozenset({"tlsv1", "tlsv1.1"})


@dataclass(frozen=True)
class TlsSettings:
    """How to encrypt a connection.

    Attributes:
        context: protocol versions, authorities, certificate of the client.
        server_hostname: name for SNI, and for the check of the certificate under verify-full; None:
            no name is sent.
        is_direct: begin with the TLS handshake, without an SSLRequest.
    """

    context: ssl.SSLContext
    server_hostname: str | None
    is_direct: bool

    @classmethod
    def of(cls, options: Mapping[str, str], host: str) -> TlsSettings:
        """Return the settings of a connection that libpq has established.

        Args:
            options: the connection's options by keyword, with libpq's defaults.
            host: the host that libpq has connected to.

        Raises:
            LibpqRequired: an option has no equal here.
        """
        for keyword in ("require_auth", "sslcrldir"):
            if options.get(keyword):
                raise LibpqRequired(f"{keyword} is set")
        sends_name = options.get("sslsni", "1") == "1" and not _is_address(host)
        checks_name = options.get("sslmode") == "verify-full"
        if checks_name and not (sends_name or _is_address(host)):
            raise LibpqRequired("sslsni is off under sslmode=verify-full")
        try:
            context = _context(options)
            # Last, because a context that checks names refuses to verify less.
            context.check_hostname = checks_name
        except (OSError, ValueError) as error:
            raise LibpqRequired(f"a TLS setting was refused: {error}") from error
        return cls(
            context=context,
            server_hostname=host if sends_name or checks_name else None,
            is_direct=options.get("sslnegotiation") == "direct",
        )


def _context(options: Mapping[str, str]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols([ALPN])
    _limit_versions(context, options)
    _load_authorities(context, options)
    _load_certificate(context, options)
    return context


def _limit_versions(context: ssl.SSLContext, options: Mapping[str, str]) -> None:
    # Below TLS 1.2 Python's minimum stays: stricter than libpq.
    lowest = options.get("ssl_min_protocol_version", "").lower()
    highest = options.get("ssl_max_protocol_version", "").lower()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if lowest and lowest not in _OLD_VERSIONS:
        context.minimum_version = _version(lowest)
    if highest:
        context.maximum_version = _version(highest)


def _version(name: str) -> ssl.TLSVersion:
    if name not in _VERSIONS:
        raise LibpqRequired(f"the protocol version {name} is not used here")
    return _VERSIONS[name]


def _load_authorities(context: ssl.SSLContext, options: Mapping[str, str]) -> None:
    """Verify the server's certificate if sslmode says so, or if the file of authorities exists."""
    is_required = options.get("sslmode", "").startswith("verify-")
    if options.get("sslrootcert") == "system":
        context.set_default_verify_paths()
        context.verify_mode = ssl.CERT_REQUIRED
        return
    authorities = _file(options, "sslrootcert", "root.crt")
    if not authorities.exists():
        if is_required:
            raise LibpqRequired("the file of certificate authorities does not exist")
        return
    context.load_verify_locations(cafile=authorities)
    context.verify_mode = ssl.CERT_REQUIRED
    revoked = _file(options, "sslcrl", "root.crl")
    if options.get("sslcrl") or revoked.exists():
        context.load_verify_locations(cafile=revoked)
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_CHAIN


def _load_certificate(context: ssl.SSLContext, options: Mapping[str, str]) -> None:
    mode = options.get("sslcertmode") or "allow"
    if mode == "disable":
        return
    if mode != "allow":
        raise LibpqRequired(f"sslcertmode is {mode}")
    certificate = _file(options, "sslcert", "postgresql.crt")
    if not certificate.exists():
        return
    if ":" in options.get("sslkey", ""):
        raise LibpqRequired("sslkey names a key of an engine")
    key = _file(options, "sslkey", "postgresql.key")
    # A callable, because without a password OpenSSL would ask on the terminal.
    context.load_cert_chain(certificate, key, lambda: options.get("sslpassword", ""))


def _file(options: Mapping[str, str], keyword: str, default: str) -> Path:
    if given := options.get(keyword):
        return Path(given)
    if pq.version() < _HOME_VERSION:
        raise LibpqRequired(f"this libpq finds the default of {keyword} by rules of its own")
    home = os.environ.get("HOME") or pwd.getpwuid(os.geteuid()).pw_dir
    return Path(home) / ".postgresql" / default


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True

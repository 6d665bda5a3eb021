"""The client's side of SCRAM-SHA-256 and SCRAM-SHA-256-PLUS.

Sources: RFC 5802 and RFC 7677; channel binding `tls-server-end-point`, RFC 5929 section 4; Postgres
documentation, 53.3 SASL Authentication. The user name is empty, because Postgres takes the user of
the startup message (src/interfaces/libpq/fe-auth-scram.c).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets

from pgcdc_assets.postgres.stream.transport import LibpqRequired

SCRAM, SCRAM_PLUS = "SCRAM-SHA-256", "SCRAM-SHA-256-PLUS"

# Signature algorithms of certificates by the bytes of their object identifier. RFC 5929 replaces
# MD5 and SHA-1 by SHA-256.
_RSA, _ECDSA = bytes.fromhex("2a864886f70d0101"), bytes.fromhex("2a8648ce3d04")
_CERTIFICATE_HASHES = {
    _RSA + b"\x04": "sha256",
    _RSA + b"\x05": "sha256",
    _RSA + b"\x0b": "sha256",
    _RSA + b"\x0c": "sha384",
    _RSA + b"\x0d": "sha512",
    _RSA + b"\x0e": "sha224",
    _ECDSA + b"\x01": "sha256",
    _ECDSA + b"\x03\x01": "sha224",
    _ECDSA + b"\x03\x02": "sha256",
    _ECDSA + b"\x03\x03": "sha384",
    _ECDSA + b"\x03\x04": "sha512",
}


class ScramClient:
    """One authentication, message by message.

    Args:
        password: the password. SASLprep leaves ASCII unchanged, and libpq uses a password that
            SASLprep refuses unchanged.
        certificate: the server's certificate in DER form, for SCRAM-SHA-256-PLUS; None for
            SCRAM-SHA-256.
        is_binding_possible: the client would bind the channel, but the server does not offer to.

    Attributes:
        is_verified: the server has proved that it knows the password.

    Raises:
        LibpqRequired: the password is not ASCII, or the signature algorithm of the certificate is
            unknown.
    """

    def __init__(
        self, password: str, certificate: bytes | None, *, is_binding_possible: bool
    ) -> None:
        if not password.isascii():
            raise LibpqRequired("the password has characters outside ASCII")
        self._password = password.encode()
        self._nonce = base64.b64encode(secrets.token_bytes(18)).decode()
        self._first = f"n=,r={self._nonce}"
        if certificate is None:
            self._header, self._binding = "y,," if is_binding_possible else "n,,", b""
        else:
            self._header, self._binding = "p=tls-server-end-point,,", end_point(certificate)
        self._server_signature = b""
        self.is_verified = False

    def first(self) -> bytes:
        """Return the client's first message."""
        return (self._header + self._first).encode()

    def answer(self, challenge: bytes) -> bytes:
        """Return the client's final message.

        Raises:
            ConnectionError: the server's message is malformed, or does not continue our nonce.
        """
        fields = _fields(challenge)
        nonce, salt, iterations = fields.get("r", ""), fields.get("s", ""), fields.get("i", "")
        if not (nonce.startswith(self._nonce) and len(nonce) > len(self._nonce)):
            raise ConnectionError("the server's SCRAM nonce does not continue the client's")
        if not (iterations.isdigit() and int(iterations) > 0):
            raise ConnectionError("the server's SCRAM iteration count is invalid")
        salted = hashlib.pbkdf2_hmac("sha256", self._password, _decoded(salt), int(iterations))
        bound = base64.b64encode(self._header.encode() + self._binding).decode()
        final = f"c={bound},r={nonce}"
        signed = f"{self._first},{challenge.decode()},{final}".encode()
        client_key = hmac.digest(salted, b"Client Key", "sha256")
        signature = hmac.digest(hashlib.sha256(client_key).digest(), signed, "sha256")
        proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
        server_key = hmac.digest(salted, b"Server Key", "sha256")
        self._server_signature = hmac.digest(server_key, signed, "sha256")
        return f"{final},p={base64.b64encode(proof).decode()}".encode()

    def verify(self, final: bytes) -> None:
        """Check the server's signature.

        Raises:
            ConnectionError: the server does not know the password.
        """
        signature = _decoded(_fields(final).get("v", ""))
        if not (self._server_signature and hmac.compare_digest(signature, self._server_signature)):
            raise ConnectionError("the server's SCRAM signature is wrong")
        self.is_verified = True


def end_point(certificate: bytes) -> bytes:
    """Return the hash of a certificate in DER form for the channel binding.

    Raises:
        LibpqRequired: the algorithm of the certificate's signature is unknown here.
    """
    # Certificate ::= SEQUENCE { tbsCertificate, signatureAlgorithm SEQUENCE { OID, ... }, ... }
    start, _ = _element(certificate, 0)
    _, start = _element(certificate, start)
    start, _ = _element(certificate, start)
    start, end = _element(certificate, start)
    name = _CERTIFICATE_HASHES.get(certificate[start:end])
    if name is None:
        raise LibpqRequired("the signature algorithm of the server's certificate is unknown")
    return hashlib.new(name, certificate).digest()


def _element(data: bytes, at: int) -> tuple[int, int]:
    """Return start and end of the content of the DER element at an offset."""
    length, start = data[at + 1], at + 2
    if length & 0x80:
        size = length & 0x7F
        length, start = int.from_bytes(data[start : start + size], "big"), start + size
    return start, start + length


def _fields(message: bytes) -> dict[str, str]:
    try:
        pairs = (part.partition("=") for part in message.decode("ascii").split(","))
        return {name: value for name, _, value in pairs}
    except UnicodeDecodeError as error:
        raise ConnectionError("the server's SCRAM message is malformed") from error


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise ConnectionError("the server's SCRAM message is malformed") from error

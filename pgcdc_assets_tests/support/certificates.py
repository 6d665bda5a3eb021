"""Certificates of a test server, of its client, and of their authority, by the program openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path

_CA_SETTINGS = """
[ca]
default_ca = authority
[authority]
database = {folder}/index.txt
crlnumber = {folder}/crlnumber
default_md = sha256
default_crl_days = 2
"""


class Certificates:
    """Files of an authority in a folder: `root.crt`, `<name>.crt`, `<name>.key`, `revoked.crl`.

    The names of servers: `good` (valid for localhost and 127.0.0.1), `ecdsa` (the same with an
    ECDSA key), `expired`, `wrong_name`, `unknown` (of another authority), `revoked`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._make_authority("root")
        self._make_authority("other")
        here = "DNS:localhost,IP:127.0.0.1"
        self._issue("good", here)
        self._issue("ecdsa", here)
        self._issue("expired", here, days=-1)
        self._issue("wrong_name", "DNS:elsewhere.example")
        self._issue("unknown", here, authority="other")
        self._issue("revoked", here)
        self._issue("cert_user", "DNS:client")
        self._openssl(
            *("rsa", "-aes256", "-passout", "pass:sesame"),
            *("-in", self.path("cert_user.key"), "-out", self.path("locked.key")),
        )
        Path(self.path("locked.key")).chmod(0o600)
        self._make_revocation_list()

    def path(self, name: str) -> str:
        """Return the path of a file."""
        return str(self.folder / name)

    def _make_authority(self, name: str) -> None:
        self._openssl(
            *("req", "-new", "-x509", "-nodes", "-days", "2", "-subj", f"/CN=authority {name}"),
            *("-out", self.path(f"{name}.crt"), "-keyout", self.path(f"{name}.key")),
        )

    def _issue(self, name: str, names: str, *, days: int = 2, authority: str = "root") -> None:
        key = ["-newkey", "rsa:2048"]
        if name == "ecdsa":
            key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        request, extensions = self.path(f"{name}.csr"), self.folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName={names}\n")
        self._openssl(
            *("req", "-new", "-nodes", "-subj", f"/CN={name}", *key),
            *("-out", request, "-keyout", self.path(f"{name}.key")),
        )
        Path(self.path(f"{name}.key")).chmod(0o600)
        self._openssl(
            *("x509", "-req", "-in", request, "-days", str(days), "-extfile", str(extensions)),
            *("-CA", self.path(f"{authority}.crt"), "-CAkey", self.path(f"{authority}.key")),
            *("-CAcreateserial", "-out", self.path(f"{name}.crt")),
        )

    def _make_revocation_list(self) -> None:
        settings = self.folder / "ca.cnf"
        settings.write_text(_CA_SETTINGS.format(folder=self.folder))
        (self.folder / "index.txt").touch()
        (self.folder / "crlnumber").write_text("01\n")
        signer = ["-config", str(settings), "-cert", self.path("root.crt")]
        signer += ["-keyfile", self.path("root.key")]
        self._openssl("ca", *signer, "-revoke", self.path("revoked.crt"))
        self._openssl("ca", *signer, "-gencrl", "-out", self.path("revoked.crl"))

    @staticmethod
    def _openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True)

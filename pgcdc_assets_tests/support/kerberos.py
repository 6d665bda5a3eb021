"""A Kerberos realm on this machine, and a Postgres server that accepts GSSAPI encryption.

The programs are those of Debian's packages krb5-kdc and krb5-user.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pgcdc_assets.demo.server import UNSAFE_BUT_FAST, EmbeddedServer
from pgcdc_assets.local import free_port
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.waits import wait_until

# The embedded servers are built without GSSAPI.
VERSION = 15

PROGRAMS = ("krb5kdc", "kdb5_util", "kadmin.local", "kinit")

_REALM = "PGCDC.TEST"
_CLIENT = f"""
[libdefaults]
default_realm = {_REALM}
dns_lookup_kdc = false
dns_lookup_realm = false
dns_canonicalize_hostname = false
rdns = false
[realms]
{_REALM} = {{
  kdc = 127.0.0.1:%(port)s
}}
"""
_KDC = f"""
[realms]
{_REALM} = {{
  kdc_listen = 127.0.0.1:%(port)s
  kdc_tcp_listen = 127.0.0.1:%(port)s
  database_name = %(folder)s/principals
  key_stash_file = %(folder)s/stash
  acl_file = %(folder)s/acl
}}
[dbmodules]
db_module_dir = %(modules)s
"""


class Realm:
    """A realm with the principals of the server and of the user `capturer`, who has a ticket.

    Args:
        folder: an empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # The server's user reads the settings of the client.
        folder.chmod(0o755)
        kdc = shutil.which("krb5kdc")
        assert kdc is not None
        modules = next(Path(kdc).resolve().parents[1].glob("lib/*/krb5/plugins/kdb"))
        values = {"port": free_port(), "folder": folder, "modules": modules}
        (folder / "krb5.conf").write_text(_CLIENT % values)
        (folder / "kdc.conf").write_text(_KDC % values)
        self.environment = {
            "KRB5_CONFIG": str(folder / "krb5.conf"),
            "KRB5_KDC_PROFILE": str(folder / "kdc.conf"),
            "KRB5CCNAME": f"FILE:{folder}/tickets",
            "KRB5RCACHENAME": "none:",
        }
        self._run("kdb5_util", "create", "-s", "-P", "sesame", "-r", _REALM)
        for principal in ("postgres/localhost", "capturer"):
            keytab = folder / f"{principal.partition('/')[0]}.keytab"
            self._run("kadmin.local", "-q", f"addprinc -randkey {principal}")
            self._run("kadmin.local", "-q", f"ktadd -k {keytab} {principal}")
        self._kdc = subprocess.Popen([kdc, "-n"], env={**os.environ, **self.environment})
        wait_until(self._take_ticket, "the ticket")

    def close(self) -> None:
        self._kdc.kill()
        self._kdc.wait()

    def _take_ticket(self) -> bool:
        try:
            self._run("kinit", "-k", "-t", str(self.folder / "capturer.keytab"), "capturer")
        except subprocess.CalledProcessError:
            return False
        return True

    def _run(self, *command: str) -> None:
        environment = {**os.environ, **self.environment}
        subprocess.run(command, check=True, capture_output=True, env=environment)


@contextlib.contextmanager
def gssapi_server(realm: Realm) -> Iterator[EmbeddedServer]:
    """Start a server that accepts `capturer` through an encrypted connection only.

    The environment of this process has the settings of the realm.
    """
    # The server's user cannot read pytest's temporary folder.
    folder = Path(tempfile.mkdtemp(prefix="pgcdc-test-gssapi-")) / "data"
    server = EmbeddedServer(folder, VERSION, UNSAFE_BUT_FAST)
    try:
        server.start()
        Database(server, "postgres").execute("create role capturer login replication superuser")
        server.stop()
        keytab = server.data_dir / "postgres.keytab"
        shutil.copy(realm.folder / "postgres.keytab", keytab)
        owner = server.data_dir.stat()
        shutil.chown(keytab, owner.st_uid, owner.st_gid)
        server.settings |= {"krb_server_keyfile": str(keytab)}
        hba = server.data_dir / "pg_hba.conf"
        rules = "hostgssenc all capturer all gss include_realm=0\nhost all capturer all reject\n"
        hba.write_text(rules + hba.read_text())
        server.start()
        yield server
    finally:
        server.remove()
        folder.parent.rmdir()

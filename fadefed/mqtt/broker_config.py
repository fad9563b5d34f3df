"""A mosquitto configuration in which a device can write only its own uplink, and the gateway can read none of it.

Users: one per device (named like it), `gateway` (the aggregator), and `channel` (the proxy, the only reader of the
uplink and the one through which the gateway speaks).
"""

import base64
import hashlib
import os
import secrets
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from fadefed.errors import ConfigError
from fadefed.files import write_atomic
from fadefed.mqtt.topics import GATEWAY, PROXY, Topics, check_device_name

HASH_ROUNDS = 101  # mosquitto 2's own default for its PBKDF2-SHA512 password file


@dataclass(frozen=True)
class BrokerFiles:
    """Where things were written. ca is None without TLS."""

    config: Path
    credentials: Path
    ca: Path | None


def write_broker_config(
    folder: Path,
    devices: list[str],
    *,
    port: int | None = None,
    listen: str = "0.0.0.0",
    tls_host: str | None = None,
    prefix: str = "fadefed",
) -> BrokerFiles:
    """Write mosquitto.conf, acl, passwd, one password file per user and, with `tls_host`, a CA and certificate.

    Existing passwords and certificates are kept, so that a device can be added later. Raises ConfigError.
    """
    if not devices:
        raise ConfigError("No device was named. Give --devices board-1,board-2 and so on.")
    topics = Topics(prefix)
    users = [*(check_device_name(name) for name in devices), GATEWAY, PROXY]
    folder = folder.resolve()
    credentials = folder / "credentials"
    credentials.mkdir(parents=True, exist_ok=True)
    lines = []
    for user in users:
        path = credentials / f"{user}.password"
        if not path.exists():
            write_atomic(path, (secrets.token_urlsafe(24) + "\n").encode())
            path.chmod(0o600)
        lines.append(f"{user}:{_password_hash(path.read_text().strip())}")
    write_atomic(folder / "passwd", ("\n".join(lines) + "\n").encode())
    # Mosquitto reads the file before it gives up root, and warns when others may read it.
    (folder / "passwd").chmod(0o600)
    write_atomic(folder / "acl", _access_list(topics, devices).encode())
    (folder / "acl").chmod(0o600)
    config = [
        "# Written by `fadefed broker-config`; write it again to add devices.",
        f"listener {port or (8883 if tls_host else 1883)} {listen}",
        "allow_anonymous false",
        f"password_file {folder / 'passwd'}",
        f"acl_file {folder / 'acl'}",
        "set_tcp_nodelay true",
        "max_queued_messages 10000",
        "max_inflight_messages 100",
        "persistence false",
    ]
    if os.geteuid() == 0:
        config.append("user root")  # the passwords above are readable by their owner only
    ca = None
    if tls_host is not None:
        ca = _certificates(folder, tls_host)
        config += [
            f"certfile {folder / 'server.crt'}",
            f"keyfile {folder / 'server.key'}",
            "tls_version tlsv1.2",
        ]
    write_atomic(folder / "mosquitto.conf", ("\n".join(config) + "\n").encode())
    return BrokerFiles(folder / "mosquitto.conf", credentials, ca)


def _access_list(topics: Topics, devices: list[str]) -> str:
    lines = []
    for name in devices:
        lines += [
            f"user {name}",
            f"topic write {topics.up(name, '#')}",
            f"topic read {topics.down(name, '#')}",
            f"topic read {topics.down('all', '#')}",
            "",
        ]
    lines += [
        f"user {GATEWAY}",
        f"topic write {topics.down('all', '#')}",
        f"topic write {topics.down('+', 'order/#')}",
        "",
    ]
    lines += [
        f"user {PROXY}",
        f"topic read {topics.up('+', '#')}",
        f"topic write {topics.down('+', '#')}",
        "",
    ]
    return "\n".join(lines)


def _password_hash(password: str) -> str:
    salt = os.urandom(12)
    digest = hashlib.pbkdf2_hmac("sha512", password.encode(), salt, HASH_ROUNDS)
    return f"$7${HASH_ROUNDS}${base64.b64encode(salt).decode()}${base64.b64encode(digest).decode()}"


def _certificates(folder: Path, host: str) -> Path:
    """A CA of our own and a server certificate for `host`, made by openssl; the CA's certificate."""
    ca = folder / "ca.crt"
    if (folder / "server.crt").exists() and ca.exists():
        return ca
    openssl = shutil.which("openssl")
    if openssl is None:
        raise ConfigError("TLS needs the program openssl to make certificates: apt-get install openssl.")
    kind = "IP" if host.replace(".", "").isdigit() or ":" in host else "DNS"
    write_atomic(folder / "server.ext", f"subjectAltName={kind}:{host}\nextendedKeyUsage=serverAuth\n".encode())
    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    authority = ["-subj", "/CN=FadeFed CA", "-days", "3650", "-addext", "keyUsage=critical,keyCertSign,cRLSign"]
    signing = ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "825", "-extfile", "server.ext"]
    commands = [
        ["req", "-x509", *new_key, *authority, "-keyout", "ca.key", "-out", "ca.crt"],
        ["req", *new_key, "-subj", f"/CN={host}", "-keyout", "server.key", "-out", "server.csr"],
        ["x509", "-req", "-in", "server.csr", *signing, "-out", "server.crt"],
    ]
    for command in commands:
        done = subprocess.run([openssl, *command], cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigError(f"openssl could not make the certificates: {done.stderr.strip()[-300:]}")
    for name in ("ca.key", "server.key"):
        (folder / name).chmod(0o600)
    return ca

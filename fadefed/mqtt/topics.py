"""Topics. Everything a device says is under `PREFIX/up/DEVICE`, everything it hears under `PREFIX/down`.

| topic                       | retained | from -> to            | content |
|-----------------------------|----------|-----------------------|---------|
| up/DEVICE/status            | yes      | device (and its will) | online or offline |
| up/DEVICE/hello             | no       | device -> gateway     | run joined, number of training examples |
| up/DEVICE/report            | no       | device -> gateway     | one report; the only topic the channel touches |
| down/all/manifest           | yes      | gateway -> all        | the federation: method, seed, tasks, files |
| down/all/file/SHA256        | yes      | gateway -> all        | one file of a task |
| down/all/shared             | yes      | gateway -> all        | tensors shared by an exchange |
| down/all/call               | no       | gateway -> all        | "say hello again" |
| down/DEVICE/order           | no       | gateway -> device     | one order |

A message above the chunk limit goes out as chunks on TOPIC/0, TOPIC/1, ... (`fadefed.mqtt.chunks`).
"""

import re
from dataclasses import dataclass

from fadefed.errors import ConfigError

DEVICE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
GATEWAY = "gateway"
PROXY = "channel"
RESERVED = ("all", GATEWAY, PROXY)


def check_device_name(name: str) -> str:
    """`name`, or ConfigError: a device's name is a level of its topics and, with passwords, its user name."""
    if not DEVICE_NAME.fullmatch(name) or name in RESERVED:
        raise ConfigError(
            f"'{name}' cannot name a device. Use 1 to 64 letters, digits, '.', '_' or '-', starting with a letter or "
            f"digit, and none of: {', '.join(RESERVED)}."
        )
    return name


@dataclass(frozen=True)
class Topics:
    """Topic names under one prefix; one federation at a time runs under a prefix."""

    prefix: str = "fadefed"

    def __post_init__(self) -> None:
        if not self.prefix or re.search(r"[+#\s\x00]", self.prefix) or self.prefix.strip("/") != self.prefix:
            raise ConfigError(
                f"'{self.prefix}' cannot be a topic prefix. Use words separated by '/', without '+', '#' or spaces."
            )

    def up(self, device: str, kind: str) -> str:
        """kind: status, hello or report; device `+` subscribes to all."""
        return f"{self.prefix}/up/{device}/{kind}"

    def down(self, device: str, kind: str) -> str:
        """kind: order; with device `all`: manifest, file/SHA256, shared, call."""
        return f"{self.prefix}/down/{device}/{kind}"

    def parse(self, topic: str) -> tuple[str, str, str, int | None] | None:
        """(direction, device, kind, chunk index or None) of a topic, or None when it is not one of ours."""
        if not topic.startswith(self.prefix + "/"):
            return None
        parts = topic[len(self.prefix) + 1 :].split("/")
        if len(parts) < 3 or parts[0] not in ("up", "down"):
            return None
        index = None
        if len(parts) > 3 and len(parts[-1]) <= 6 and parts[-1].isascii() and parts[-1].isdigit():
            index = int(parts.pop())
        return parts[0], parts[1], "/".join(parts[2:]), index

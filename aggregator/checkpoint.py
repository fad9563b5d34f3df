"""The checkpoint: all that lets a killed aggregator go on as if nothing had happened."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fadefed.errors import ConfigError, MessageError
from fadefed.files import write_atomic
from fadefed.messages.wire import pack_state, unpack_state


@dataclass
class Checkpoint:
    """run: the run's identity. exchange: the last one absorbed. roster: {device: [number, samples]} in order of joining.

    online: the devices that were there. config: digest of what must not change between restarts.
    """

    run: bytes
    config: str
    exchange: int = 0
    roster: dict[str, list[int]] = field(default_factory=dict)
    online: list[str] = field(default_factory=list)
    server: dict[str, Any] | None = None
    finished: bool = False

    def save(self, path: Path) -> None:
        write_atomic(path, pack_state(self.__dict__))

    @classmethod
    def load(cls, path: Path, config: str) -> "Checkpoint | None":
        """The checkpoint at `path`, None where there is none. Raises ConfigError when it belongs to another federation."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            checkpoint = cls(**unpack_state(data))
        except (MessageError, TypeError) as error:
            raise ConfigError(
                f"{path}: is not a readable checkpoint ({error}). Move it away to start afresh."
            ) from error
        if checkpoint.config != config:
            raise ConfigError(
                f"{path}: belongs to a federation with other settings. Give a fresh --run folder, or the old file back."
            )
        return checkpoint

"""What a board keeps on disk: task files by their SHA-256, and the last committed answer."""

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path

from fadefed.errors import MessageError
from fadefed.files import write_atomic
from fadefed.messages.wire import pack_state, unpack_state
from fadefed.methods.method import State

log = logging.getLogger("fadefed.client")


@dataclass(frozen=True)
class Commit:
    """The last answered order and all that follows from it, written together.

    digest: of the order's bytes. before: the state that the answer started from, so that a gateway which forgot the
    exchange and orders something else under its number gets a correct answer too.
    """

    run: bytes
    exchange: int
    digest: bytes
    report: bytes
    before: State
    state: State


class Store:
    """A folder of the board's own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def has_file(self, sha256: str) -> bool:
        """Whether the file is here and still whole."""
        path = self.file(sha256)
        return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256

    def file(self, sha256: str) -> Path:
        return self.folder / "files" / sha256

    def put_file(self, sha256: str, data: bytes) -> None:
        """Keep a file. Raises MessageError when the bytes are not those that were promised."""
        if hashlib.sha256(data).hexdigest() != sha256:
            raise MessageError(f"The file {sha256[:12]} arrived damaged: its SHA-256 does not fit.")
        write_atomic(self.file(sha256), data)

    def graphs(self, task: str, files: dict[str, str]) -> Path:
        """A folder in which the task's files {name: sha256} lie under their names."""
        folder = self.folder / "tasks" / task
        folder.mkdir(parents=True, exist_ok=True)
        for name, sha256 in files.items():
            link = folder / name
            link.unlink(missing_ok=True)
            link.symlink_to(self.file(sha256).resolve())
        return folder

    def commit(self, commit: Commit) -> None:
        """Write report and state together; after this returns, a power cut cannot part them."""
        write_atomic(self.folder / "commit", pack_state(commit.__dict__))

    def last_commit(self, run: bytes) -> Commit | None:
        """The last commit of this run, or None."""
        try:
            data = unpack_state((self.folder / "commit").read_bytes())
            commit = Commit(**data)
        except FileNotFoundError:
            return None
        except (MessageError, TypeError) as error:
            log.warning("The stored answer is unreadable (%s); starting without it.", error)
            return None
        return commit if commit.run == run else None

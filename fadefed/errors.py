"""The one exception family. Every message says what was wrong, where, and what to do."""


class FadeFedError(Exception):
    """A mistake or fault that a user can act on. The command line prints it and exits with code 2."""


class ConfigError(FadeFedError):
    """A configuration file or command-line option is wrong."""


class DataError(FadeFedError):
    """A data source is missing, unreadable, or does not fit the task."""


class MessageError(FadeFedError):
    """Bytes from the network (or from disk) are not a valid FadeFed message."""


class EngineError(FadeFedError):
    """An engine cannot evaluate what it was asked to."""


class NonFiniteError(FadeFedError):
    """A tensor holds NaN or infinity where only numbers make sense."""


class ConnectionFailed(FadeFedError):
    """The broker cannot be reached or refuses us."""

"""Every exception Paceline raises on purpose: message, hint, exit code, HTTP status.

Knows the wording rules (field path in backticks, the bound, the value given, a blank line, `hint:`). Knows nothing of
how errors are printed.
"""

from __future__ import annotations


class PacelineError(Exception):
    """Base of all expected failures. `str(error)` is the message followed by the hint, ready to show to a user."""

    exit_code = 1
    http_status = 500

    def __init__(self, message: str, hint: str | None = None):
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n\nhint: {self.hint}"


class ConfigError(PacelineError):
    """The config file, an environment variable or a command line option is wrong."""

    exit_code = 2
    http_status = 400


class CheckpointError(PacelineError):
    """A checkpoint cannot be found, is truncated, corrupt, or of an unsupported kind."""

    exit_code = 3


class HubUnreachableError(CheckpointError):
    """A checkpoint is not on this machine and the hub cannot be, or was not to be, asked for it."""


class CompatibilityError(PacelineError):
    """Target and draft cannot work together, or an engine cannot express what was asked."""

    exit_code = 3


class BuildError(PacelineError):
    """Building an engine failed: no space, no compiler, a quality bound missed."""

    exit_code = 4


class EngineFolderError(PacelineError):
    """An engine folder is half-written, edited, or from another version."""

    exit_code = 5


class DeviceError(PacelineError):
    """The device asked for is not here, or lacks what is needed."""

    exit_code = 6


class RequestError(PacelineError):
    """A request cannot be honoured as written. `field` names the parameter."""

    exit_code = 2
    http_status = 400

    def __init__(self, message: str, hint: str | None = None, field: str | None = None):
        super().__init__(message, hint)
        self.field = field


class CapacityError(PacelineError):
    """The request is valid but does not fit into what this engine was built for: trying again will not help."""

    exit_code = 7
    http_status = 400


class QueueFullError(CapacityError):
    """The server has as many requests as it takes: trying again later may help."""

    http_status = 429


class RequestTimeoutError(PacelineError):
    """A request took longer than the server allows."""

    http_status = 504


class EngineDeadError(PacelineError):
    """The engine has stopped, for the reason given, and serves nobody any more."""

    http_status = 503

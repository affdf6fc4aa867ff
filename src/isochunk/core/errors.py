"""Every error that isochunk raises on purpose."""

__all__ = [
    "BrokenAnswerError",
    "ConfigError",
    "FitError",
    "IsochunkError",
    "ModelError",
    "PlanError",
    "ProfileError",
    "ServerError",
    "WorkloadError",
]


class IsochunkError(Exception):
    """Root of isochunk's errors: the message names the value, the limit and the remedy."""


class ModelError(IsochunkError, ValueError):
    """A cost model's coefficients are not usable."""


class FitError(IsochunkError, ValueError):
    """Samples can't determine a cost model."""


class PlanError(IsochunkError, ValueError):
    """A plan was asked for with arguments outside their range."""


class ProfileError(IsochunkError, ValueError):
    """A profile file can't be read or belongs to another deployment."""


class ConfigError(IsochunkError, ValueError):
    """The configuration given to the plugin or a command is wrong."""


class ServerError(IsochunkError, RuntimeError):
    """A server can't be reached, refuses a request, or is not what a command needs."""


class BrokenAnswerError(ServerError):
    """A server, or the way to it, failed under a request that may well succeed when it is sent again."""


class WorkloadError(IsochunkError, ValueError):
    """A workload to simulate is empty, malformed or beyond the deployment's limits."""

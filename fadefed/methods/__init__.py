"""Learning methods, one file each: Config, Server, Client. To add one, add a file and a line here."""

from fadefed.errors import ConfigError
from fadefed.methods import fedavg, fedsgd, local, mtfeel, sign_sgd
from fadefed.methods.method import Method

METHODS = {
    "fedavg": Method("fedavg", fedavg.Config, fedavg.Server, fedavg.Client),
    "fedsgd": Method("fedsgd", fedsgd.Config, fedsgd.Server, fedsgd.Client),
    "local": Method("local", local.Config, local.Server, local.Client),
    "mtfeel": Method("mtfeel", mtfeel.Config, mtfeel.Server, mtfeel.Client),
    "sign-sgd": Method("sign-sgd", sign_sgd.Config, sign_sgd.Server, sign_sgd.Client),
}


def find_method(name: str) -> Method:
    """The method `name`. Raises ConfigError that lists those known."""
    if name not in METHODS:
        raise ConfigError(f"Unknown method '{name}'. Known: {', '.join(sorted(METHODS))}.")
    return METHODS[name]


__all__ = ["METHODS", "Method", "find_method"]

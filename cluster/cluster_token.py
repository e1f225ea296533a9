"""The token that a Ray cluster may ask for: found where Ray keeps it, shown, asked for where it is missing.

`ray start --head` asks every client for a token once there is one on its machine. Ray itself then says 401 to
one command and only "failed to connect" to another, after 20 s.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import grpc
import ray
from ray._private import services

from .fleet import PoolError

try:
    from ray import _raylet
    from ray._private.authentication import authentication_token_setup as token_setup
except ImportError:  # an older Ray knows no tokens
    token_setup = None

MODE = "RAY_AUTH_MODE"
ASK_S = 5.0
# Every Ray that knows tokens has it, it needs no arguments and changes nothing.
HARMLESS = "/ray.rpc.NodeInfoGcsService/CheckAlive"


class TokenRefused(PoolError):
    """A cluster does not take the token of this process, or it has none. Says what to type."""


def use_token() -> None:
    """Show the token that lies ready here to a cluster that asks for one, as Ray's own commands do.

    Ray's own init does so only where RAY_AUTH_MODE says token, its job client likewise; what that says, if
    anything, still holds.
    """
    if token_setup is not None and hasattr(token_setup, "maybe_enable_token_auth_if_token_available"):
        logging.getLogger(token_setup.__name__).setLevel(logging.ERROR)
        token_setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def refuse_missing_token(address: str) -> None:
    """Ask a cluster whether it takes the token of this process; Ray itself would ask it for 20 s.

    address: host:port of Ray's own port, or "auto". What does not understand the question is left to Ray.
    Raises: TokenRefused.
    """
    place = _newest_cluster() if address == "auto" else address
    shown = _token()
    header = [("authorization", f"Bearer {shown}")] if shown and os.environ.get(MODE) == "token" else []
    with grpc.insecure_channel(place) as channel:
        try:
            channel.unary_unary(HARMLESS)(b"", timeout=ASK_S, metadata=header)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise TokenRefused(f"cannot connect to Ray at {place!r}: {advice()}") from error


def is_refusal(error: BaseException) -> bool:
    """Whether Ray says that a cluster did not take a token. An older Ray has no such error."""
    return isinstance(error, getattr(ray.exceptions, "AuthenticationError", ()))


def _newest_cluster() -> str:
    """What Ray itself means by "auto", as far as it is noted on this machine."""
    find = getattr(services, "find_bootstrap_address", None)
    return (find(None) if find is not None else None) or ""


def advice() -> str:
    """Exactly what to type after a cluster did not take what this process showed it."""
    mode = os.environ.get(MODE)
    steps = (
        "run `ray get-auth-token` on its head node, and here `export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=...`"
    )
    if mode is not None and mode.lower() != "token":
        return f"the cluster asks for a token, and {MODE} is {mode!r} here: unset it, or {steps}"
    if not _token():
        places = "RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token"
        return f"the cluster asks for a token, and there is none here ({places}): {steps} with what it says"
    return f"the token found here is not the cluster's: {steps} with what it says"


def _token() -> str:
    """The token of this process's user, wherever Ray finds it; empty if there is none."""
    if token_setup is None or not hasattr(_raylet, "AuthenticationTokenLoader"):
        return ""
    loader: Any = _raylet.AuthenticationTokenLoader.instance()
    if not loader.has_token(ignore_auth_mode=True):
        return ""
    return str(loader.get_raw_token(ignore_auth_mode=True))

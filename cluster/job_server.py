"""Ray's job server over HTTP: found, shown our token, asked with a time limit, its errors told apart."""

from __future__ import annotations

import logging
import os
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from ray._private.runtime_env import packaging
from ray.job_submission import JobSubmissionClient

from .cluster_token import TokenRefused, advice, is_refusal, refuse_missing_token, use_token
from .errors import InfrastructureError, UsageError
from .following import ServerUnreachable
from .submitted import JobView

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
PROBE_S = 3.0
ANSWER_S = 20.0
# Packing and sending a working folder of Ray's largest size.
SUBMIT_S = 600.0

T = TypeVar("T")
_QUIET = logging.getLogger(f"{__name__}.packing")
_QUIET.setLevel(logging.ERROR)


class RayJobServer:
    """The job server of one cluster."""

    def __init__(self, address: str | None) -> None:
        """Connect. address: http(s)://host:port, host:port of either the job server or Ray, or None for
        RAY_API_SERVER_ADDRESS, RAY_ADDRESS, or the cluster of this machine.

        Raises: InfrastructureError, with what to type if the cluster asks for a token.
        """
        use_token()
        self.address = job_server_address(address)
        # Ray lets the variable win over what it is told.
        os.environ["RAY_API_SERVER_ADDRESS"] = self.address
        try:
            if not self.address.startswith("http"):
                refuse_missing_token(self.address)
            self._client = within(ANSWER_S, lambda: JobSubmissionClient(self.address))
        except TokenRefused as error:
            raise InfrastructureError(str(error)) from error
        except Exception as error:
            raise self._cannot("reach the job server", error) from error

    def submit(self, job: str, entrypoint: str, runtime_env: dict[str, Any]) -> bool:
        """Submit a job under this id. False if there is one of that id already.

        Raises: InfrastructureError, UsageError if Ray refuses the runtime environment.
        """
        try:
            within(
                SUBMIT_S,
                lambda: self._client.submit_job(
                    entrypoint=entrypoint, submission_id=job, runtime_env=runtime_env
                ),
            )
        except Exception as error:
            if self.look(job) is not None:
                return False
            if isinstance(error, ValueError | TypeError):
                raise UsageError(f"Ray refuses the runtime environment: {error}") from error
            raise self._cannot(f"submit job {job!r}", error) from error
        return True

    def look(self, job: str) -> JobView | None:
        """See following.JobServer."""
        try:
            info = within(ANSWER_S, lambda: self._client.get_job_info(job))
        except RuntimeError as error:
            if " 404" in str(error):
                return None
            raise ServerUnreachable(_first_line(error)) from error
        except Exception as error:
            raise ServerUnreachable(_first_line(error)) from error
        return JobView(
            str(info.status.value), info.driver_exit_code, info.message or "", info.entrypoint or ""
        )

    def log(self, job: str) -> str | None:
        """See following.JobServer."""
        try:
            return within(ANSWER_S, lambda: str(self._client.get_job_logs(job)))
        except RuntimeError:
            return None
        except Exception as error:
            raise ServerUnreachable(_first_line(error)) from error

    def stop(self, job: str) -> None:
        """See following.JobServer."""
        try:
            within(ANSWER_S, lambda: self._client.stop_job(job))
        except Exception as error:
            raise ServerUnreachable(_first_line(error)) from error

    def _cannot(self, what: str, error: Exception) -> InfrastructureError:
        if is_refusal(error):
            return InfrastructureError(f"cannot {what} at {self.address!r}: {advice()}")
        return InfrastructureError(
            f"cannot {what} at {self.address!r}: {type(error).__name__}: {_first_line(error)}: start Ray "
            "with its dashboard (`ray start --head`), or correct --address or RAY_ADDRESS"
        )


def job_server_address(asked: str | None) -> str:
    """What to hand to Ray: host:port without a scheme is a job server if it speaks HTTP, else Ray itself."""
    address = asked or os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS")
    if not address:
        return DEFAULT_ADDRESS if _speaks_http(DEFAULT_ADDRESS) else "auto"
    if "://" in address or address == "auto":
        return address
    if _speaks_http(f"http://{address}"):
        return f"http://{address}"
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), PROBE_S).close()
    except (OSError, ValueError, OverflowError) as error:
        # Ray itself would try for minutes.
        raise InfrastructureError(
            f"cannot reach a job server at {address!r}: {error}: start Ray there (`ray start --head`), "
            "or correct --address or RAY_ADDRESS"
        ) from error
    return address


def _speaks_http(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/api/version", timeout=PROBE_S).close()
    except urllib.error.HTTPError:
        return True  # it wants a token
    except Exception:
        # Nobody there, or something that is no web server, which fails in many ways.
        return False
    return True


def within(seconds: float, call: Callable[[], T]) -> T:
    """Call, and stop waiting after so many seconds: Ray's client waits for an answer for ever.

    Raises: what the call raises, TimeoutError.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="ask-job-server", daemon=True).start()
    try:
        return answer.result(timeout=seconds)
    except TimeoutError as error:
        if answer.done():
            raise
        raise TimeoutError(f"no answer in {seconds:.0f} s") from error


def upload_limit_bytes() -> int:
    """The largest package that Ray takes, in bytes."""
    return int(getattr(packaging, "GCS_STORAGE_MAX_SIZE", 500 << 20))


def files_to_upload(folder: Path, excludes: list[str]) -> list[tuple[int, Path]]:
    """Size and path of each file that Ray would pack: not what excludes, .gitignore or .rayignore name."""
    found: list[tuple[int, Path]] = []

    def note(path: Path) -> None:
        if path.is_file():
            found.append((path.stat().st_size, path))

    packaging._dir_travel(
        folder, [packaging._get_excludes(folder, excludes)], note, include_gitignore=True, logger=_QUIET
    )
    return found


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0]

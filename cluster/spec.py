"""What a pool's owner needs to start a replica of it, so that any later owner starts the same. Pure.

A named pool keeps it as JSON beside its actors: a router that starts anew reads it and owns the pool again.
It holds the configuration as plain values, since a router that starts anew has no time to load what validates
them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ..workers.model import ReplicaSettings

if TYPE_CHECKING:
    from .config import PoolConfig

SPEC_VERSION = 1
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
# Where a pool is reached, and not what it is.
_NOT_COMPARED = frozenset({"ray_address"})


class SpecError(ValueError):
    """A stored spec cannot be read, or a name is none."""


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """A pool as it was started. config: PoolConfig as JSON values; its replicas: those of the start.

    replicas: how many it should have now. threads: engine threads of each. num_cpus: what Ray sets aside for
    each.
    """

    config: Mapping[str, Any]
    load_options: Mapping[str, Any]
    threads: int
    num_cpus: int
    replicas: int

    @classmethod
    def of(cls, config: PoolConfig, cluster_cpus: int) -> PoolSpec:
        """Share the cores out. More replicas than cores share them; none waits for ever."""
        threads = config.threads or max(cluster_cpus // config.replicas, 1)
        fits = threads * config.replicas <= cluster_cpus
        plain = config.model_dump(mode="json")
        return cls(plain, config.load_options(), threads, threads if fits else 0, config.replicas)

    def settings(self) -> ReplicaSettings:
        """What one replica loads."""
        config = self.config
        return ReplicaSettings(
            config["model"],
            config["factory"],
            self.threads,
            config["prefix_budget_bytes"],
            self.load_options,
            config["generation_batch"],
        )

    def actor_options(self) -> dict[str, Any]:
        """What Ray must set aside for one replica."""
        options: dict[str, Any] = {"num_cpus": self.num_cpus}
        if self.config["device"] == "cuda":
            options["num_gpus"] = 1
        return options

    def resized(self, replicas: int) -> PoolSpec:
        """The same with another number of replicas. Those that are started share the cores anew, but set none
        aside: those that run already hold theirs.
        """
        shared = max(self.threads * self.replicas // replicas, 1)
        threads = self.config["threads"] or (shared if replicas > self.replicas else self.threads)
        num_cpus = self.num_cpus if replicas <= self.replicas else 0
        return replace(self, replicas=replicas, threads=threads, num_cpus=num_cpus)


def encode_spec(spec: PoolSpec) -> bytes:
    """A spec as JSON."""
    return json.dumps({"version": SPEC_VERSION, **asdict(spec)}).encode()


def decode_spec(message: bytes) -> PoolSpec:
    """A spec from JSON. Raises SpecError, naming both versions if it is another's."""
    try:
        fields = json.loads(message)
        version = fields.pop("version")
        if version != SPEC_VERSION:
            raise SpecError(
                f"the pool was started with spec version {version}, this is {SPEC_VERSION}:"
                " use the same release, or take the pool down with that one"
            )
        return PoolSpec(**fields)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise SpecError(f"the pool's stored spec cannot be read: {type(error).__name__}: {error}") from error


def differences(running: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """Each setting in which two configurations differ, as `key: value there, value asked`."""
    return [
        f"{key}: {running.get(key)!r} there, {asked.get(key)!r} asked"
        for key in sorted(asked.keys() | running.keys())
        if running.get(key) != asked.get(key) and key not in _NOT_COMPARED
    ]


def check_name(name: str) -> str:
    """A pool's name. Raises SpecError with the rule for anything else."""
    if not NAME.fullmatch(name):
        raise SpecError(
            f"{name!r} is no name of a pool: use 1 to 63 letters, digits, '.', '_' or '-', beginning with "
            "a letter or digit"
        )
    return name

"""Lease of a run on object storage, which has no locks: an object that its holder renews by conditional writes."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import time
from dataclasses import dataclass

import jax

from jaxformer.errors import UserError, parse_json
from jaxformer.object_store import ObjectStore, Tag

LEASE = "lease.json"
LEASE_SECONDS, RENEW_SECONDS = 60.0, 20.0
"""Time after which a lease that is not renewed expires, and interval between renewals."""

warn = logging.getLogger(__name__).warning


@dataclass
class Lease:
    """Exclusive right to write to a run until the lease expires."""

    store: ObjectStore
    session: str
    """Random id of the holder, followed by its number of processes."""
    holder: str
    """Host and process of the holder."""
    expires: float
    """Time of expiry, in seconds since the epoch."""
    tag: Tag | None = None
    before: str = ""
    """Session that held the lease before."""

    @classmethod
    def read(cls, store: ObjectStore) -> Lease | None:
        """Return the lease in the store, expired or not; None if there is none."""
        stored = store.read(LEASE)
        if stored is None:
            return None
        try:
            fields = dict(parse_json(stored[0]))
            return cls(store, str(fields["session"]), str(fields["holder"]), float(fields["expires"]), stored[1])
        except (ValueError, TypeError, KeyError):
            return cls(store, "", "an unknown process", 0.0, stored[1])  # not written by this program

    @classmethod
    def acquire(cls, store: ObjectStore, own_session: str = "") -> Lease:
        """Return a new lease, after waiting for the expiry of an existing one that is not renewed.

        Args:
          own_session: last session on this machine, which has ended.

        Raises:
          UserError: another process holds the lease and renews it, or the store fails.
        """
        last = cls.read(store)
        while last is not None and last.session != own_session and (left := last.expires - time.time()) > 0:
            warn(f"{store.url} was last written by {last.holder}; waiting up to {left:.0f} s until its lease expires")
            until = time.time() + min(left, LEASE_SECONDS) + 0.1
            while time.time() < until:
                time.sleep(min(1.0, LEASE_SECONDS / 10))
                now = cls.read(store)
                if now is None or now.expires <= time.time():
                    break
                if now.tag != last.tag:
                    raise UserError(f"{now.holder} is training in {store.url}; stop it, or choose another --run.")
            last = cls.read(store)
        holder = f"{socket.gethostname()}, process {os.getpid()}"
        tag, before = (None, "") if last is None else (last.tag, last.session)
        lease = cls(store, f"{secrets.token_hex(8)}-{jax.process_count()}", holder, 0.0, tag, before)
        if not lease.renew():
            raise UserError(
                f"another process has just started to train in {store.url}; stop it, or choose another --run."
            )
        return lease

    def renew(self, seconds: float | None = None) -> bool:
        """Extend the lease to `seconds` from now, by default `LEASE_SECONDS`; return False if another process has taken
        it."""
        expires = time.time() + (LEASE_SECONDS if seconds is None else seconds)
        content = json.dumps({"session": self.session, "holder": self.holder, "expires": expires})
        if (tag := self.store.write_if(LEASE, content.encode(), self.tag)) is None:
            # Our own write may have succeeded although its response was lost.
            now = Lease.read(self.store)
            if now is None or now.session != self.session:
                return False
            tag = now.tag
        self.tag, self.expires = tag, expires
        return True

    @property
    def poll_seconds(self) -> float:
        """Interval at which to check whether the lease is fresh."""
        return min(1.0, RENEW_SECONDS / 4)

    def is_fresh(self) -> bool:
        """Return True until the lease should be renewed."""
        return self.expires - time.time() > LEASE_SECONDS - RENEW_SECONDS

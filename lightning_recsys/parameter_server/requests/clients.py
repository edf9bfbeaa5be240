"""Who talks to a server: clients, the connections that they come over, and the run that has the server to itself."""

from __future__ import annotations

from lightning_recsys.parameter_server.access.lease import Lease
from lightning_recsys.parameter_server.connections import Peer
from lightning_recsys.parameter_server.journal import Journal
from lightning_recsys.parameter_server.messages.wire import Request
from lightning_recsys.parameter_server.requests.checks import take_plain
from lightning_recsys.parameter_server.requests.operations import Operations
from lightning_recsys.stores.folders.locality import place_of

MAX_RUN, MAX_HOLDER = 64, 200  # characters


class Clients:
    """The clients of a server.

    A client is known by its id, and has a slot in the journal. Over a connection comes one client only, and a client is
    at the end of the connection that it was last heard over. A client that is connected keeps its slot, though it may
    push nothing for hours; one that was cut off keeps it for :data:`~lightning_recsys.parameter_server.journal.\
LEASE_SECONDS`.

    Args:
        journal: The journal of the server's folder.

    Attributes:
        peer: The connection over which the request came that is served now; ``None`` where it came over none.
        lease: Lends the server to one run at a time. It holds up no client that does not ask for it.
        operations: The operations that a client may ask for, by name.
    """

    def __init__(self, journal: Journal) -> None:
        self.peer: Peer | None = None
        self.lease = Lease(journal.folder)
        self._journal = journal
        self._place = place_of(journal.folder)  # by which clients find out whether they may map the files
        self._peers: dict[int, Peer] = {}  # by the slot of its client, the connection that it was last heard over
        self.operations = Operations(
            reads={
                "hello": self._hello,
                "goodbye": self._goodbye,
                "lease": self._take_lease,
                "give_back": self._give_back_lease,
            }
        )

    def __len__(self) -> int:
        return self._journal.num_clients(self._peers)

    def meet(self, slot: int) -> None:
        """Take note that the client of this slot is at the other end of the present connection, and it alone.

        Raises:
            ValueError: another client is at the end of this connection.
        """
        peer = self.peer
        if peer is not None and self._peers.get(slot) is not peer:
            if peer.slot is not None:
                raise ValueError("a connection is one client's; make another one")
            peer.slot = slot
            self._peers[slot] = peer

    def meet_reader(self, request: Request) -> None:
        """The same for a client that reads. After it was cut off it may have nothing to push for long."""
        slot = self._journal.slot(request.client)
        if slot is not None and self.peer is not None and self.peer.slot is None:
            self.meet(slot)

    def lose(self, peer: Peer) -> None:
        """A connection is gone. From now on its client has to come back before its slot is given to another one."""
        if peer.slot is not None and self._peers.get(peer.slot) is peer:
            del self._peers[peer.slot]
            self._journal.touch(peer.slot)

    def _hello(self, request: Request) -> object:
        take_plain(request)
        # Before a slot is given away: who greets again and again over one connection would fill the journal.
        if self.peer is not None and self.peer.slot not in (None, self._journal.slot(request.client)):
            raise ValueError("a connection is one client's; make another one")
        self.meet(self._journal.register(request.client, self._peers))
        folder, nonce = str(self._journal.folder), self._journal.nonce
        return {"folder": folder, "place": self._place, "nonce": nonce}

    def _goodbye(self, request: Request) -> object:
        take_plain(request)
        slot = self._journal.slot(request.client)
        if slot is not None:
            self._journal.say_goodbye(slot)
        return None

    def _take_lease(self, request: Request) -> object:
        run, holder = take_plain(request, run=str, holder=str)
        if not 0 < len(run) <= MAX_RUN or not 0 < len(holder) <= MAX_HOLDER:
            raise ValueError(f"run must have 1 to {MAX_RUN} characters and holder 1 to {MAX_HOLDER}")
        return self.lease.take(run, holder)

    def _give_back_lease(self, request: Request) -> object:
        (run,) = take_plain(request, run=str)
        self.lease.give_back(run)
        return None

"""Places of which there are so many: who comes when all are taken waits for one, in the order they came."""

import asyncio
from collections import deque


class Places:
    """Places for requests on one event loop; `take` one, and `give_back` what was taken."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.num_taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def are_taken(self) -> bool:
        return self.num_taken >= self._count

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def take(self) -> None:
        """Returns when a place is the caller's."""
        if not self.are_taken:
            self.num_taken += 1
            return
        ticket = asyncio.get_running_loop().create_future()
        self._waiting.append(ticket)
        try:
            await ticket  # whoever leaves hands over its place
        except asyncio.CancelledError:
            if ticket.done() and not ticket.cancelled():
                self.give_back()
            else:
                self._waiting.remove(ticket)
            raise

    def give_back(self) -> None:
        """Hands a place over to the one that has waited longest."""
        for ticket in self._waiting:
            if not ticket.done():
                self._waiting.remove(ticket)
                ticket.set_result(None)
                return
        self.num_taken -= 1

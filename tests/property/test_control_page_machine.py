"""Any interleaving of draws, stamps and questions: what the page says is what happened, or is the careful answer."""

from __future__ import annotations

import secrets

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tierkv.tiers._rendezvous import Role
from tierkv.vllm._control import ControlPage, CopyStatus, Direction

N_RANKS, N_SLOTS = 2, 3
directions = st.sampled_from(Direction)
ranks = st.integers(0, N_RANKS - 1)
slot_lists = st.lists(st.integers(0, N_SLOTS - 1), min_size=1, max_size=4, unique=True)


class ControlPageMachine(RuleBasedStateMachine):
    """A scheduler draws tickets for jobs of several slots; each rank ends its jobs in order, well or badly."""

    def __init__(self) -> None:
        super().__init__()
        shared_id = secrets.token_hex(8)
        numbers = {"n_ranks": N_RANKS, "n_slots": N_SLOTS}
        self.pages = [ControlPage.create(shared_id, **numbers)]
        self.pages += [ControlPage.join(shared_id, role=Role.WORKER, rank=r, **numbers) for r in range(1, N_RANKS)]
        self.reader = ControlPage.join(shared_id, role=Role.SCHEDULER, rank=0, **numbers)
        self.ticket = 0
        self.jobs: dict[Direction, list[tuple[list[int], list[int]]]] = {direction: [] for direction in Direction}
        self.n_ended = {(rank, direction): 0 for rank in range(N_RANKS) for direction in Direction}
        self.outcomes: dict[tuple[int, Direction, int], bool] = {}
        self.published: dict[int, tuple[bytes, bytes]] = {}

    @rule(direction=directions, slots=slot_lists)
    def submit(self, direction: Direction, slots: list[int]) -> None:
        """A job: a rising ticket for each of its slots."""
        tickets = list(range(self.ticket + 1, self.ticket + 1 + len(slots)))
        self.ticket += len(slots)
        self.jobs[direction].append((slots, tickets))

    @precondition(lambda self: any(self.jobs.values()))
    @rule(rank=ranks, direction=directions, ok=st.booleans())
    def end(self, rank: int, direction: Direction, ok: bool) -> None:
        """A rank's oldest unfinished job of a direction ends."""
        n_ended = self.n_ended[rank, direction]
        if n_ended < len(self.jobs[direction]):
            slots, tickets = self.jobs[direction][n_ended]
            self.pages[rank].stamp_many(rank, direction, slots, tickets, ok=ok)
            self.n_ended[rank, direction] += 1
            for ticket in tickets:
                self.outcomes[rank, direction, ticket] = ok

    @rule(rank=ranks, model=st.sampled_from([b"a", b"b"]))
    def publish(self, rank: int, model: bytes) -> None:
        """A rank publishes; a second time only the same."""
        digests = self.published.setdefault(rank, (model * 32, bytes([rank]) * 32))
        self.pages[rank].publish_identity(rank, *digests)

    @invariant()
    def every_ticket_is_told_truly(self) -> None:
        """Pending exactly while some rank has not ended; ok never for a failed copy, and always for the last one."""
        for direction, jobs in self.jobs.items():
            for slots, tickets in jobs:
                said = self.reader.statuses(direction, slots, tickets)
                for slot, ticket, status in zip(slots, tickets, said, strict=True):
                    self.check(direction, slot, ticket, status)

    def check(self, direction: Direction, slot: int, ticket: int, status: CopyStatus) -> None:
        ended = [self.outcomes.get((rank, direction, ticket)) for rank in range(N_RANKS)]
        assert (status is CopyStatus.PENDING) == (None in ended)
        assert self.reader.ended(slot, direction, ticket) == (None not in ended)
        if status is CopyStatus.OK:
            assert all(ended)
        if status is CopyStatus.FAILED and all(ended):
            later = [
                outcome for (_, way, other), outcome in self.outcomes.items()
                if way is direction and other > ticket and slot in self.slots_of(direction, other)
            ]  # fmt: skip
            assert False in later, "called failed although neither it nor a later copy of the slot was"

    def slots_of(self, direction: Direction, ticket: int) -> list[int]:
        return [
            slot
            for slots, tickets in self.jobs[direction]
            for slot, t in zip(slots, tickets, strict=True)
            if t == ticket
        ]

    @invariant()
    def identities_are_whole(self) -> None:
        """None until every rank has published, then exactly what they published."""
        found = self.reader.identities()
        if len(self.published) < N_RANKS:
            assert found is None
        else:
            models, layouts = zip(*(self.published[rank] for rank in range(N_RANKS)), strict=True)
            assert found is not None
            assert (found.models, found.layouts) == (models, layouts)

    def teardown(self) -> None:
        for page in (self.reader, *reversed(self.pages)):
            page.close()


TestControlPage = ControlPageMachine.TestCase

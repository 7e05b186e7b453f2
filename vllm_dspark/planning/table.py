"""Per-request state of the engine core: one slot per request, arrays throughout.

The table is the only owner of what is remembered about requests between steps:
the newest confidence row (with owner and stamp), the newest outcome, what remains
to be generated. It pairs a row with the outcome of the drafts it was about,
whichever arrives first, to teach the online calibration; and `batch` turns the
slots of a step into the immutable `RequestBatch` that the planner decides on.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_dspark.errors import PlanError
from vllm_dspark.planning.calibration import Calibration
from vllm_dspark.planning.online import OnlineCalibration
from vllm_dspark.planning.plan import owner_id, request_digest
from vllm_dspark.planning.posterior import AcceptancePosterior
from vllm_dspark.planning.quality import LiveQuality
from vllm_dspark.planning.survival import RowCounts, acceptance, survival, usable_rows

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.integer]
OwnerArray = npt.NDArray[np.int64]
SlotArray = npt.NDArray[np.int64]

NO_LIMIT = 2**31 - 1

# Learning is statistics: one step in eight, and some of its rows, teach as well as all
# of them and keep the engine core's time per step flat.
_LEARN_PERIOD = 8
_LEARN_ROWS = 64

_NUM_VIEWS = 8  # batches whose unchanging columns are kept

# Fields per slot: of one int64 array [fields, slots], and of one of bool.
_FIELDS = range(9)
_OWNER, _TENANT, _ROW_OWNER, _ROW_STAMP, *_OUTCOME, _ROW_WIDTH = _FIELDS
_OUTCOME_STAMP, _ADMITTED, _ACCEPTED, _REMAINING = _OUTCOME
_SAMPLED, _UNTOUCHED, _EXCLUDED = range(3)


@dataclass(frozen=True, slots=True)
class RequestBatch:
    """The decoding requests of one step, in the caller's order. Filled by RequestTable.batch."""

    owner: OwnerArray  # [n]
    acceptance: FloatArray  # [K, n] P(accept | all before accepted), neutral where unknown
    known: BoolArray | None  # [n] anything is known about the request; None: about all
    num_drafts: IntArray  # [n] drafts there are to verify
    capacity: IntArray  # [n] drafts that could still be emitted, if there were K
    remaining: IntArray  # [n] tokens left to generate at most
    reserved: BoolArray | None  # [n] keeps native width; None: nobody does
    excluded: BoolArray | None  # [n] must not be scheduled: then the whole step runs native
    counts: RowCounts
    digest: int | None = None  # request_digest(owner), where it is known
    fresh: bool = False  # some acceptance comes from rows about the drafts to be verified

    @property
    def num_positions(self) -> int:
        """K."""
        return int(self.acceptance.shape[0])


@dataclass(frozen=True, slots=True)
class RankingParameters:
    """What ranking on a device needs besides rows; equal on all ranks if shipped with the plan."""

    calibration: Calibration
    prior: FloatArray  # [2, K] neutral acceptance of greedy and sampled requests


@dataclass(frozen=True, slots=True)
class _View:
    """What does not change about the requests of a batch while they hold their slots, [n] each."""

    slots: SlotArray
    owner: OwnerArray
    tenant: SlotArray
    sampled: BoolArray
    untouched: BoolArray
    excluded: BoolArray | None
    digest: int


class RequestTable:
    """Slots of all known requests. `rank_by_posterior` for host windows (posterior.py)."""

    def __init__(
        self,
        num_positions: int,
        num_slots: int,
        calibration: Calibration,
        *,
        rank_by_posterior: bool,
        online_calibration: bool = True,
        max_row_age: int = 4,
    ) -> None:
        if calibration.num_positions != num_positions:
            raise PlanError(
                f"calibration of {calibration.num_positions} positions for {num_positions} drafts"
            )
        self.num_positions = num_positions
        self.rank_by_posterior = rank_by_posterior
        self.max_row_age = max_row_age
        self.posterior = AcceptancePosterior(num_positions, 0)
        self.online = OnlineCalibration(calibration)
        self.live = LiveQuality(num_positions)
        self.version = 0  # raised whenever a slot changes hands
        self.unpaired = 0  # outcomes whose confidence row never came
        self._learn = online_calibration
        self._num_outcomes = self._num_repeated = 0  # the latter since the last of the former
        self._due = False  # the last outcomes are to be paired with rows that may not be here yet
        self._views: dict[int, _View] = {}  # by identity of a slot array
        self._ranking: RankingParameters | None = None
        self._slot_of: dict[str, int] = {}
        self._free: list[int] = []
        self._state: SlotArray = np.zeros((len(_FIELDS), 0), dtype=np.int64)
        self._flags: BoolArray = np.zeros((3, 0), dtype=np.bool_)
        self._rows: FloatArray = np.zeros((0, num_positions), dtype=np.float32)
        self._grow(num_slots)

    def _grow(self, num_slots: int) -> None:
        """Make room for `num_slots`, keeping what is there."""
        old = self._state.shape[1]
        extra = num_slots - old
        self._state = np.pad(self._state, ((0, 0), (0, extra)))
        self._flags = np.pad(self._flags, ((0, 0), (0, extra)))
        blank = np.zeros((extra, self.num_positions), dtype=np.float32)
        self._rows = np.concatenate((self._rows, blank))
        self._free.extend(range(num_slots - 1, old - 1, -1))
        self.posterior.grow(num_slots)

    def add(
        self,
        request_id: str,
        *,
        sampled: bool,
        untouched: bool = True,
        excluded: bool = False,
        remaining: int = NO_LIMIT,
        tenant: int | None = None,
        generation: int = 0,
    ) -> int:
        """Give a request a slot; its owner id comes from `owner_id(request_id, generation)`.

        `untouched`: no grammar, penalty, bad words or the like alters its target
        distribution. `excluded`: scheduling must leave every step it is in alone.
        `tenant`: whose influence it counts towards; by default the request's own.
        """
        if request_id in self._slot_of:
            self.remove(request_id)
        if not self._free:
            self._grow(2 * self._state.shape[1])
        slot = self._free.pop()
        owner = owner_id(request_id, generation)
        tenant = owner if tenant is None else tenant
        self._state[:, slot] = (owner, tenant, 0, 0, 0, 0, 0, min(remaining, NO_LIMIT), 0)
        self._flags[:, slot] = (sampled, untouched, excluded)
        self._slot_of[request_id] = slot
        self._changed()
        self.posterior.reset(slot)
        return slot

    def remove(self, request_id: str) -> None:
        """Release a request's slot (finished, aborted or preempted); unknown ids are ignored."""
        slot = self._slot_of.pop(request_id, None)
        if slot is not None:
            self._state[_OWNER, slot] = 0
            self._changed()
            self._free.append(slot)

    def _changed(self) -> None:
        self.version += 1
        self._views.clear()

    def _view(self, slots: SlotArray) -> _View:
        """Unchanging columns; kept for as long as callers come back with the same array."""
        view = self._views.get(id(slots))
        if view is None:
            if len(self._views) >= _NUM_VIEWS:
                self._views.clear()
            flags = self._flags[:, slots]
            excluded = flags[_EXCLUDED]
            owner = self._state[_OWNER, slots]
            view = _View(
                slots,  # held, so that its identity stays its own
                owner,
                self._state[_TENANT, slots],
                flags[_SAMPLED],
                flags[_UNTOUCHED],
                excluded if excluded.any() else None,
                request_digest(owner),
            )
            self._views[id(slots)] = view
        return view

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._slot_of

    def __len__(self) -> int:
        return len(self._slot_of)

    def slots(self, request_ids: Iterable[str]) -> SlotArray:
        """Slots of known requests, in order."""
        return np.fromiter(map(self._slot_of.__getitem__, request_ids), dtype=np.int64)

    def known(self, request_ids: Sequence[str]) -> list[int] | None:
        """Places of the ids that have a slot; None if all have one."""
        slot_of = self._slot_of
        if all(map(slot_of.__contains__, request_ids)):
            return None
        return [i for i, request_id in enumerate(request_ids) if request_id in slot_of]

    def owners(self, slots: SlotArray) -> OwnerArray:
        """Owner ids, [n]; `slots` is not changed by anybody as long as it is used."""
        return self._view(slots).owner

    def ranking_parameters(self) -> RankingParameters:
        """Current parameters for `survival.acceptance` on a device; the same ones if unchanged."""
        calibration, prior, known = self.online.calibration, self.posterior.priors, self._ranking
        if known is None or known.calibration is not calibration or known.prior is not prior:
            self._ranking = known = RankingParameters(calibration, prior)
        return known

    def record_rows(
        self,
        slots: SlotArray,  # [m], each at most once
        owners: OwnerArray,  # [m] whom the worker wrote the rows for
        stamp: int,
        confidence: npt.NDArray[np.floating],  # [m, n <= K] raw, as the worker lays them out
    ) -> None:
        """Store the rows of one draft pass of n columns; of the others nothing is known."""
        width = confidence.shape[1] if confidence.ndim == 2 else 0
        if not 0 < width <= self.num_positions or len(confidence) != len(slots):
            raise PlanError(
                f"confidence rows of shape {confidence.shape} for {len(slots)} requests and "
                f"{self.num_positions} drafts"
            )
        if width < self.num_positions:
            self._rows[slots] = np.nan
            self._rows[slots, :width] = confidence
        else:
            self._rows[slots] = confidence
        self._state[_ROW_WIDTH][slots] = width
        self._state[_ROW_OWNER][slots] = owners
        self._state[_ROW_STAMP][slots] = stamp
        if self._due:
            self._pair(slots)

    def remaining(self, slots: SlotArray) -> SlotArray:
        """Tokens left to generate at most, [n]."""
        left: SlotArray = self._state[_REMAINING].take(slots)
        return left

    def ends_within(self, slots: SlotArray, num_drafts: int) -> BoolArray:
        """Whether so many drafts and a token more are too many to be emitted, [n]."""
        ends: BoolArray = self._state[_REMAINING].take(slots) <= num_drafts
        return ends

    def count_emitted(self, slots: SlotArray, accepted: IntArray, steps: int = 1) -> None:
        """Take what steps emitted off what remains, without learning from it; [n] accepted."""
        left = self._state[_REMAINING].take(slots)
        left -= accepted
        left -= steps
        self._state[_REMAINING][slots] = np.maximum(left, 0, out=left)

    def record_outcomes(
        self,
        slots: SlotArray,  # [m], each at most once
        stamp: int,
        admitted: IntArray,  # [m] drafts verified
        accepted: IntArray,  # [m] of them accepted
    ) -> None:
        """Take in what became of the drafts of pass `stamp`."""
        view, state = self._view(slots), self._state
        self.count_emitted(slots, accepted)
        self.posterior.observe(slots, admitted, accepted, view.sampled, view.untouched, view.tenant)
        # Steps that were only followed bring the turn nearer, but a whole one takes a period.
        turns, self._num_repeated = 1 + self._num_repeated // _LEARN_PERIOD, 0
        self._num_outcomes += turns
        if self._num_outcomes % _LEARN_PERIOD >= turns:
            return
        if self._due:
            lost = (state[_OUTCOME_STAMP] > 0) & (state[_ADMITTED] > 0) & (state[_OWNER] != 0)
            self.unpaired += int(np.count_nonzero(lost))
            state[_OUTCOME_STAMP] = 0
        state[_OUTCOME_STAMP][slots] = stamp
        state[_ADMITTED][slots] = admitted
        state[_ACCEPTED][slots] = accepted
        self._due = True
        self._pair(slots)

    def record_repeated(self, slots: SlotArray, admitted: IntArray, accepted: IntArray) -> None:
        """Follow requests, [m], through steps that verified the same drafts of each.

        accepted: [steps, m], oldest first. What all requests share is taught by other steps.
        """
        self.count_emitted(slots, np.add.reduce(accepted), len(accepted))
        self.posterior.follow(slots, admitted, accepted, self._view(slots).sampled)
        self._num_repeated += len(accepted)

    @property
    def awaits_rows(self) -> bool:
        """Whether outcomes wait for the rows that their drafts were judged by."""
        return self._due

    def _pair(self, slots: SlotArray) -> None:
        """Teach the calibration from rows and outcomes of the same draft pass."""
        state = self._state.take(slots, axis=1)
        match = (state[_OUTCOME_STAMP] > 0) & (state[_OUTCOME_STAMP] == state[_ROW_STAMP])
        match &= state[_ROW_OWNER] == state[_OWNER]
        if not np.count_nonzero(match):
            return
        self._state[_OUTCOME_STAMP, slots[match]] = 0
        # A stride that is coprime to it visits all parts of a batch in turn.
        places = match.nonzero()[0]
        if places.size > _LEARN_ROWS:
            places = np.roll(places, self._num_outcomes * 7)[:_LEARN_ROWS]
        self._learn_from(slots[places])
        self._due = bool(self._state[_OUTCOME_STAMP].any())

    def _learn_from(self, slots: SlotArray) -> None:
        rows, state, flags = self._gather(slots), self._state[:, slots], self._flags[:, slots]
        admitted, accepted = state[_ADMITTED], state[_ACCEPTED]
        sampled, untouched = flags[_SAMPLED], flags[_UNTOUCHED]
        legal = np.clip(np.nan_to_num(rows), 0.0, 1.0)
        predicted = survival(self.online.calibration.apply(legal, sampled))
        self.live.observe(predicted[:, untouched], accepted[untouched], admitted[untouched])
        if self._learn:
            self.online.observe(rows, admitted, accepted, sampled, untouched, state[_TENANT])

    def _gather(self, slots: SlotArray) -> FloatArray:
        """Confidence rows, position-major."""
        return np.ascontiguousarray(self._rows[slots].T)

    def batch(
        self,
        slots: SlotArray,  # [n]
        num_drafts: IntArray,  # [n]
        draft_stamp: IntArray,  # [n] pass that made the drafts to be verified; 0: none
        reserved: BoolArray | None = None,  # [n]
    ) -> RequestBatch:
        """What is known about the requests of one step."""
        view = self._view(slots)
        remaining = self._state[_REMAINING].take(slots)
        use = usable_rows(
            view.owner,
            self._state[_ROW_OWNER].take(slots),
            self._state[_ROW_STAMP].take(slots),
            draft_stamp,
            view.sampled,
            self.max_row_age,
        )
        estimate, num_invalid = self._acceptance(slots, view.sampled, use.usable, use.current)
        counts = RowCounts(use.counts.stale, use.counts.current, num_invalid)
        known = self.posterior.known(slots)
        # One token of a step is the target's own, so only remaining - 1 drafts can be emitted.
        capacity = remaining - 1
        np.maximum(capacity, 0, out=capacity)
        np.minimum(capacity, self.num_positions, out=capacity)
        if reserved is not None:  # their windows must not depend on anything
            np.copyto(capacity, self.num_positions, where=reserved)
        return RequestBatch(
            owner=view.owner,
            acceptance=estimate,
            known=None if known is None else use.usable | known,
            num_drafts=num_drafts,
            capacity=capacity,
            remaining=remaining,
            reserved=reserved,
            excluded=view.excluded,
            counts=counts,
            digest=view.digest,
            fresh=bool(np.count_nonzero(use.current)),
        )

    def _acceptance(
        self, slots: SlotArray, sampled: BoolArray, usable: BoolArray, current: BoolArray
    ) -> tuple[FloatArray, int]:
        num_usable = np.count_nonzero(usable)
        if not num_usable:
            return self._full(self.posterior.estimate(slots, sampled), len(slots)), 0

        def prior() -> FloatArray:
            return self.posterior.estimate(slots, sampled)

        rows, num_invalid = acceptance(
            self._gather(slots), usable, prior, self.online.calibration, sampled
        )
        # Columns that were not drafted are absent, not wrong.
        widths = self._state[_ROW_WIDTH].take(slots)
        missing = int(np.add.reduce((self.num_positions - widths) * usable))
        num_invalid -= missing
        num_current = np.count_nonzero(current)
        if not self.rank_by_posterior or num_current == len(slots):
            return rows, num_invalid
        ranked = self.posterior.estimate(slots, sampled, rows, usable, widths if missing else None)
        if num_current:
            np.copyto(ranked, rows, where=current)
        return ranked, num_invalid

    def _full(self, estimate: FloatArray, num_requests: int) -> FloatArray:
        return np.broadcast_to(estimate, (self.num_positions, num_requests)).copy()

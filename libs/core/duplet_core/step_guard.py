"""How long decode's next steps will be, and for how much more they leave room.

A step takes about `base + streams * stream + pages * page` nanoseconds: the weights are read
once, sampling and the codebooks cost by the stream, attention by the KV that it reads. The
three figures are fitted, as steps end, by least squares in which older steps count less and
less, and none may be negative. A request is charged from its Admit on with all pages of its
prompt and longest output, because that is what its last step may read.

The fit is believed up to twice as many streams as a step has had so far, so an empty unit
opens by doubling. What steps of one size cannot tell apart stays as it was last known. While
nothing but single streams was ever seen, a second one is taken to be free and a few more are
welcome, or nobody would ever find out. Time decides here who is admitted, never which page is
free.
"""

from __future__ import annotations

from duplet_core.messages import StepCredit

HEADROOM = 0.9
"""Steps are planned to take this share of a row's time at the floor. The rest is for what no
fit sees: a check that runs beside a step, a late wake-up of the I/O process."""
MEMORY_STEPS = 512
"""After so many steps an observation weighs a third (1/e) of a new one."""
NO_FLOOR_NS = 1e12
"""A floor below a row in a quarter of an hour is none; figures fit a message."""
FIT_EVERY_STEPS = 8
FIRST_STREAMS = 4
"""Believed before any step had more than one."""
_PAGE_SCALE = 1 / 128
"""Pages count in hundreds where streams count in ones; equations of like size are solved well."""
_RIDGE = 1e-6
"""Makes equations solvable that steps of one size leave open: of all solutions it takes the one
nearest to the last costs. Steps of other sizes outweigh it by far."""


class StepGuard:
    """Fits the cost of steps. Owned by decode's machine; times are integer nanoseconds."""

    def __init__(self, floor_rows_per_s: float) -> None:
        """Args:
        floor_rows_per_s: the rate that every stream is to keep; more than 0.
        """
        self.longest_step_ns = round(min(HEADROOM * 1e9 / floor_rows_per_s, NO_FLOOR_NS))
        self.most_streams = 0
        """In one step that a fit knows of."""
        self.fits = 0
        """So many times the costs were found anew."""
        self._most_seen = 0
        self._costs = (0.0, 0.0, 0.0)
        self._products = [[0.0] * 4 for _ in range(3)]
        """Normal equations: the features' products with each other and, last, with the time."""
        self._steps = 0
        self._last_done_ns = 0

    def observe(self, streams: int, pages: int, started_ns: int, done_ns: int) -> None:
        """Learn from one step over `streams` streams that hold `pages` pages.

        A step that was launched while another ran counts from the end of that one.
        """
        taken_ns = done_ns - max(started_ns, self._last_done_ns)
        self._last_done_ns = done_ns
        if streams < 1 or taken_ns <= 0:
            return
        self._most_seen = max(self._most_seen, streams)
        # One pause of a second says nothing about the next step; it may not outweigh many.
        seen = (1.0, float(streams), pages * _PAGE_SCALE, float(min(taken_ns, self._outlier_ns())))
        keep = 1 - 1 / MEMORY_STEPS
        for i, row in enumerate(self._products):
            for j in range(4):
                row[j] = row[j] * keep + seen[i] * seen[j]
        self._steps += 1
        if self._steps % FIT_EVERY_STEPS == 0:
            # Else a slow card's base would pass, in part, for a second stream's cost, for ever.
            known = [0, 2] if self._most_seen < 2 else [0, 1, 2]
            self._costs = _fit(self._products, known, self._costs)
            self.most_streams = self._most_seen
            self.fits += 1

    def streams_believed(self) -> int:
        """Streams up to which the fit may be asked."""
        return max(FIRST_STREAMS, 2 * self.most_streams)

    def predict_ns(self, streams: int, pages: int) -> int:
        """How long a step of so many streams takes; 0 before the first fit."""
        base, stream, page = self._costs
        return round(base + streams * stream + pages * _PAGE_SCALE * page)

    def credit(self, streams: int, pages: int) -> StepCredit:
        """What is left beside `streams` admitted streams with `pages` reserved pages."""
        _, stream, page = self._costs
        free_ns = max(0, self.longest_step_ns - self.predict_ns(streams, pages))
        return StepCredit(streams, free_ns, round(stream), round(page * _PAGE_SCALE))

    def _outlier_ns(self) -> int:
        return 4 * self.longest_step_ns


Costs = tuple[float, float, float]
"""Of a step, of a stream, of 128 pages."""


def _fit(products: list[list[float]], left: list[int], last: Costs) -> Costs:
    """The costs in `left`, the others 0. None is negative: the most negative one is left out and
    the rest fitted."""
    while left:
        rows = [[products[i][j] for j in left] + [products[i][3]] for i in left]
        found = _solve(rows, [last[i] for i in left])
        worst = min(range(len(left)), key=found.__getitem__)
        if found[worst] >= 0:
            costs = dict(zip(left, found, strict=True))
            return costs.get(0, 0.0), costs.get(1, 0.0), costs.get(2, 0.0)
        del left[worst]
    return 0.0, 0.0, 0.0


def _solve(rows: list[list[float]], near: list[float]) -> list[float]:
    """Gauss with a ridge; the matrix is symmetric and, by the ridge, positive definite."""
    size = len(rows)
    for i in range(size):
        pull = _RIDGE * (rows[i][i] + 1.0)
        rows[i][i] += pull
        rows[i][size] += pull * near[i]
    for i in range(size):
        for k in range(i + 1, size):
            factor = rows[k][i] / rows[i][i]
            for j in range(i, size + 1):
                rows[k][j] -= factor * rows[i][j]
    found = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * found[j] for j in range(i + 1, size))
        found[i] = (rows[i][size] - known) / rows[i][i]
    return found

"""How long decode's next steps will be, and for how much more they leave room.

A step takes about `base + streams * stream + pages * page` nanoseconds: the weights are read
once, sampling and the codebooks cost by the stream, attention by the KV that it reads. The
three figures are fitted, as steps end, by least squares in which older steps count less and
less, and none may be negative. A request is charged from its Admit on with all pages of its
prompt and longest output, because that is what its last step may read.

An engine may have timed steps of some sizes at start. They say from the first request on what
a step costs, up to the largest that was timed, and later what no step of the day has said: they
never count less, but little, and all of them are scaled by how much longer or shorter steps
turn out to be.

Beyond that the fit is believed up to twice as many streams as a step has had so far, so without
timed steps an empty unit opens by doubling. What steps of one size cannot tell apart stays as
it was last known. While nothing but single streams was ever seen, a second one is taken to be
free and a few more are welcome, or nobody would ever find out. Time decides here who is
admitted, never which page is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul

from duplet_core.engine import StepTime
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
TIMED_WEIGHT = 1 / 16
"""Of a timed step. Enough to tell a base from a stream and a stream from a page where the day's
steps are all of one size, too little to say against them what such steps take."""
_PAGE_SCALE = 1 / 128
"""Pages count in hundreds where streams count in ones; equations of like size are solved well."""
_RIDGE = 1e-6
"""Makes equations solvable that steps of one size leave open: of all solutions it takes the one
nearest to the last costs. Steps of other sizes outweigh it by far."""


def longest_step_ns(floor_rows_per_s: float) -> int:
    """The longest step that is planned where every stream is to keep a rate of more than 0."""
    return round(min(HEADROOM * 1e9 / floor_rows_per_s, NO_FLOOR_NS))


class StepGuard:
    """Fits the cost of steps. Owned by decode's machine; times are integer nanoseconds."""

    def __init__(self, floor_rows_per_s: float, timed: Sequence[StepTime] = ()) -> None:
        """Args:
        floor_rows_per_s: the rate that every stream is to keep; more than 0.
        timed: steps that were timed at start.
        """
        self.longest_step_ns = longest_step_ns(floor_rows_per_s)
        self.most_streams = 0
        """In one step that a fit knows of."""
        self.fits = 0
        """So many times the costs were found anew."""
        self._most_timed = max((step.streams for step in timed), default=0)
        self._most_seen = 0
        self._timed = _no_products()
        for step in timed:
            _add(self._timed, step.streams, step.pages, step.taken_ns, TIMED_WEIGHT)
        self._timed_costs: Costs = _fit(self._timed, self._told_apart(), (0.0, 0.0, 0.0))
        self._costs = self._timed_costs
        self._seen = _no_products()
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
        for row in self._seen:
            row[:] = [value * (1 - 1 / MEMORY_STEPS) for value in row]
        # One pause of a second says nothing about the next step; it may not outweigh many.
        _add(self._seen, streams, pages, min(taken_ns, self._outlier_ns()))
        self._steps += 1
        if self._steps % FIT_EVERY_STEPS == 0:
            self._costs = _fit(self._known_products(), self._told_apart(), self._costs)
            self.most_streams = self._most_seen
            self.fits += 1

    def streams_believed(self) -> int:
        """Streams up to which the fit may be asked."""
        return max(FIRST_STREAMS, self._most_timed, 2 * self.most_streams)

    def predict_ns(self, streams: int, pages: int) -> int:
        """How long a step of so many streams takes; 0 where none was timed or fitted yet."""
        base, stream, page = self._costs
        return round(base + streams * stream + pages * _PAGE_SCALE * page)

    def credit(self, streams: int, pages: int) -> StepCredit:
        """What is left beside `streams` admitted streams with `pages` reserved pages."""
        _, stream, page = self._costs
        free_ns = max(0, self.longest_step_ns - self.predict_ns(streams, pages))
        return StepCredit(streams, free_ns, round(stream), round(page * _PAGE_SCALE))

    def _outlier_ns(self) -> int:
        return 4 * self.longest_step_ns

    def _told_apart(self) -> list[int]:
        """The costs to fit. Else a slow card's base would pass, in part, for a second stream's
        cost, for ever."""
        return [0, 2] if max(self._most_timed, self._most_seen) < 2 else [0, 1, 2]

    def _known_products(self) -> Products:
        """Of the day's steps and of the timed ones, as long as the day's would make them."""
        of_steps = self._seen[0]  # how many they were, their streams, their pages, their time
        foretold_ns = sum(map(mul, self._timed_costs, of_steps))
        ratio = of_steps[3] / foretold_ns if foretold_ns > 0 else 1.0
        scales = (1.0, 1.0, 1.0, ratio)
        return [
            [a + b * scale for a, b, scale in zip(seen, timed, scales, strict=True)]
            for seen, timed in zip(self._seen, self._timed, strict=True)
        ]


Costs = tuple[float, float, float]
"""Of a step, of a stream, of 128 pages."""
Products = list[list[float]]
"""Normal equations: the products of 1, streams and hundreds of pages with each other and, last,
with the time."""


def _no_products() -> Products:
    return [[0.0] * 4 for _ in range(3)]


def _add(products: Products, streams: int, pages: int, taken_ns: int, weight: float = 1.0) -> None:
    seen = (1.0, float(streams), pages * _PAGE_SCALE, float(taken_ns))
    for i, row in enumerate(products):
        for j in range(4):
            row[j] += weight * seen[i] * seen[j]


def _fit(products: Products, left: list[int], last: Costs) -> Costs:
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

"""The checkers: they look at true state and share no code with the product.

Each function raises a Violation that names the invariant:

    late-write       a copy writes a page that decode does not hold as granted to or quarantined
                     for exactly that transfer and writer
    source-reused    a copy reads a page that prefill does not hold for that transfer
    unmapped         a copy touches a pool whose mapping was closed
    step-write       an engine writes a page that its machine does not hold for that sequence, or
                     that somebody else holds as well
    prefix           a prompt is computed on rows before it that are not its own
    conservation     a page is in two places, or in none; two may write into it
    ack              AbortAck, TransferFailed or Landed while a copy can still write
    release          SourceReleased while a copy can still read
    foreign-rows     a client gets a row that was not computed from its own prompt, or not next
    ended-once       a request ends twice, or gets rows after its end
    bound            decode grants while it drains or over the quarantine bound; a writer with
                     too many withheld ends is green; a queue or an engine has more than its limit;
                     decode refuses for a quarantine that is too young
    superseded       a stream ends for the Hello of another instance
    order            prefill takes pages for a request while an earlier one waits for some
    protocol         a correct peer is accused of breaking the protocol
    mismatch         decode's engine finds landed KV that differs from its digests
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from duplet_core.engine import Start
from duplet_core.host import HostMachine
from duplet_core.ids import InstanceId, Role, TransferId
from duplet_sim.content import COLUMNS, DAMAGED, Rows
from duplet_sim.engines import DecodeEngine, PrefillEngine
from duplet_sim.parts import Copy, Process
from duplet_sim.violation import Violation


def check_mapped(copy: Copy, writer: Process) -> None:
    """At the moment when the copy moves bytes."""
    for pool in (copy.source, copy.dest):
        if pool not in writer.mapped:
            raise Violation("unmapped", f"{copy.transfer} touches the pool of {pool}")


def check_read(copy: Copy, source: Process) -> None:
    """At the moment when the copy reads prefill's pages."""
    if not source.exited:
        held = source.node.machine.jobs.pages._held.get(copy.transfer, ())
        for page in copy.source_pages:
            if page not in held:
                raise Violation("source-reused", f"{copy.transfer} reads page {page}")


def check_written(copy: Copy, dest: Process) -> None:
    """At the moment when the copy writes decode's pages."""
    if dest.exited:
        return
    holding = dest.node.machine.transfers.ledger._holdings.get(copy.transfer)
    state = "free" if holding is None else holding.state.value
    if holding is None or state not in ("granted", "quarantined"):
        detail = f"{copy.transfer} writes pages {copy.dest_pages}, which are {state} for it"
        raise Violation("late-write", detail)
    if holding.writer != copy.writer or not set(copy.dest_pages) <= set(holding.pages):
        raise Violation("late-write", f"{copy.transfer}: not its pages, or not its writer")


def check_engine_write(process: Process, seq: int, pages: tuple[int, ...]) -> None:
    """At the moment when an engine writes, by a launched step or a chunk."""
    machine = process.node.machine
    if isinstance(machine, HostMachine):
        stay = machine.stays.by_seq.get(seq)
        _check_lone_hold(machine.stays, None if stay is None else stay.transfer, seq, pages)
    elif process.role is Role.PREFILL:
        job = machine.jobs.by_seq.get(seq)
        _check_lone_hold(machine.jobs, None if job is None else job.transfer, seq, pages)
    else:
        t = machine.transfers.by_seq.get(seq)
        holding = None if t is None else machine.transfers.ledger._holdings.get(t.transfer)
        live = () if holding is None or holding.state.value != "live" else holding.pages
        if not all(page in live for page in pages):
            raise Violation("step-write", f"a step of seq {seq} writes {pages}: not live for it")


def _check_lone_hold(owner: Any, transfer: TransferId | None, seq: int, pages: Any) -> None:
    """Whoever is written for holds the pages, and neither another nor the prefix index does."""
    held = owner.pages._held
    cached = _cached(owner.index)
    for page in pages:
        if page not in held.get(transfer, ()):
            raise Violation("step-write", f"seq {seq} is computed in page {page}, not its own")
        others = [other for other, holds in held.items() if page in holds and other != transfer]
        if others or page in cached:
            who = others or "the prefix index"
            raise Violation("step-write", f"seq {seq} writes page {page}, which {who} holds too")


def _cached(index: Any) -> Collection[int]:
    """Pages that the prefix index keeps, where there is one."""
    return getattr(index, "_known", ())


def check_prefix(process: Process, seq: int, found: Rows, own: Rows) -> None:
    """At the moment when rows of a prompt are computed: they read all rows before them."""
    for row, (there, wanted) in enumerate(zip(found, own, strict=True)):
        if there != wanted and there < DAMAGED:
            detail = f"{process.instance} computes seq {seq} on row {row} of {there >> 16}"
            raise Violation("prefix", f"{detail}, its own is of {wanted >> 16}")


def check_machine(machine: Any) -> None:
    """Conservation of pages in one machine."""
    if isinstance(machine, HostMachine):
        stays = machine.stays
        _check_counted(stays, stays.by_transfer)
        reserved = sum(stay.reserved for stay in stays.by_transfer.values())
        if reserved != stays.reserved or reserved > stays.pages.total:
            raise Violation("conservation", f"the host has {reserved} pages reserved")
    elif machine.ROLE is Role.DECODE:
        ledger = machine.transfers.ledger
        pages = list(ledger._free)
        for transfer, holding in ledger._holdings.items():
            if transfer not in machine.transfers.by_transfer:
                raise Violation("conservation", f"pages of {transfer} belong to nobody")
            pages += holding.pages
        if len(ledger._holdings) != len(machine.transfers.by_transfer):
            raise Violation("conservation", "a transfer of decode has no pages")
        if sorted(pages) != list(range(ledger.total)):
            raise Violation("conservation", f"decode's pages are {sorted(pages)}")
    elif machine.ROLE is Role.PREFILL:
        _check_counted(machine.jobs, machine.jobs.by_transfer)


def _check_counted(owner: Any, known: Collection[TransferId]) -> None:
    """Pages with counted holds: each hold is a transfer's or the prefix index's."""
    pool = owner.pages
    holds = [0] * pool.total
    for page in [page for pages in (*pool._held.values(), _cached(owner.index)) for page in pages]:
        holds[page] += 1
    free = [page for page in range(pool.total) if not holds[page]]
    if holds != pool._holds or sorted(pool._free) != free:
        raise Violation("conservation", f"pages have holds {holds}, free are {pool._free}")
    for transfer in pool._held:
        if transfer not in known:
            raise Violation("conservation", f"pages of {transfer} belong to nobody")


def check_quiet(
    copies: dict[tuple[InstanceId, int], Copy],
    writer: InstanceId,
    transfer: TransferId,
    invariant: str,
) -> None:
    """When the writer says that a transfer is over."""
    for copy in copies.values():
        if copy.writer == writer and copy.transfer == transfer:
            raise Violation(invariant, f"{transfer}: copy {copy.number} is not over")


def check_start(writer: Process, copy: Copy) -> None:
    """When the writer queues a copy."""
    if copy.transfer in writer.acked:
        raise Violation("ack", f"{copy.transfer} starts a copy after its end was told")
    if (copy.transfer, copy.source) in writer.charged:
        raise Violation("release", f"{copy.transfer} starts a copy after SourceReleased")


def check_grant(decode: Process, now: int) -> bool:
    """When decode, whose clock says `now`, lets a writer write; whether pages are in quarantine."""
    ledger = decode.node.machine.transfers.ledger
    young = decode.node.machine.transfers._count_at
    percent = decode.node.machine.config.quarantine_percent
    held = sum(
        len(holding.pages)
        for transfer, holding in ledger._holdings.items()
        if holding.state.value == "quarantined" and young.get(transfer, now) <= now
    )
    if decode.asked:
        raise Violation("bound", "decode grants while it drains")
    if held * 100 > percent * ledger.total:
        raise Violation("bound", f"decode grants with {held} pages quarantined")
    return any(holding.state.value == "quarantined" for holding in ledger._holdings.values())


def check_lone_writer(
    processes: Mapping[InstanceId, Process],
    decode: Process,
    transfer: TransferId,
    pages: tuple[int, ...],
) -> None:
    """When decode grants, and when a copy writes: nobody else writes, or may write, into these
    pages. Who may is known from what was said and from who lives, whatever decode's books say."""
    for told in decode.granted:
        if told.transfer == transfer or set(pages).isdisjoint(told.pages):
            continue
        writer = processes.get(told.writer)
        if writer is not None and not writer.exited and told.transfer not in writer.acked:
            raise Violation("conservation", f"{told.transfer} and {transfer} may write {pages}")
    engine = decode.engine
    if isinstance(engine, DecodeEngine):
        for seq, stream in engine.open.items():
            if not set(pages).isdisjoint(stream.pages):
                raise Violation("conservation", f"{transfer} may write {pages}, seq {seq}'s")


def check_refusal(decode: Process, now: int) -> None:
    """When decode refuses for quarantine: enough of the pages can be there for the grace time.
    Nothing is in quarantine for longer than since it was granted."""
    machine = decode.node.machine
    since = now - machine.config.quarantine_grace_ns
    held, total = machine.transfers.ledger._holdings, machine.transfers.ledger.total
    old = 0
    for told in decode.granted:
        holding = held.get(told.transfer)
        if holding is not None and holding.state.value == "quarantined" and told.told_ns <= since:
            old += len(holding.pages)
    if old * 100 <= machine.config.quarantine_percent * total:
        raise Violation("bound", f"decode refuses for quarantine, {old} pages of {total} are old")


def check_superseded(process: Process, peer: Role, old: InstanceId) -> None:
    """When an acceptor ends a stream because of a newer one."""
    current = process.node.machine.links[peer].current
    if current is not None and current.instance != old:
        raise Violation("superseded", f"{current.instance} pushes out {old} at {process.instance}")


def check_order(prefill: Process, seq: int) -> None:
    """When prefill starts a prompt: transfers are numbered in the order of admission."""
    jobs = prefill.node.machine.jobs
    started = _number(jobs.by_seq[seq].transfer)
    for job in jobs.by_transfer.values():
        earlier = job.state.value == "queued" and _number(job.transfer) < started
        if earlier and not _waits_for_prefix(jobs, job):
            raise Violation("order", f"t{started} overtakes {job.transfer}")


def check_open(prefill: Process) -> None:
    """When prefill hands its engine a prompt: how many the engine has by then."""
    engine, limit = prefill.engine, prefill.node.machine.config.open_limit
    assert isinstance(engine, PrefillEngine)
    opened = len(engine.jobs) + sum(1 for m in engine.inbox if isinstance(m, Start))
    if opened > limit:
        raise Violation("bound", f"the engine has {opened} prompts at once, the limit is {limit}")


def check_queue(process: Process) -> None:
    """After each event of lb or prefill."""
    machine = process.node.machine
    queued = len(machine._queue if process.role is Role.LB else machine.jobs.queue)
    if queued > machine.config.queue_limit:
        raise Violation("bound", f"{queued} requests wait in {process.instance}")


def _waits_for_prefix(jobs: Any, job: Any) -> bool:
    """Whether the next page of the prompt is being computed for another one just now."""
    node = getattr(jobs.index, "_root", None)
    page_bytes = jobs.config.page_rows * COLUMNS * 4
    for page in range((job.prompt_rows - 1) // jobs.config.page_rows):
        node = node and node.children.get(job.prompt[page * page_bytes : (page + 1) * page_bytes])
        if node is None or node.digest is None:
            break
    else:
        return False
    return node is not None


def _number(transfer: TransferId) -> int:
    return int(transfer[1:])


def check_withheld(writer: Process, copies: dict[tuple[InstanceId, int], Copy]) -> None:
    """A writer that can never tell so many ends must say that it is broken."""
    stuck = {c.transfer for c in copies.values() if c.writer == writer.instance and c.told}
    if len(stuck) >= 3 and "writer" not in writer.red:
        raise Violation("bound", f"{len(stuck)} ends withheld and the writer is green")

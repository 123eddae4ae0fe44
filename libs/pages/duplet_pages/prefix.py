"""The prefix index: a radix tree over whole rows, a page an edge.

An edge's key is the page's rows themselves, all columns, so two prompts share exactly what is
equal; no hash, name or length stands for rows. One index belongs to one pool of one instance,
hence to one model and dtype.

A page is matchable only when it is computed. While it is being computed it is in the tree as
pending, so that others who need it wait for it instead of computing it again. Order of use: a
page is never older than one that extends it, so the oldest page is always a leaf, and whoever
holds a page holds all before it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from duplet_core.errors import require
from duplet_core.ids import TransferId
from duplet_core.prefix import Match


@dataclass(slots=True)
class _Node:
    """One page of rows below its parent's."""

    key: bytes
    parent: _Node | None
    page: int
    digest: bytes | None = None
    """None while pending."""
    children: dict[bytes, _Node] = field(default_factory=dict)


class RadixIndex:
    """Knows computed pages of prefill's pool by the rows they hold. Owns its tree; the pages
    are `SourcePages`', on which the machine keeps one hold for each page known here."""

    def __init__(self, page_rows: int, columns: int) -> None:
        self._key_bytes = page_rows * columns * 4
        self._root = _Node(b"", None, -1)
        self._known: OrderedDict[int, _Node] = OrderedDict()
        """Computed nodes by page, least recently used first."""
        self._open: dict[TransferId, list[_Node]] = {}
        """By owner: its prompt's nodes, computed ones first."""

    def __len__(self) -> int:
        """Pages known."""
        return len(self._known)

    def match(self, prompt: bytes, most_pages: int) -> Match:
        """See `duplet_core.prefix.PrefixIndex`. Marks what it finds as used now."""
        path: list[_Node] = []
        node, pending = self._root, False
        for key in self._keys(prompt, most_pages):
            child = node.children.get(key)
            if child is None:
                break
            if child.digest is None:
                pending = True
                break
            path.append(child)
            node = child
        self._touch(path)
        pages = tuple(n.page for n in path)
        return Match(pages, tuple(n.digest for n in path if n.digest is not None), pending)

    def begin(self, owner: TransferId, prompt: bytes, pages: tuple[int, ...]) -> None:
        """See `duplet_core.prefix.PrefixIndex`."""
        require(owner not in self._open, "an owner begins once")
        path: list[_Node] = []
        node = self._root
        for key, page in zip(self._keys(prompt, len(pages)), pages, strict=True):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node(key, node, page)
            elif child.page != page:
                # Known, but the prompt ends here: its last row is computed anew, for the draw.
                break
            path.append(child)
            node = child
        self._open[owner] = path

    def computed(self, owner: TransferId, digests: tuple[bytes, ...]) -> tuple[int, ...]:
        """See `duplet_core.prefix.PrefixIndex`."""
        path = self._open.get(owner)
        if path is None:
            return ()
        fresh: list[_Node] = []
        for node, digest in zip(path, digests, strict=False):
            if node.digest is None:
                node.digest = digest
                self._known[node.page] = node
                fresh.append(node)
        self._touch(path[: len(digests)])
        return tuple(n.page for n in fresh)

    def abandon(self, owner: TransferId) -> None:
        """See `duplet_core.prefix.PrefixIndex`."""
        for node in reversed(self._open.pop(owner, [])):
            if node.digest is None:
                require(not node.children, "nobody extends what is not computed")
                self._unlink(node)

    def evict(self, count: int, in_use: Callable[[int], bool]) -> tuple[int, ...]:
        """See `duplet_core.prefix.PrefixIndex`."""
        chosen: list[_Node] = []
        for page, node in self._known.items():
            if len(chosen) >= count:
                break
            if not in_use(page):
                chosen.append(node)
        for node in chosen:
            require(not node.children, "the oldest page that is not in use is a leaf")
            del self._known[node.page]
            self._unlink(node)
        return tuple(n.page for n in chosen)

    def forget(self) -> tuple[int, ...]:
        """See `duplet_core.prefix.PrefixIndex`. Owners that compute go on, for themselves."""
        pages = tuple(self._known)
        self._root.children.clear()
        self._known.clear()
        self._open.clear()
        return pages

    def _keys(self, prompt: bytes, most_pages: int) -> list[bytes]:
        size = self._key_bytes
        whole = min(len(prompt) // size, most_pages)
        return [prompt[i * size : (i + 1) * size] for i in range(whole)]

    def _touch(self, path: list[_Node]) -> None:
        for node in reversed(path):
            self._known.move_to_end(node.page)

    def _unlink(self, node: _Node) -> None:
        assert node.parent is not None
        del node.parent.children[node.key]

"""Who owns a page: pure integer arithmetic that every rank computes alike.

Ids c, c + W, c + 2W, ... are class c and lie in the arrays of rank c, packed: the local index of an
id is id // W. With one class every rank holds every page.

`classes` is W where the KV is split and 1 where it is not. A *logical page* k is the k-th page of
one conversation. The first `replicated_pages` of a conversation are on every rank (striped only).
"""

from engine.errors import ResidueMismatch

STRIPED = "striped"
OWNER = "owner"
PLACEMENTS = (STRIPED, OWNER)


def page_class(page_id, classes):
    """The class of a page id, and so the rank that holds it."""
    return page_id % classes


def local_index(page_id, classes):
    """Where a page lies among the split pages of the rank that holds it."""
    return page_id // classes


def class_size(total, classes, c):
    """How many of the ids 0 .. total - 1 are class c."""
    return (total - c + classes - 1) // classes


def stripe(logical_page, classes):
    """The class of the page id behind a logical page that is split under the striped placement."""
    return logical_page % classes


def needed(placement, pages, replicated_pages, classes, owner=0):
    """How many split pages of each class a conversation of `pages` logical pages takes.

    Striped: page k >= replicated_pages is class k % classes, pages below come from the replicated
    region and count in no class. Owner: all are class `owner`. Returns a list of `classes` counts.
    """
    counts = [0] * classes
    if placement == OWNER:
        counts[owner] = pages
        return counts
    for c in range(classes):
        below = class_size(min(replicated_pages, pages), classes, c)
        counts[c] = class_size(pages, classes, c) - below
    return counts


def smallest_pool(counts):
    """The fewest split pages in which every class c has counts[c]: what a refusal advises."""
    classes = len(counts)
    return max(((n - 1) * classes + c + 1 for c, n in enumerate(counts) if n), default=0)


def choose_owner(available):
    """The class a new conversation goes to: most available pages, lowest rank on ties."""
    return max(range(len(available)), key=lambda rank: (available[rank], -rank))


def check_residue(page_id, expected_class, classes, rank):
    """Raise ResidueMismatch where a received page id is not of the class it must be."""
    if page_id < 0 or page_class(page_id, classes) != expected_class:
        raise ResidueMismatch(
            f"rank {rank} received page id {page_id}, which is class {page_id % classes} of"
            f" {classes}, where class {expected_class} was expected",
            hint="The ranks disagree about the pool: start them all with the same options and the"
                 " same version.",
            rank=rank,
        )

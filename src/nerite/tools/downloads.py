"""``nerite downloads``: lists and removes the models that were downloaded from the Hugging Face hub."""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from nerite.cli.command import complain, new_parser, show, show_json, show_table, status_of
from nerite.core.errors import InvalidArgument, NotFound, Unavailable
from nerite.core.transfer import readable_size
from nerite.sources.hub_cache import CachedRevision, HubCache, cache_root
from nerite.sources.name import HubName, parse_bare_name, parse_name

_PROGRAM: Final = "nerite downloads"
_DAY: Final = 24 * 3600.0
_EPILOG: Final = """\
Downloads are in the cache of the Hugging Face library ($HF_HUB_CACHE, or $HF_HOME/hub, or ~/.cache/huggingface/hub), so
its other tools use the same files, and what they have downloaded is listed here. A model that a running server uses, or
that is being downloaded, is not removed. Copies that nerite add made are independent of it.

Examples:
  nerite downloads ls
  nerite downloads rm Qwen/Qwen3-0.6B
  nerite downloads rm Qwen/Qwen3-0.6B@c1899de289a04d12100db370d81485cdf75e47ca
  nerite downloads prune                     what broken downloads have left, and revisions that were replaced
  nerite downloads prune --unused-for 30     also models that were not used for 30 days
"""
_HEADINGS: Final = ("Model", "Revision", "Commit", "Size", "Unused for", "")


def run(arguments: Sequence[str]) -> int:
    """List or remove downloads; return the exit status."""
    return status_of(_PROGRAM, lambda: _run(_parser().parse_args(arguments)))


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(_PROGRAM, "List and remove models that were downloaded from the Hugging Face hub.", _EPILOG)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser("ls", help="list the models, with size, revisions and age")
    listing.add_argument("--json", action="store_true", help="print the list as JSON")
    removal = actions.add_parser("rm", help="remove models, or one revision of each")
    removal.add_argument("models", metavar="ORG/NAME[@COMMIT]", nargs="+", help="model to remove")
    pruning = actions.add_parser("prune", help="remove what nothing refers to")
    pruning.add_argument(
        "--unused-for", type=float, metavar="DAYS", help="also remove models that were not used for this long"
    )
    pruning.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    return parser


def _run(options: argparse.Namespace) -> int:
    cache = HubCache(cache_root(os.environ))
    if options.action == "ls":
        return _list(cache, as_json=options.json)
    if options.action == "rm":
        return _remove(cache, [_name(text) for text in options.models])
    return _prune(cache, options.unused_for, dry=options.dry_run)


def _list(cache: HubCache, *, as_json: bool) -> int:
    found, unfinished, now = cache.revisions(), cache.unfinished(), time.time()
    if as_json:
        show_json(
            {
                "directory": str(cache.root),
                "models": [{**each._asdict(), "names": list(each.names)} for each in found],
                "unfinished": unfinished,
            }
        )
        return 0
    if not found and not unfinished:
        show(f"No models in {cache.root}.")
        return 0
    rows = [
        (
            each.repository,
            ", ".join(each.names),
            each.commit[:12],
            readable_size(each.size),
            f"{(now - each.used) / _DAY:.1f} days",
            "" if each.complete else "incomplete",
        )
        for each in found
    ]
    rows += [(name, "", "", readable_size(size), "", "broken download") for name, size in sorted(unfinished.items())]
    show_table(_HEADINGS, rows)
    return 0


def _name(text: str) -> HubName:
    name = parse_name(text) or parse_bare_name(text)
    if not isinstance(name, HubName) or name.file:
        raise InvalidArgument(
            f"'{text}' is not the name of a model.\n    Write ORG/NAME, as 'nerite downloads ls' does."
        )
    return name


def _remove(cache: HubCache, names: Sequence[HubName]) -> int:
    for name in names:
        here = [each for each in cache.revisions() if each.repository == name.repository]
        chosen = [each.commit for each in here if _is_meant(each, name.revision)]
        if not chosen and (name.revision or name.repository not in cache.unfinished()):
            what = f"revision '{name.revision}' of '{name.repository}'" if here else f"model '{name.repository}'"
            raise NotFound(f"there is no {what} in {cache.root}.\n    What is there: nerite downloads ls")
        freed = cache.remove(name.repository, chosen if name.revision else None)
        show(f"removed {name}: {readable_size(freed)}")
    return 0


def _is_meant(each: CachedRevision, revision: str) -> bool:
    return not revision or revision in each.names or (len(revision) >= 7 and each.commit.startswith(revision))


def _prune(cache: HubCache, unused_for: float | None, *, dry: bool) -> int:
    """Remove broken downloads, revisions without a name beside one with a name, and models that are old."""
    now, status = time.time(), 0
    here, unfinished = cache.revisions(), cache.unfinished()
    named = Counter(each.repository for each in here if each.names)
    removed = [
        each
        for each in here
        if (not each.names and named[each.repository])
        or (unused_for is not None and now - each.used >= unused_for * _DAY)
    ]
    for repository, size in sorted(unfinished.items()):
        what = f"a broken download of {repository}"
        status |= _removal(what, size, partial(cache.remove_parts, repository), dry=dry)
    for each in removed:
        what = f"{each.repository}@{each.commit[:12]}"
        act = partial(cache.remove, each.repository, [each.commit], parts=False)
        status |= _removal(what, each.size, act, dry=dry)
    if not removed and not unfinished:
        show("Nothing to remove.")
    return status


def _removal(what: str, size: int, remove: Callable[[], int], *, dry: bool) -> int:
    """Remove something, and say so; return 1 if it is in use."""
    try:
        if not dry:
            remove()
    except Unavailable as error:
        complain(_PROGRAM, error.message)
        return 1
    show(f"{'would remove' if dry else 'removed'} {what}: {readable_size(size)}")
    return 0

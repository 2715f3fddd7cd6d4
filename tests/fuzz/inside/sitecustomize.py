"""Loaded into the server that is fuzzed, by its path: tells what the collector of cycles finds there.

The server says that requests make no cycles, so that what clients send is freed when it is answered. Python keeps what
it collects; asked by a file, in the folder that the environment names, the kinds of it are written to another one.
"""

import contextlib
import gc
import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import TracebackType


def _kind(each: object) -> str:
    """Return the type of an object; of a traceback, the place as well."""
    kind = f"{type(each).__module__}.{type(each).__qualname__}"
    if isinstance(each, TracebackType):
        code = each.tb_frame.f_code
        kind += f" of {os.path.basename(code.co_filename)} {code.co_qualname}"
    return kind


def _tell(folder: Path) -> None:
    asked, told = folder / "asked", folder / "told"
    kinds: Counter[str] = Counter()
    while True:
        time.sleep(0.05)
        kinds.update(_freed())  # or the memory of the server would grow by what it leaves behind
        if "nerite.server_process" not in sys.modules or not asked.exists():
            continue
        first = not gc.get_debug()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kinds.update(_freed())
        with contextlib.suppress(OSError):  # the run is over
            asked.unlink()
            (folder / "new").write_text(json.dumps({} if first else kinds))
            (folder / "new").rename(told)
        kinds.clear()


def _freed() -> list[str]:
    """Return the kinds of what was collected, and free it, which the collector does not do while it saves all."""
    if not gc.garbage:
        return []
    kinds = [*map(_kind, gc.garbage)]
    gc.garbage.clear()
    gc.set_debug(0)
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    return kinds


if "FUZZ_COLLECTOR" in os.environ:
    threading.Thread(target=_tell, args=(Path(os.environ["FUZZ_COLLECTOR"]),), daemon=True).start()
